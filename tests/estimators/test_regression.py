"""Regression estimators against closed forms, and by simulation against the error of a known population."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

from jaxpfl.benchmarks.studies import regression_mixture_model as regression_mixture
from jaxpfl.benchmarks.studies import regression_model as regression
from jaxpfl.benchmarks.studies.regression_model import Population
from jaxpfl.priors import discrete
from jaxpfl.priors.gaussian_mixture import Mixture

pytestmark = pytest.mark.usefixtures("x64")


def clients(m: int, n: int, d: int, seed: int = 0, centers=None, s2: float = 0.01, sx2: float = 0.05, scale=0.05):
    """The population, and X [m, n, d], y [m, n], theta [m, d]."""
    rng = np.random.default_rng(seed)
    mu = 0.1 * rng.normal(size=(1, d)) if centers is None else centers
    theta = mu[rng.integers(len(mu), size=m)] + np.sqrt(s2) * rng.normal(size=(m, d))
    x = np.sqrt(scale) * rng.normal(size=(m, n, d))
    y = np.einsum("ijd,id->ij", x, theta) + np.sqrt(sx2) * rng.normal(size=(m, n))
    return Population(jnp.asarray(mu[0]), jnp.asarray(s2), jnp.asarray(sx2)), jnp.asarray(x), jnp.asarray(y), theta


rotated = jax.jit(jax.vmap(regression.rotate))
least_squares = jax.jit(lambda x, y: regression.least_squares(regression.rotate(x, y)))


@jax.jit
def posterior(population, x, y):
    return regression.posterior(population, regression.rotate(x, y))


@pytest.mark.parametrize(("n", "rank"), [(3, 3), (9, 5), (9, 2)])
def test_least_squares_are_those_of_least_norm(n, rank):
    _, x, y, _ = clients(1, n, 5)
    x = np.asarray(x[0]) @ np.diag([1.0] * rank + [0.0] * (5 - rank)) if rank < min(n, 5) else np.asarray(x[0])
    want = np.linalg.lstsq(x, np.asarray(y[0]), rcond=None)[0]
    got = least_squares(x, y[0])
    np.testing.assert_allclose(got, want, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("n", [3, 9])
def test_posterior_is_the_ridge_form(n):
    population, x, y, _ = clients(1, n, 5)
    mu, s2, sx2, x, y = map(np.asarray, (*population, x, y))
    a = np.linalg.inv(x[0].T @ x[0] / sx2 + np.eye(5) / s2)
    got = posterior(population, x[0], y[0])
    np.testing.assert_allclose(got.mean, a @ (x[0].T @ y[0] / sx2 + mu / s2), rtol=1e-10)
    np.testing.assert_allclose(got.variance, np.trace(a), rtol=1e-10)
    np.testing.assert_allclose(got.fitted, np.trace(x[0] @ a @ x[0].T), rtol=1e-8)
    s, e = s2 * x[0] @ x[0].T + sx2 * np.eye(n), y[0] - x[0] @ mu
    evidence = -(e @ np.linalg.solve(s, e) + np.linalg.slogdet(2 * np.pi * s)[1]) / 2
    np.testing.assert_allclose(got.log_evidence, evidence, rtol=1e-10)


@pytest.mark.slow
def test_unknown_population_costs_little():
    """m = 1500, n = 10, d = 20: moments and EM against the known population, on the same clients.

    The paired difference of errors is within 3 % of the error; that of the known one is within four standard errors
    of its trace formula (false alarms: 6e-5).
    """
    population, x, y, theta = clients(1500, 10, 20)
    known = jax.vmap(lambda x, y: posterior(population, x, y))(x, y)
    errors = ((np.asarray(known.mean) - theta) ** 2).sum(1)
    assert abs((errors - known.variance).mean()) < 4 * np.std(errors) / np.sqrt(1500)

    data = rotated(x, y)
    np.testing.assert_allclose(
        regression.pooled(data), np.linalg.lstsq(x.reshape(-1, 20), y.reshape(-1), rcond=None)[0], rtol=1e-9
    )
    estimated = regression.em(regression.moments(regression.pooled(data), x, y, 1e-6), data, 1e-6, 100)
    ours = jax.vmap(lambda x, y: posterior(estimated, x, y).mean)(x, y)
    assert ((np.asarray(ours) - theta) ** 2).sum(1).mean() < 1.03 * errors.mean()
    np.testing.assert_allclose(estimated.sx2, 0.05, rtol=0.1)
    np.testing.assert_allclose(estimated.s2, 0.01, rtol=0.3)


@pytest.mark.parametrize("floor", [1e-6, 0.02])
def test_em_never_lowers_the_evidence(floor):
    population, x, y, _ = clients(40, 6, 4)
    at, values = population._replace(mu=jnp.ones(4), s2=jnp.asarray(1.0)), []
    step = jax.jit(lambda p: regression.em(p, rotated(x, y), floor, 1))
    for _ in range(40):
        at = step(at)
        values.append(float(jax.vmap(posterior, in_axes=(None, 0, 0))(at, x, y).log_evidence.sum()))
        assert min(at.s2, at.sx2) >= floor
    assert np.diff(values).min() > -1e-9


@pytest.mark.parametrize(("accelerated", "steps"), [(False, 20000), (True, 1000)])
def test_algorithm_4_rests_where_each_client_is_at_its_posterior_mode(accelerated, steps):
    population, x, y, _ = clients(6, 8, 3, scale=1.0)

    @jax.jit
    def descend():
        begin = jnp.zeros((6, 3))
        return regression.gradient_descent(population, begin, x, y, 2e-3, steps, accelerated=accelerated)

    end, thetas = descend()
    want = jax.vmap(lambda x, y: posterior(end, x, y).mean)(x, y)
    np.testing.assert_allclose(thetas, want, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(end.mu, thetas.mean(0), rtol=1e-6, atol=1e-8)


def test_first_two_accelerated_steps_by_hand():
    """The first is the printed step; the second starts a quarter of it ahead, unless it would go back."""
    population, x, y, _ = clients(4, 5, 3, scale=1.0)
    s2, sx2, rate = float(population.s2), float(population.sx2), 1e-3
    own, seen = np.asarray(x), np.asarray(y)

    def step(mu, thetas):
        fit = np.stack([a.T @ (b - a @ t) for a, b, t in zip(own, seen, thetas, strict=True)]) / sx2
        return mu - rate * ((mu - thetas) / s2).mean(0), thetas + rate * (fit + (mu - thetas) / s2)

    at = np.asarray(population.mu), np.zeros((4, 3))
    first = step(*at)
    ahead = [new + (new - old) / 4 for new, old in zip(first, at, strict=True)]
    for steps, (mu, thetas) in ((1, first), (2, step(*ahead))):
        end, got = regression.gradient_descent(population, jnp.zeros((4, 3)), x, y, rate, steps, accelerated=True)
        np.testing.assert_allclose(end.mu, mu, rtol=1e-10)
        np.testing.assert_allclose(got, thetas, rtol=1e-10)


# --- mixtures -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_component_reaches_the_likelihoods_maximum_over_center_and_variances():
    """Against SciPy on dense covariances of the examples; EM on the coefficients is not there after 2000 steps."""
    _, x, y, _ = clients(60, 3, 5, scale=1.0)
    own, seen = np.asarray(x), np.asarray(y)

    def negative(at):
        s = np.exp(at[5]) * own @ own.transpose(0, 2, 1) + np.exp(at[6]) * np.eye(3)
        e = seen - own @ at[:5]
        return (np.einsum("ij,ijk,ik->", e, np.linalg.inv(s), e) + np.linalg.slogdet(2 * np.pi * s)[1].sum()) / 2

    want = minimize(negative, np.append(np.zeros(5), [-3.0, -3.0]), method="BFGS", options={"gtol": 1e-7})
    begin = regression_mixture.MixturePopulation(jnp.ones(1), jnp.ones((1, 5)), jnp.ones(1), jnp.asarray(1.0))
    got = jax.jit(lambda: regression_mixture.em(begin, rotated(x, y), 1e-8, 30))()
    np.testing.assert_allclose(got.mu[0], want.x[:5], atol=1e-5)
    np.testing.assert_allclose(jnp.append(got.s2, got.sx2), np.exp(want.x[5:]), rtol=1e-4)
    np.testing.assert_allclose(log_likelihood(got, rotated(x, y)), -want.fun, rtol=1e-9)


@jax.jit
def log_likelihood(population, data):
    evidence = jax.vmap(lambda data: regression_mixture.posteriors(population, data)[1].log_evidence)(data)
    return jax.nn.logsumexp(jnp.log(population.p) + evidence, axis=1).sum()


def planted(m: int, n: int, d: int):
    """Clients of two centers of ones and minus ones, and the true population."""
    _, x, y, theta = clients(m, n, d, centers=np.stack([np.ones(d), -np.ones(d)]), s2=0.001, sx2=0.1, scale=1.0)
    return regression_mixture.MixturePopulation(
        jnp.full(2, 0.5), jnp.stack([jnp.ones(d), -jnp.ones(d)]), jnp.full(2, 0.001), jnp.asarray(0.1)
    ), x, y, theta  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_fewer_examples_than_coefficients_are_clustered(n):
    """400 clients of n examples of 20 coefficients. Seen: .89 and 1.12 times the known population's error."""
    true, x, y, theta = planted(400, n, 20)
    learn = jax.jit(lambda data: regression_mixture.em(regression_mixture.start(data, 2, 20.0, 1e-6), data, 1e-6, 20))
    data = rotated(x, y)
    learned = learn(data)

    def error(population) -> float:
        got = jax.vmap(regression_mixture.personalize, in_axes=(None, 0))(population, data)
        return float(((np.asarray(got) - theta) ** 2).sum(1).mean())

    assert log_likelihood(learned, data) > log_likelihood(true, data)
    assert error(learned) < 1.5 * error(true)


