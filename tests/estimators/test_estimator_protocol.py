"""Properties of every estimator under permutation, degenerate data, missing uploads, jit and vmap.

The order of clients does not matter, degenerate data give finite and sensible estimates, clients that did not send are
ignored, and everything jits and vmaps over settings.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.estimators import base, bernoulli, gaussian, gaussian_closed_form, mixture, release
from jaxpfl.estimators.base import Estimator, Samples
from jaxpfl.estimators.clustering import Clusters
from jaxpfl.priors.discrete import Discrete
from jaxpfl.support.errors import JaxpflError

KNOWN = Discrete(jnp.array([0.4, 0.6]), jnp.array([[-1.0], [1.0]]))
VECTORS: dict[str, Estimator] = {
    "local": gaussian.local(),
    "global": gaussian.global_mean(),
    "known variances": gaussian.personalized(st2=0.2, sx2=0.5),
    "estimated variances": gaussian.personalized(),
    "gaussian mechanism, norm": gaussian.personalized(st2=0.2, sx2=0.5, release=release.gaussian_vector(4.0, 0.7)),
    "one bit": gaussian.personalized(st2=0.2, sx2=0.5, release=release.one_bit(4.0, 1.0)),
    "one bit, split": gaussian.split(4.0, 1.0, 0.5),
    "james-stein": gaussian.james_stein(0.5),
    "centers known": mixture.discrete_posterior(KNOWN, 0.5),
    "em": mixture.em(2, sx2=0.5, steps=10, starts=2),
    "em, variance fitted": mixture.em(2, steps=10, starts=2),
    "alternating": mixture.alternating(2, 1, 0.5, steps=5, starts=2),
    "private k-means": mixture.private(2, 0.5, radius=4.0, noise=0.5, steps=4),
    "private k-means, soft": mixture.private(2, 0.5, radius=4.0, noise=0.5, steps=4, soft=True),
}
PROBABILITIES: dict[str, Estimator] = {
    "local share": bernoulli.local(),
    "global share": bernoulli.global_mean(),
    "known beta": bernoulli.beta_posterior(2.0, 3.0),
    "corrected": bernoulli.personalized(),
    "printed": bernoulli.personalized(printed=True),
    "variance given": bernoulli.personalized(variance=0.05),
    "split": bernoulli.split(1.0),
    "printed private": bernoulli.printed_private(1.0),
}
EVERY = VECTORS | PROBABILITIES
ROUNDS = {"alternating": 3}
OF_EACH_KIND = (
    *("estimated variances", "gaussian mechanism, norm", "one bit, split", "james-stein", "em, variance fitted"),
    *("alternating", "private k-means, soft", "corrected", "split"),
)


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


def named(*without: str) -> pytest.MarkDecorator:
    """Estimators whose names do not begin so; in the default run one of each kind."""
    names = [name for name in EVERY if not name.startswith(without)]
    marked = [name if name in OF_EACH_KIND else pytest.param(name, marks=pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("name", marked)


@named()
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
@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_order_and_padding_change_nothing(name: str):
    clients, order = some_clients(name), np.random.default_rng(1).permutation(12)
    straight = run(name, clients, jnp.arange(12))
    shuffled = run(name, jax.tree.map(lambda a: a[order], clients), jnp.asarray(order))
    np.testing.assert_allclose(shuffled, straight[order], rtol=2e-4, atol=2e-5)
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


@named()
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


@named("global", "james", "centers", "known beta")
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


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "at least one client is required, got none"),
        ([np.ones(3), np.zeros(0)], "client 1 has no samples"),
        ([np.ones((3, 2)), np.ones((2, 1))], "client 1 has samples of shape"),
        ([np.ones(3), np.array([1.0, np.nan])], "client 1 has a sample that is NaN or infinite"),
        ([2e6 + np.arange(3.0), np.ones(2)], r"values of up to 2e\+06 that differ by 2 lose their digits in float32"),
        ([np.array([[1, 1.7e9], [1e9, 1.7e9 + 1]])], r"values of up to 1.7e\+09 that differ by 1 lose their digits"),
    ],
)
def test_bad_clients_are_refused_in_one_line(clients: list, message: str):
    with pytest.raises(JaxpflError, match=message):
        base.stack(clients)


truncated_mean = jax.jit(base.truncated_mean)


@pytest.mark.parametrize("m", [3, 10, 99])
def test_of_single_samples_no_variance_is_learned(m: int):
    """All others of the one client with five samples have one: its estimate is their mean, whatever they round to."""
    rng = np.random.default_rng(m)
    clients = [np.array([1.0, 0, 0, 1, 1]), *rng.integers(0, 2, size=(m - 1, 1)).astype(float)]
    estimates = jax.jit(lambda clients: base.estimate(bernoulli.personalized(), jax.random.key(0), clients).estimates)
    made = estimates(base.stack(clients))
    assert made.dtype == jnp.float32
    assert float(made[0]) == pytest.approx(np.mean(clients[1:]), abs=1e-5)


@pytest.mark.parametrize("stddev", [1e-3, 0.05, 1.0, 60.0, 1e3, 1e6])
@pytest.mark.parametrize("mean", [-30.0, -0.01, 0.1, 0.25, 0.3, 5.0])
def test_truncated_posterior_mean_in_single_precision(mean: float, stddev: float):
    """Against a fine sum, about the likeliest value, in double precision."""
    most = 0.25
    nearest = min(max(mean, 0), most)
    reach = min(most, 40 * stddev, 100 * stddev**2 / max(abs(nearest - mean), 1e-9))
    low, high = max(0, nearest - reach), min(most, nearest + reach)
    x = low + (high - low) * (np.arange(200_000) + 0.5) / 200_000
    log_p = -((x - mean) ** 2 - (nearest - mean) ** 2) / (2 * stddev**2)
    p = np.exp(log_p - log_p.max())
    found = truncated_mean(jnp.asarray(mean), jnp.asarray(stddev), jnp.asarray(most))
    assert found.dtype == jnp.float32
    assert float(found) == pytest.approx((p * x).sum() / p.sum(), abs=1e-6, rel=1e-4)


def test_a_number_seen_without_error_is_itself():
    found = truncated_mean(jnp.array([-1.0, 0.1, 1.0]), jnp.zeros(3), jnp.full(3, 0.25))
    np.testing.assert_allclose(found, [0, 0.1, 0.25])


@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        ([0.0, 3.0, 1.0], [0.0, 0.75, 0.25]),
        ([-2.0, 0.3, 0.1], [0.0, 0.75, 0.25]),
        ([0.0, -1.0, 0.0], [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_shares_of_clusters_are_those_of_their_points(sizes: list[float], shares: list[float]):
    """Noisy sizes may be negative or below one; without any points all clusters are alike."""
    found = Clusters(jnp.zeros((3, 2)), jnp.array(sizes)).prior
    np.testing.assert_allclose(found[0], shares, rtol=1e-6)


@pytest.mark.parametrize(("s2", "st2", "sq2"), [(0.0167, 0.01, 0.0), (0.0167, 0.01, 100.0), (1.0, 0.2, 3.0)])
def test_gain_and_the_clients_and_noise_that_it_takes(s2: float, st2: float, sq2: float):
    with jax.enable_x64(True):
        limit = float(gaussian_closed_form.most_gain(s2, st2))
        for share in (0.1, 0.5, 0.9):
            target = share * limit
            m = float(gaussian_closed_form.clients_needed(target, s2, st2, sq2))
            assert m >= 2
            assert float(gaussian_closed_form.gain(m, s2, st2, sq2)) >= target * (1 - 1e-9)
            if m > 2:
                assert float(gaussian_closed_form.gain(m - 1, s2, st2, sq2)) < target
            noise = float(gaussian_closed_form.most_noise(target, m + 50, s2, st2))
            assert float(gaussian_closed_form.gain(m + 50, s2, st2, noise)) == pytest.approx(target, rel=1e-9)
        assert np.isinf(float(gaussian_closed_form.clients_needed(limit * 1.01, s2, st2, sq2)))
        assert np.isnan(float(gaussian_closed_form.most_noise(limit, 10, s2, st2)))
        m = 37
        by_hand = (m - 1) / m * s2 / (s2 + st2 + sq2 / (m - 1))
        assert float(gaussian_closed_form.gain(m, s2, st2, sq2)) == pytest.approx(by_hand, rel=1e-12)
        # Ignoring the noise never helps, and one estimate for all is the same with weight zero.
        assert float(gaussian_closed_form.careless_gain(m, s2, st2, sq2)) <= by_hand + 1e-12
        worse = st2 + sq2 / (m - 1) > s2
        assert (float(gaussian_closed_form.global_gain(m, s2, st2, sq2)) < 0) == worse
