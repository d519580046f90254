"""Properties of every estimator under permutation, degenerate data, missing uploads, jit and vmap.

The order of clients does not matter, degenerate data give finite and sensible estimates, clients that did not send are
ignored, and everything jits and vmaps over settings.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.estimators import base, bernoulli, gaussian, mixture, release
from jaxpfl.estimators.base import Estimator, Samples
from jaxpfl.priors.discrete import Discrete
from jaxpfl.support.errors import JaxpflError

KNOWN = Discrete(jnp.array([0.4, 0.6]), jnp.array([[-1.0], [1.0]]))
VECTORS: dict[str, Estimator] = {
    "local": gaussian.local(),
    "global": gaussian.global_mean(),
    "known variances": gaussian.personalized(st2=0.2, sx2=0.5),
    "estimated variances": gaussian.personalized(),
    "quantized": gaussian.personalized(st2=0.2, sx2=0.5, release=release.quantized(4.0, 3)),
    "gaussian mechanism": gaussian.personalized(st2=0.2, sx2=0.5, release=release.gaussian(4.0, 0.7)),
    "gaussian mechanism, norm": gaussian.personalized(st2=0.2, sx2=0.5, release=release.gaussian_vector(4.0, 0.7)),
    "one bit": gaussian.personalized(st2=0.2, sx2=0.5, release=release.one_bit(4.0, 1.0)),
    "one bit, split": gaussian.split(4.0, 1.0, 0.5),
    "james-stein": gaussian.james_stein(0.5),
    "centers known": mixture.known(KNOWN, 0.5),
    "em": mixture.em(2, sx2=0.5, steps=10, starts=2),
    "em, variance fitted": mixture.em(2, steps=10, starts=2),
    "alternating": mixture.alternating(2, 1, 0.5, steps=5, starts=2),
    "private k-means": mixture.private(2, 0.5, radius=4.0, noise=0.5, steps=4),
    "private k-means, soft": mixture.private(2, 0.5, radius=4.0, noise=0.5, steps=4, soft=True),
}
PROBABILITIES: dict[str, Estimator] = {
    "local share": bernoulli.local(),
    "global share": bernoulli.global_mean(),
    "known beta": bernoulli.known_beta(2.0, 3.0),
    "corrected": bernoulli.personalized(),
    "printed": bernoulli.personalized(printed=True),
    "variance given": bernoulli.personalized(variance=0.05),
    "split": bernoulli.split(1.0),
    "split, plus one error": bernoulli.split(1.0, plus_error=True),
    "printed private": bernoulli.printed_private(1.0),
}
EVERY = VECTORS | PROBABILITIES
ROUNDS = {"alternating": 3}


def some_clients(name: str, m: int = 12, n: int = 4, seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    if name in PROBABILITIES:
        x = (rng.uniform(size=(m, n)) < rng.beta(2, 2, size=(m, 1))).astype(np.float32)
    else:
        x = (rng.choice([-1, 1], size=(m, 1, 1)) + rng.normal(size=(m, n, 1))).astype(np.float32)
    mask = np.arange(n) < rng.integers(1, n + 1, size=(m, 1))
    if name == "james-stein":  # which is for equal sizes
        mask = np.ones_like(mask)
    return Samples(jnp.asarray(x), jnp.asarray(mask))


@functools.cache
def program(name: str):
    rounds = ROUNDS.get(name, 1)

    @jax.jit
    def estimates(clients: Samples, ids, sent):
        made = base.estimate(EVERY[name], jax.random.key(3), clients, client_ids=ids, sent=sent, rounds=rounds)
        return made.estimates

    return estimates


def run(name: str, clients: Samples, ids=None, sent=None) -> np.ndarray:
    m = len(clients.mask)
    ids = jnp.arange(m) if ids is None else ids
    return np.asarray(program(name)(clients, ids, jnp.ones(m, bool) if sent is None else sent))


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_the_order_of_clients_does_not_matter(name: str):
    clients, order = some_clients(name), np.random.default_rng(1).permutation(12)
    straight = run(name, clients, jnp.arange(12))
    shuffled = run(name, jax.tree.map(lambda a: a[order], clients), jnp.asarray(order))
    np.testing.assert_allclose(shuffled, straight[order], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", EVERY)
def test_what_is_not_sent_is_not_looked_at(name: str):
    """Other data of clients that do not send change nothing for those that do; they still get estimates."""
    clients = some_clients(name)
    sent = jnp.arange(12) % 3 != 0
    other = clients._replace(x=jnp.where(sent.reshape(-1, *[1] * (clients.x.ndim - 1)), clients.x, 1.0))
    kept = np.asarray(sent)
    a, b = run(name, clients, sent=sent), run(name, other, sent=sent)
    np.testing.assert_allclose(a[kept], b[kept], rtol=1e-5, atol=1e-6)
    assert np.isfinite(a).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_padding_changes_nothing(name: str):
    clients = some_clients(name)
    padding = [(0, 0), (0, 3), *[(0, 0)] * (clients.x.ndim - 2)]
    junk = jnp.pad(clients.x, padding, constant_values=1e30)
    padded = Samples(junk, jnp.pad(clients.mask, [(0, 0), (0, 3)]))
    masked = clients.mask.reshape(*clients.mask.shape, *[1] * (clients.x.ndim - 2))
    clients = clients._replace(x=jnp.where(masked, clients.x, 0))
    np.testing.assert_allclose(run(name, padded), run(name, clients), rtol=1e-5, atol=1e-6)


def degenerate(name: str) -> dict[str, tuple[Samples, np.ndarray]]:
    """Clients, and which of them send: all of one shape, so that one program does for all."""
    single = name in PROBABILITIES
    shape = (12, 4) if single else (12, 4, 1)
    rng = np.random.default_rng(2)
    spread = (rng.uniform(size=shape) < 0.5) if single else rng.normal(size=shape)
    spread, everybody, whole = spread.astype(np.float32), np.ones(12, bool), np.ones((12, 4), bool)

    def samples(x, mask=whole) -> Samples:
        return Samples(jnp.asarray(x, jnp.float32), jnp.asarray(mask))

    return {
        "all equal": (samples(np.full(shape, 1.0 if single else 0.75)), everybody),
        "all zero": (samples(np.zeros(shape)), everybody),
        "single samples": (samples(spread, np.arange(4) < np.ones((12, 1))), everybody),
        "two clients": (samples(spread), np.arange(12) < 2),
        "one client": (samples(spread), np.arange(12) < 1),
        "nobody": (samples(spread), np.zeros(12, bool)),
    }


@pytest.mark.parametrize("name", EVERY)
def test_degenerate_data_give_finite_estimates(name: str):
    for case, (clients, sent) in degenerate(name).items():
        made = run(name, clients, sent=jnp.asarray(sent))
        assert np.isfinite(made).all(), case
        if name in PROBABILITIES and not name.startswith("printed"):  # whose weights may be above one
            assert made.min() >= 0, case
            assert made.max() <= 1, case


@pytest.mark.parametrize("name", ["local", "global", "known variances", "estimated variances", "james-stein"])
def test_clients_that_agree_are_told_what_they_hold(name: str):
    np.testing.assert_allclose(run(name, degenerate(name)["all equal"][0]), 0.75, rtol=1e-6)


@pytest.mark.parametrize("name", ["local share", "global share", "corrected", "printed"])
@pytest.mark.parametrize(("case", "value"), [("all equal", 1.0), ("all zero", 0.0)])
def test_probabilities_of_zero_and_one(name: str, case: str, value: float):
    np.testing.assert_allclose(run(name, degenerate(name)[case][0]), value)


@pytest.mark.parametrize("name", [n for n in EVERY if not n.startswith(("global", "james", "centers", "known beta"))])
def test_nobody_sends_and_everybody_keeps_its_own(name: str):
    clients = some_clients(name)
    own = "local share" if name in PROBABILITIES else "local"
    np.testing.assert_allclose(run(name, clients, sent=jnp.zeros(12, bool)), run(own, clients), rtol=1e-5)


def test_settings_are_one_more_axis():
    """vmapped over eps and over st2 at once, against runs of their own."""
    clients = some_clients("one bit")

    def made(epsilon, st2):
        sent = release.one_bit(4.0, epsilon)
        estimator = gaussian.personalized(st2=st2, sx2=0.5, release=sent)
        return base.estimate(estimator, jax.random.key(3), clients).estimates

    epsilons, variances = jnp.array([0.5, 1.0, 3.0]), jnp.array([0.0, 0.2])
    grid = jax.jit(jax.vmap(lambda e: jax.vmap(lambda v: made(e, v))(variances)))(epsilons)
    assert grid.shape == (3, 2, 12, 1)
    alone = jax.jit(made)
    for i, epsilon in enumerate(epsilons):
        for j, variance in enumerate(variances):
            np.testing.assert_allclose(grid[i, j], alone(epsilon, variance), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_split_bits_find_the_variance():
    """One bit each, eps = 6, m = 40000, b = 5: mu within 4 standard errors (.035), st2 within 4 of its own (.11)."""
    rng = np.random.default_rng(4)
    x = 1 + np.sqrt(0.5) * rng.normal(size=(40_000, 1, 1)) + 0.5 * rng.normal(size=(40_000, 4, 1))
    estimator = gaussian.split(5.0, 6.0, 0.25)
    made = base.estimate(estimator, jax.random.key(0), base.every(jnp.asarray(x, jnp.float32)))
    assert float(made.shared.mean[0]) == pytest.approx(1.0, abs=0.14)
    assert float(made.shared.st2) == pytest.approx(0.5, abs=0.44)


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "no clients"),
        ([np.ones(3), np.zeros(0)], "client 1 has no samples"),
        ([np.ones((3, 2)), np.ones((2, 1))], "client 1: samples of shape"),
        ([np.ones(3), np.array([1.0, np.nan])], "client 1: a sample is NaN or infinite"),
        ([2e6 + np.arange(3.0), np.ones(2)], r"values of up to 2e\+06 that differ by 2 lose their digits in float32"),
        ([np.array([[1, 1.7e9], [1e9, 1.7e9 + 1]])], r"values of up to 1.7e\+09 that differ by 1 lose their digits"),
    ],
)
def test_bad_clients_are_refused_in_one_line(clients: list, message: str):
    with pytest.raises(JaxpflError, match=message):
        base.stack(clients)


def test_what_single_precision_shows_or_double_does_is_stacked():
    base.stack([np.full(3, 2e6), np.array([7.0])])  # of these nothing is lost
    base.stack([2e3 + np.arange(3.0)])
    with jax.enable_x64(True):
        np.testing.assert_array_equal(base.stack([1.7e9 + np.arange(3.0)]).x, [[1.7e9, 1.7e9 + 1, 1.7e9 + 2]])