def two_groups():
    return planted(120, 5, 12)


@pytest.mark.slow
def test_mixture_reaches_the_known_populations_error():
    """AdaMix's setting made small (d = 12, n = 5, m = 120): EM on the data misses the known population's error by what
    the centers cost, each estimated from m / 2 clients: about d (sx2 / n + s2) 2 / m = .0042. (Seen on seeds 0 to 2:
    .0029, .0052, .0045, standard errors .0004.) The clients alone are off by two orders of magnitude more."""
    true, x, y, theta = two_groups()

    def error(population) -> float:
        got = jax.vmap(lambda data: regression_mixture.personalize(population, data))(rotated(x, y))
        return float(((np.asarray(got) - theta) ** 2).sum(1).mean())

    at = regression_mixture.start(rotated(x, y), 2, 1.0, 1e-5)
    step = jax.jit(lambda p: regression_mixture.em(p, rotated(x, y), 1e-5, 1))
    values = []
    for _ in range(20):
        values.append(float(log_likelihood(at, rotated(x, y))))
        at = step(at)
    assert np.diff(values).min() > -1e-8
    alone = ((np.asarray(jax.vmap(regression.least_squares)(rotated(x, y))) - theta) ** 2).sum(1).mean()
    assert alone > 100 * error(true)
    assert error(at) < error(true) + 2 * 0.0042


