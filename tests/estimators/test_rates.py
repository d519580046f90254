"""Empirical Bayes of probabilities and rates beside SciPy's distributions and optimisers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special, stats

from jaxpfl.benchmarks.studies import beta_binomial
from jaxpfl.estimators.empirical_bayes import ebbinomial, ebbinomial_regression, ebpoisson, ebpoisson_regression
from jaxpfl.support.errors import JaxpflError

pytestmark = pytest.mark.usefixtures("x64")


M = 80  # clients of every fit: one program for each family


def trials(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    n = rng.integers(1, 40, M)
    return rng.binomial(n, rng.beta(2, 6, M)), n


def events() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    e = rng.uniform(0.5, 5, M)
    return rng.poisson(rng.gamma(2, 0.7, M) * e), e


@pytest.mark.slow
def test_the_beta_prior_is_the_likeliest():
    z, n = trials()
    found = ebbinomial(z, n)
    a, b = beta_binomial.fit(z, n)
    alpha, beta = found.prior_mean * found.prior_size, (1 - found.prior_mean) * found.prior_size
    np.testing.assert_allclose([alpha, beta], [a, b], rtol=1e-4)
    np.testing.assert_allclose(found.log_marginal, stats.betabinom.logpmf(z, n, a, b).sum(), rtol=1e-10)
    own = stats.beta(alpha + z, beta + n - z)
    np.testing.assert_allclose(found.mean, own.mean(), rtol=1e-9)
    np.testing.assert_allclose(found.sd, own.std(), rtol=1e-9)
    np.testing.assert_allclose(found.quantile(0.3), own.ppf(0.3), rtol=1e-8)
    np.testing.assert_allclose(found.mean, found.prior_mean + (1 - found.shrinkage) * (z / n - found.prior_mean))


@pytest.mark.slow
def test_the_gamma_prior_is_the_likeliest():
    z, e = events()
    found = ebpoisson(z, e)
    shape, rate = float(found.prior_mean * found.prior_size), float(found.prior_size)

    def minus(logs: np.ndarray) -> float:
        k, b = np.exp(logs)
        return -stats.nbinom.logpmf(z, k, b / (b + e)).sum()

    best: Any = optimize.minimize(minus, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-10})
    np.testing.assert_allclose([shape, rate], np.exp(best.x), rtol=1e-4)
    np.testing.assert_allclose(found.log_marginal, -best.fun, rtol=1e-10)
    own = stats.gamma(shape + z, scale=1 / (rate + e))
    np.testing.assert_allclose(found.mean, own.mean(), rtol=1e-9)
    np.testing.assert_allclose(found.sd, own.std(), rtol=1e-9)
    low, high = found.interval(0.9)
    np.testing.assert_allclose([low, high], own.ppf([[0.05], [0.95]]), rtol=1e-8)
    other = ebpoisson(z, 1e9 * e)  # units of the exposure are units of the rate
    np.testing.assert_allclose(1e9 * other.mean, found.mean, rtol=1e-5)


def test_a_frequency_table_of_counts():
    """Weights are numbers of clients: the fit is that of the clients written out, a row each."""
    counts, number = np.arange(6), np.array([300, 90, 25, 8, 2, 1])
    table, each = ebpoisson(counts, 1.0, weights=number), ebpoisson(np.repeat(counts, number), 1.0)
    first = np.searchsorted(np.repeat(counts, number), counts)
    np.testing.assert_allclose(table.mean, np.asarray(each.mean)[first], rtol=1e-5)


def test_clients_without_spread_have_the_pooled_rate():
    found = ebpoisson(np.full(200, 2), 4.0)
    assert np.isinf(found.prior_size)
    np.testing.assert_allclose(found.mean, 0.5)
    np.testing.assert_array_equal(found.sd, 0.0)
    np.testing.assert_allclose(found.quantile(0.9), 0.5)
    np.testing.assert_allclose(found.log_marginal, 200 * stats.poisson.logpmf(2, 2))


@pytest.mark.slow
def test_vmap_over_problems():
    problems = trials(0), trials(1)
    together = jax.jit(jax.vmap(ebbinomial))(*map(jnp.stack, zip(*problems, strict=True)))
    for i, problem in enumerate(problems):
        np.testing.assert_allclose(together.mean[i], ebbinomial(*problem).mean, rtol=1e-5)


@pytest.mark.parametrize(
    ("fit", "counts", "sizes", "said"),
    [
        (ebbinomial, [1, 2], [1, 1], "successes must be at most trials, got 2 of 1 for client 1"),
        (ebbinomial, [1, 0], [1, 0], "trials must be whole numbers of at least 1, got 0.0 for client 1"),
        (ebbinomial, [0, 0], 5, "all successes are zero: no prior can be fitted"),
        (ebbinomial, [1], [2], "at least 2 clients are required to estimate a prior, got 1"),
        (ebbinomial, [1, 1], [2, 2, 2], r"got shapes \(2,\) and \(3,\)"),
        (ebbinomial, ["a", "b"], 2, "successes must be numbers, one for each client"),
        (ebpoisson, [1, -1], 1.0, "count must be whole numbers of at least 0, got -1.0 for client 1"),
        (ebpoisson, [1, 1], [1.0, 0.0], "exposure must be > 0 and finite, got 0.0 for client 1"),
        (ebpoisson, [0, 0], 1.0, "all counts are zero: no prior can be fitted"),
    ],
)
def test_bad_counts_are_refused_in_a_line(fit, counts, sizes, said):
    with pytest.raises(JaxpflError, match=said) as error:
        fit(counts, sizes)
    assert "\n" not in str(error.value)


def data(bounded: bool, spread: float = 8.0) -> tuple[np.ndarray, ...]:
    rng, m = np.random.default_rng(0), M
    x = rng.normal(10, 3, size=(m, 2))
    eta = -1 + 0.2 * (x[:, 0] - 10) - 0.1 * (x[:, 1] - 10)
    if bounded:
        n, mu = rng.integers(5, 60, m).astype(float), special.expit(eta)
        p = rng.beta(mu * spread, (1 - mu) * spread) if np.isfinite(spread) else mu
        return rng.binomial(n.astype(int), p).astype(float), n, x
    n, mu = rng.uniform(1, 30, m), np.exp(eta)
    rate = rng.gamma(spread, mu / spread) if np.isfinite(spread) else mu
    return rng.poisson(rate * n).astype(float), n, x


def log_likelihood(bounded: bool, z: np.ndarray, n: np.ndarray, x: np.ndarray, at: np.ndarray) -> float:
    eta, size = np.column_stack([np.ones(len(z)), x]) @ at[:-1], np.exp(at[-1])
    if bounded:
        mu = special.expit(eta)
        return stats.betabinom.logpmf(z, n, mu * size, (1 - mu) * size).sum()
    return stats.nbinom.logpmf(z, size, size / (size + np.exp(eta) * n)).sum()


@pytest.mark.slow
@pytest.mark.parametrize("bounded", [True, False])
def test_the_fit_is_the_likeliest(bounded: bool):
    z, n, x = data(bounded)
    found = (ebbinomial_regression if bounded else ebpoisson_regression)(z, n, x)
    at = np.append(np.asarray(found.beta), np.log(found.spread))
    np.testing.assert_allclose(found.log_marginal, log_likelihood(bounded, z, n, x, at), rtol=1e-10)

    def minus(at: np.ndarray) -> float:
        return -log_likelihood(bounded, z, n, x - 10, at)

    best: Any = optimize.minimize(minus, [-1, 0, 0, 1.0], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-11})
    np.testing.assert_allclose(-best.fun, found.log_marginal, rtol=1e-10)
    np.testing.assert_allclose([*at[1:3], at[3]], best.x[1:], rtol=1e-4)
    hessian = np.zeros((4, 4))
    for i in range(4):
        for j in range(4):
            steps = 1e-3 * np.eye(4)[[i, j]]
            hessian[i, j] = sum(
                a * b * minus(best.x + a * steps[0] + b * steps[1]) for a in (1, -1) for b in (1, -1)
            ) / (4e-6)
    np.testing.assert_allclose(found.beta_covariance[1:, 1:], np.linalg.inv(hessian)[1:3, 1:3], rtol=1e-3)

    mu, size = np.asarray(found.rates.prior_mean), np.asarray(found.rates.prior_size)
    own = stats.beta(mu * size + z, (1 - mu) * size + n - z) if bounded else stats.gamma(
        float(found.spread) + z, scale=1 / (size + n)
    )  # fmt: skip
    np.testing.assert_allclose(found.mean, own.mean(), rtol=1e-9)
    np.testing.assert_allclose(found.rates.sd, own.std(), rtol=1e-9)
    np.testing.assert_allclose(found.interval(0.9), own.ppf([[0.05], [0.95]]), rtol=1e-7)
    assert found.p_value < 1e-3
    logits = np.column_stack([np.ones(len(z)), x]) @ np.asarray(found.beta)
    np.testing.assert_allclose(mu, special.expit(logits) if bounded else np.exp(logits), rtol=1e-9)


@pytest.mark.slow
def test_without_a_covariate_it_is_the_plain_fit_and_units_change_nothing():
    z, n, x = data(True)
    zero = np.zeros((len(z), 0))
    plain, other = ebbinomial(z, n), ebbinomial_regression(z, n, zero)
    np.testing.assert_allclose(other.log_marginal, plain.log_marginal, rtol=1e-9)
    np.testing.assert_allclose(other.mean, plain.mean, rtol=1e-5)
    z, n, x = data(False)
    both = jax.jit(jax.vmap(lambda z: ebpoisson_regression(z, jnp.asarray(n), jnp.asarray(zero))))
    found = both(jnp.stack([jnp.asarray(z), -jnp.asarray(z)]))
    np.testing.assert_allclose(found.mean[0], ebpoisson(z, n).mean, rtol=1e-5)
    assert np.isnan(found.mean[1]).all()
    one, far = ebpoisson_regression(z, n, x), ebpoisson_regression(z, 1e5 * n, 1e3 * x + 7)
    np.testing.assert_allclose(1e5 * far.mean, one.mean, rtol=1e-5)


@pytest.mark.slow
def test_no_spread_about_the_regression():
    z = np.tile([2.0, 4, 8, 16], M // 4)
    other = np.random.default_rng(0).normal(size=M)
    found = ebpoisson_regression(z, np.ones(M), np.stack([np.log(z), other], axis=1))
    assert np.isinf(found.spread)
    assert found.p_value == 1
    np.testing.assert_allclose(found.mean, z, rtol=1e-6)
    np.testing.assert_allclose(found.beta, [0, 1, 0], atol=1e-6)
    np.testing.assert_allclose(found.log_marginal, stats.poisson.logpmf(z, z).sum(), rtol=1e-9)
    np.testing.assert_allclose(found.interval()[0], z, rtol=1e-6)


def test_covariates_that_leave_no_fit_are_refused():
    with pytest.raises(JaxpflError, match="7 coefficients require at least 9 clients, got 8"):
        ebpoisson_regression([0, 1, 2, 3, 1, 2, 4, 2], 2.0, np.random.default_rng(0).normal(size=(8, 6)))


def test_a_covariate_that_separates_clients_without_events_is_refused():
    z, n, x = data(False)
    z[0], x[:, 0] = 0, np.arange(len(z)) == 0
    with pytest.raises(JaxpflError, match="x separates the clients without events"):
        ebpoisson_regression(z, n, x)
