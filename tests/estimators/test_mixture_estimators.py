"""Mixtures of clients: Theorem 6, EM's likelihood, the printed alternation, and private k-means with its account."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from jaxpfl.estimators import base, clustering, mixture
from jaxpfl.estimators.base import Samples
from jaxpfl.priors.discrete import Discrete
from jaxpfl.support.errors import JaxpflError

CENTERS = np.array([[0.0, 0.5], [0.43, -0.25], [-0.43, -0.25]])


pytestmark = pytest.mark.usefixtures("x64")


def clients(m: int, seed: int = 0, sx: float = 0.5, most: int = 5, least: int = 5) -> tuple[Samples, np.ndarray]:
    rng = np.random.default_rng(seed)
    theta = CENTERS[rng.integers(3, size=m)]
    sizes = rng.integers(least, most + 1, size=m)
    x = theta[:, None] + sx * rng.normal(size=(m, most, 2))
    return Samples(jnp.asarray(x), jnp.arange(most) < jnp.asarray(sizes)[:, None]), theta


def error(estimator, data: Samples, theta: np.ndarray, rounds: int = 1) -> float:
    made = base.estimate(estimator, jax.random.key(0), data, rounds=rounds)
    return float(((np.asarray(made.estimates) - theta) ** 2).sum(axis=1).mean())


def test_theorem_6_by_hand():
    """The posterior mean from the samples' own densities, also for clients of unequal size."""
    data, _ = clients(20, least=1)
    p = np.array([0.5, 0.3, 0.2])
    estimator = mixture.discrete_posterior(Discrete(jnp.asarray(p), jnp.asarray(CENTERS)), 0.25)
    got = jax.jit(lambda data: base.estimate(estimator, jax.random.key(0), data))(data)
    for i in range(20):
        x = np.asarray(data.x[i])[np.asarray(data.mask[i])]
        weight = p * np.exp(-((x[:, None] - CENTERS) ** 2).sum(axis=(0, 2)) / (2 * 0.25))
        np.testing.assert_allclose(got.estimates[i], weight / weight.sum() @ CENTERS, rtol=1e-9)


@pytest.mark.parametrize("known", [True, False])
def test_em_never_lowers_the_likelihood_of_the_samples(known: bool):
    data, _ = clients(60, least=1)
    keys = jax.random.split(jax.random.key(0), 60)
    estimator = mixture.em(3, sx2=0.25 if known else None)
    messages, _ = jax.jit(jax.vmap(estimator.summarize, in_axes=(0, None, 0)))(keys, None, data)
    everybody = jnp.ones(60, bool)
    at = mixture.Mixture(jnp.full(3, 1 / 3), messages.mean[:3], jnp.asarray(0.25 if known else 1.0))
    step = jax.jit(lambda at: mixture.fit(at, messages, everybody, 0.0, 1e-6, 1, noise_known=known))

    @jax.jit
    def log_likelihood(at):
        """Log-likelihood of the messages and of the samples about them, with all constants in sx2."""
        square = clustering.square_distances(messages.mean, at.mu)
        joint = (
            jnp.log(at.p) - messages.size[:, None] * square / (2 * at.sx2) - jnp.log(at.sx2 / messages.size)[:, None]
        )
        within = -messages.scatter / (2 * at.sx2) - (messages.size - 1) * jnp.log(at.sx2)
        return (jax.nn.logsumexp(joint, axis=1) + within).sum()

    values = []
    for _ in range(60):
        values.append(float(log_likelihood(at)))
        at = step(at)
    assert np.diff(values).min() > -1e-9
    assert values[-1] > values[0] + 1
    if not known:
        # The likelihood that EM raises is that of the samples themselves, up to a constant.
        def by_samples(at: mixture.Mixture) -> float:
            p, mu, sx2 = (np.asarray(part) for part in at)
            total = 0.0
            for i in range(60):
                x = np.asarray(data.x[i])[np.asarray(data.mask[i])]
                square = ((x[:, None] - mu) ** 2).sum(axis=(0, 2))
                logs = np.log(p) - square / (2 * sx2) - len(x) * np.log(sx2)
                total += np.logaddexp.reduce(logs)
            return total

        first = mixture.Mixture(jnp.full(3, 1 / 3), messages.mean[:3], jnp.asarray(1.0))
        assert by_samples(at) - by_samples(first) == pytest.approx(values[-1] - values[0], rel=1e-5)


@pytest.mark.slow
def test_em_is_next_to_the_known_centers_and_the_printed_alternation_gets_worse():
    """m = 1000, n = 5, sx = .5, centers of norm .5 (the spec's .022 -> .070 in such a setting): one population.

    The errors' spread over populations is 4 % (EM's .0229 over .0225); the alternation's ten rounds triple it."""
    data, theta = clients(1000)
    best = error(mixture.discrete_posterior(Discrete(jnp.full(3, 1 / 3), jnp.asarray(CENTERS)), 0.25), data, theta)
    fitted = error(mixture.em(3, sx2=0.25), data, theta)
    rounds = [error(mixture.alternating(3, 2, 0.25), data, theta, rounds=t) for t in (2, 10)]
    assert best < fitted < 1.1 * best
    assert error(mixture.em(3), data, theta) < 1.1 * best
    assert rounds[0] < 1.5 * best
    assert rounds[1] > 2 * best