def test_one_step_of_algorithm_1():
    """Against NumPy: a step on each client's data, the proximal one of the mixture, and EM's on what results."""
    _, x, y, _ = two_groups()
    x, y, rng = x[:9], y[:9], np.random.default_rng(4)
    p, mu, s2, sx2, rate, floor = np.array([0.3, 0.7]), rng.normal(size=(2, 12)), np.array([0.5, 0.8]), 0.1, 2e-3, 0.7
    thetas = rng.normal(size=(9, 12))

    def belongs(theta):
        log = np.log(p) - 6 * np.log(2 * np.pi * s2) - ((theta - mu) ** 2).sum(1) / (2 * s2)
        return np.exp(log - np.logaddexp.reduce(log))

    want = []
    for i, theta in enumerate(thetas):
        theta = theta + rate * np.asarray(x[i]).T @ (np.asarray(y[i]) - np.asarray(x[i]) @ theta) / sx2
        pulls = rate * belongs(theta) / s2
        want.append((theta + pulls @ mu) / (1 + pulls.sum()))
    want = np.array(want)
    r = np.array([belongs(theta) for theta in want])
    centers = r.T @ want / r.sum(0)[:, None]
    squares = [(r[:, c] * ((want - centers[c]) ** 2).mean(1)).sum() / r[:, c].sum() for c in range(2)]

    begin = Mixture(jnp.asarray(p), jnp.asarray(mu), jnp.asarray(s2))
    step = jax.jit(regression_mixture.adamix, static_argnums=7)
    mixture, got = step(begin, jnp.asarray(thetas), x, y, sx2, rate, floor, 1)
    np.testing.assert_allclose(got, want, rtol=1e-10)
    np.testing.assert_allclose(mixture.p, r.mean(0), rtol=1e-9)
    np.testing.assert_allclose(mixture.mu, centers, rtol=1e-9)
    np.testing.assert_allclose(mixture.s2, np.maximum(squares, floor), rtol=1e-9)
    assert min(squares) < floor < max(squares)


