"""Empirical Bayes of probabilities and rates beside SciPy's distributions and optimisers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, stats

from jaxpfl.estimators import beta_binomial
from jaxpfl.estimators.empirical_bayes import ebbinomial, ebpoisson
from jaxpfl.support.errors import JaxpflError


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def trials() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    n = rng.integers(1, 40, 200)
    return rng.binomial(n, rng.beta(2, 6, 200)), n


def events() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    e = rng.uniform(0.5, 5, 200)
    return rng.poisson(rng.gamma(2, 0.7, 200) * e), e


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


def test_clients_without_spread_have_the_pooled_rate():
    found = ebpoisson([2, 2, 2, 2], 4.0)
    assert np.isinf(found.prior_size)
    np.testing.assert_allclose(found.mean, 0.5)
    np.testing.assert_array_equal(found.sd, 0.0)
    np.testing.assert_allclose(found.quantile(0.9), 0.5)
    np.testing.assert_allclose(found.log_marginal, 4 * stats.poisson.logpmf(2, 2))


@pytest.mark.slow
def test_vmap_over_problems():
    z, n = trials()
    parts = jnp.asarray(z).reshape(2, 100), jnp.asarray(n).reshape(2, 100)
    together = jax.jit(jax.vmap(ebbinomial))(*parts)
    for i in range(2):
        np.testing.assert_allclose(together.mean[i], ebbinomial(parts[0][i], parts[1][i]).mean, rtol=1e-5)


@pytest.mark.parametrize(
    ("fit", "counts", "sizes", "said"),
    [
        (ebbinomial, [1, 2], [1, 1], "successes must be at most trials, got 2 of 1 for client 1"),
        (ebbinomial, [1, 0.5], [1, 1], "successes must be whole numbers of at least 0, got 0.5 for client 1"),
        (ebbinomial, [1, 0], [1, 0], "trials must be whole numbers of at least 1, got 0.0 for client 1"),
        (ebbinomial, [0, 0], 5, "all successes are zero: no prior can be fitted"),
        (ebbinomial, [5, 5], 5, "all trials are successes: no prior can be fitted"),
        (ebbinomial, [1], [2], "needs at least 2 clients, got 1"),
        (ebbinomial, [1, 1], [2, 2, 2], r"got shapes \(2,\) and \(3,\)"),
        (ebbinomial, ["a", "b"], 2, "successes must be numbers, one for each client"),
        (ebpoisson, [1, -1], 1.0, "count must be whole numbers of at least 0, got -1.0 for client 1"),
        (ebpoisson, [1, 1], [1.0, 0.0], "exposure must be > 0 and finite, got 0.0 for client 1"),
        (ebpoisson, [1, np.nan], 1.0, "count must be whole numbers of at least 0, got nan for client 1"),
        (ebpoisson, [0, 0], 1.0, "all counts are zero: no prior can be fitted"),
    ],
)
def test_bad_counts_are_refused_in_a_line(fit, counts, sizes, said):
    with pytest.raises(JaxpflError, match=said) as error:
        fit(counts, sizes)
    assert "\n" not in str(error.value)