def test_kmeans_finds_groups_that_lie_apart():
    rng = np.random.default_rng(0)
    places = np.array([[0.0, 0], [10, 0], [0, 10], [10, 10]])
    points = jnp.asarray(places[rng.integers(4, size=200)] + 0.1 * rng.normal(size=(200, 2)))
    scores = jax.random.gumbel(jax.random.key(0), (200, 4, 4))
    kmeans = jax.jit(clustering.kmeans, static_argnums=3)
    found = kmeans(scores, points, jnp.ones(200, bool), 10)
    got = np.asarray(found.centers)
    for place in places:
        assert np.linalg.norm(got - place, axis=1).min() < 0.1
    assert int(found.sizes.sum()) == 200
    # Points that do not count are not looked at.
    alone = kmeans(scores, points, jnp.arange(200) < 1, 10)
    np.testing.assert_allclose(alone.centers, np.broadcast_to(points[0], (4, 2)), atol=1e-9)


def test_one_client_changes_a_private_step_by_no_more_than_claimed():
    """Over hostile clients: (numbers, sums over the radius) move by at most sqrt(2) in L2, hard and soft."""
    rng = np.random.default_rng(1)
    centers = jnp.asarray(rng.normal(size=(4, 3)))
    in_ball, nearest = (
        jax.jit(lambda point: clustering.within_ball(point[None], 2.0) / 2.0),
        jax.jit(clustering.nearest),
    )

    @jax.jit
    def square(inside, member):
        total, sizes = clustering.sums(inside, jnp.ones(1, bool), member)
        return (total**2).sum() + (sizes**2).sum()

    hostile = [np.zeros(3), 1e30 * np.ones(3), np.array([np.nan, np.inf, -1e300]), rng.normal(size=3) * 50]
    for point in hostile:
        inside = in_ball(point)
        assert np.isfinite(np.asarray(inside)).all()
        for member in (nearest(inside, centers), special.softmax(rng.normal(size=(1, 4)))):
            assert np.sqrt(float(square(inside, member))) <= clustering.SENSITIVITY * (1 + 1e-9)
    worst = np.array([[1.0, 0, 0]])
    assert float(square(worst, nearest(worst, centers))) == pytest.approx(2)  # and that much it may


def test_private_kmeans_adds_the_noise_it_accounts_for():
    """Clients at one point, one step: the released numbers have the standard deviation z sqrt(2). 4000 runs: the bounds
    are 4.5 standard errors (1.1 % each), which reject 2/3 and 3/2 of it."""
    points, everybody = jnp.ones((50, 1)) * 0.5, jnp.ones(50, bool)
    z = 3.0

    def numbers(key):
        begin = jnp.array([[0.4], [-0.4]])
        return clustering.noisy_lloyd(key, begin, points, everybody, radius=1.0, noise=z, steps=1).sizes

    # In turn: XLA folds what depends on the points alone, and 4000 copies of it take ten seconds.
    found = np.asarray(jax.jit(lambda keys: jax.lax.map(numbers, keys))(jax.random.split(jax.random.key(0), 4000)))
    expected = z * np.sqrt(2)
    np.testing.assert_allclose(found.std(axis=0), expected, rtol=4.5 / np.sqrt(8000))
    np.testing.assert_allclose(found.mean(axis=0), [50, 0], atol=4.5 * expected / np.sqrt(4000))


def test_private_kmeans_start_knows_no_data():
    start = jax.jit(clustering.spread_out, static_argnums=(2, 3))(jax.random.key(0), 2.0, 5, 3)
    norms = np.linalg.norm(np.asarray(start), axis=1)
    assert norms.max() <= 2 * (1 + 1e-9)
    gaps = np.linalg.norm(np.asarray(start)[:, None] - np.asarray(start), axis=2)[np.triu_indices(5, 1)]
    assert gaps.min() > 1.5


@pytest.mark.slow
def test_without_noise_private_kmeans_is_lloyds_algorithm():
    data, _ = clients(300)
    means = data.x.mean(axis=1)
    everybody = jnp.ones(300, bool)
    begin = jnp.asarray(CENTERS) * 0.5
    exact = clustering.lloyd(begin, means, everybody, 7)
    got = clustering.noisy_lloyd(jax.random.key(0), begin, means, everybody, radius=50.0, noise=0.0, steps=7)
    np.testing.assert_allclose(got.centers, exact.centers, rtol=1e-7)


@pytest.mark.slow
def test_private_kmeans_is_accounted_for_all_its_steps():
    """The calibrated multiplier spends eps by dp-accounting's PLD accountant, on the event of T composed Gaussians."""
    pld = pytest.importorskip("dp_accounting.pld")
    epsilon, delta, steps = 1.5, 1e-5, 12
    noise = clustering.noise_multiplier(epsilon, delta, steps)
    accountant = pld.PLDAccountant()
    accountant.compose(clustering.event(noise, steps))
    assert accountant.get_epsilon(delta) == pytest.approx(epsilon, rel=2e-3)
    one = clustering.noise_multiplier(epsilon, delta, 1)
    assert noise == pytest.approx(one * np.sqrt(steps), rel=1e-12)
    for bad in ({"epsilon": 0.0}, {"delta": 1.0}, {"steps": 0}):
        with pytest.raises(JaxpflError, match=next(iter(bad))):
            clustering.noise_multiplier(**({"epsilon": 1.0, "delta": 1e-5, "steps": 3} | bad))