def test_algorithm_6_stays_in_the_hull_of_its_centers():
    _, x, y, theta = two_groups()
    alone = jax.jit(lambda data: regression_mixture.start(data, 2, 0.1, 1e-5))(rotated(x, y))
    begin = discrete.Discrete(alone.p, alone.mu)
    end, thetas = jax.jit(regression_mixture.alternating, static_argnums=4)(begin, x, y, 0.1, 10)
    assert thetas.shape == theta.shape
    span = np.asarray(begin.mu[1] - begin.mu[0])
    share = (np.asarray(end.mu) - np.asarray(begin.mu[0])) @ span / (span @ span)
    np.testing.assert_allclose(np.asarray(end.mu), begin.mu[0] + share[:, None] * span, atol=1e-9)
    assert share.min() > -1e-9
    assert share.max() < 1 + 1e-9


# --- logistic regression --------------------------------------------------------------------------


logistic_fit = jax.jit(regression.logistic_fit, static_argnums=5)
logistic_slope = jax.jit(jax.grad(regression.logistic_objective))
logistic_descent = jax.jit(regression.logistic_descent, static_argnums=6, static_argnames="printed")


def test_algorithm_5_rests_at_the_objectives_minimum_and_the_print_does_not():
    _, x, y, _ = clients(6, 8, 3, scale=1.0)
    labels = jnp.asarray(y > 0, float)
    mu, thetas = logistic_descent(jnp.ones(3), 0.5, jnp.zeros((6, 3)), x, labels, 0.05, 5000)
    slope = jax.vmap(lambda t, x, y: logistic_slope(t, mu, 0.5, x, y))(thetas, x, labels)
    np.testing.assert_allclose(slope, 0, atol=1e-8)
    np.testing.assert_allclose(mu, thetas.mean(0), atol=1e-8)
    _, printed = logistic_descent(jnp.zeros(3), 0.5, thetas, x, labels, 0.05, 1, printed=True)
    _, ours = logistic_descent(jnp.zeros(3), 0.5, thetas, x, labels, 0.05, 1)
    np.testing.assert_allclose(printed - ours, 2 * 0.05 * thetas / 0.5, rtol=1e-9)


@pytest.mark.parametrize("s2", [0.5, np.inf])
def test_a_clients_own_logistic_fit_rests_at_its_objectives_minimum(s2):
    """Without a prior on labels that no plane separates, with one on any."""
    _, x, _, _ = clients(1, 12, 3, scale=1.0)
    labels, mu = jnp.asarray(np.arange(12) % 2, float), jnp.ones(3)
    theta = logistic_fit(mu, s2, x[0], labels, 0.2, 20_000)
    slope = logistic_slope(theta, mu, s2, x[0], labels)
    np.testing.assert_allclose(slope, 0, atol=1e-8)
    assert np.abs(np.asarray(theta - mu)).max() > 0.05
