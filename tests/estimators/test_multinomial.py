"""Dirichlet priors of multinomial counts beside SciPy's distributions and optimisers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special, stats

from jaxpfl.estimators import ebbinomial, ebmultinomial
from jaxpfl.support.errors import JaxpflError


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def counts() -> np.ndarray:
    """60 clients of 5 to 39 counts in four categories, of which the last is rare."""
    rng = np.random.default_rng(0)
    return rng.multinomial(rng.integers(5, 40, 60), rng.dirichlet([1.0, 3, 2, 0.2], 60))


def log_likelihood(c: np.ndarray, alpha: np.ndarray) -> float:
    """Mosimann's compound multinomial by SciPy's log gamma function."""
    N, size = c.sum(axis=1), alpha.sum()
    each = special.gammaln(size) - special.gammaln(size + N) + special.gammaln(N + 1)
    parts = special.gammaln(alpha + c) - special.gammaln(alpha) - special.gammaln(c + 1)
    return float(each.sum() + parts.sum())


def test_the_dirichlet_prior_is_the_likeliest():
    c = counts()
    found = ebmultinomial(c)
    best: Any = optimize.minimize(
        lambda logs: -log_likelihood(c, np.exp(logs)), np.zeros(4), method="Nelder-Mead",
        options={"xatol": 1e-8, "fatol": 1e-10, "maxiter": 10_000, "maxfev": 10_000},
    )  # fmt: skip
    alpha = np.asarray(found.prior_mean * found.prior_size)
    np.testing.assert_allclose(alpha, np.exp(best.x), rtol=1e-4)
    np.testing.assert_allclose(found.log_marginal, -best.fun, rtol=1e-10)
    np.testing.assert_allclose(found.log_marginal, log_likelihood(c, alpha), rtol=1e-10)
    slopes = special.digamma(alpha + c) - special.digamma(alpha)
    slopes -= (special.digamma(alpha.sum() + c.sum(axis=1)) - special.digamma(alpha.sum()))[:, None]
    np.testing.assert_allclose(alpha * slopes.sum(axis=0), 0, atol=1e-5)
    own = [stats.dirichlet(alpha + row) for row in c]
    np.testing.assert_allclose(found.mean, [of.mean() for of in own], rtol=1e-9)
    np.testing.assert_allclose(found.sd**2, [of.var() for of in own], rtol=1e-8)
    np.testing.assert_allclose(found.mean.sum(axis=1), 1)
    N = c.sum(axis=1, keepdims=True)
    moved = np.asarray(found.mean - found.prior_mean)[:, 1] / (c / N - np.asarray(found.prior_mean))[:, 1]
    np.testing.assert_allclose(found.shrinkage, 1 - moved, rtol=1e-6)
    pooled = c.sum(axis=0) / c.sum()
    none = np.sum(stats.multinomial.logpmf(c, N[:, 0], pooled))
    np.testing.assert_allclose(found.ratio, 2 * (-best.fun - none), rtol=1e-8)
    np.testing.assert_allclose(found.p_value, stats.chi2.sf(found.ratio, 1) / 2, rtol=1e-6)


@pytest.mark.slow
def test_intervals_are_those_of_beta_marginals():
    c = counts()
    found = ebmultinomial(c)
    alpha = np.asarray(found.prior_mean * found.prior_size) + c
    marginals = stats.beta(alpha, alpha.sum(axis=1, keepdims=True) - alpha)
    low, high = found.interval(0.9)
    np.testing.assert_allclose([low, high], [marginals.ppf(0.05), marginals.ppf(0.95)], rtol=1e-7, atol=1e-12)


@pytest.mark.slow
def test_two_categories_are_the_beta_prior():
    rng = np.random.default_rng(0)
    z = rng.binomial(12, rng.beta(2, 5, 100))
    found, beta = ebmultinomial(np.stack([z, 12 - z], axis=1)), ebbinomial(z, 12)
    np.testing.assert_allclose(found.log_marginal, beta.log_marginal, rtol=1e-10)
    np.testing.assert_allclose(found.prior_size, beta.prior_size, rtol=1e-6)
    np.testing.assert_allclose(found.mean[:, 0], beta.mean, rtol=1e-7)


@pytest.mark.slow
def test_clients_that_are_alike_have_the_pooled_shares():
    c = np.tile([4, 6, 10], (30, 1))
    found = ebmultinomial(c)
    assert np.isinf(found.prior_size)
    np.testing.assert_allclose(found.mean, np.tile([0.2, 0.3, 0.5], (30, 1)))
    np.testing.assert_array_equal(found.sd, 0)
    np.testing.assert_allclose(found.quantile(0.1)[0], [0.2, 0.3, 0.5])
    np.testing.assert_allclose(found.log_marginal, 30 * stats.multinomial.logpmf([4, 6, 10], 20, [0.2, 0.3, 0.5]))
    assert (found.ratio, found.p_value) == (0, 1)


@pytest.mark.slow
def test_jit_vmap_many_categories_and_single_precision():
    c = jnp.asarray(counts())
    together = jax.jit(jax.vmap(ebmultinomial))(jnp.stack([c, c[::-1]]))
    alone = ebmultinomial(np.asarray(c))
    for of in (together.mean[0], together.mean[1][::-1]):
        np.testing.assert_allclose(of, alone.mean, rtol=1e-6)
    rng = np.random.default_rng(1)
    many = rng.multinomial(100, rng.dirichlet(np.full(40, 0.2), 300))
    found = ebmultinomial(many)
    alpha = np.asarray(found.prior_mean * found.prior_size)
    slopes = special.digamma(alpha + many) - special.digamma(alpha)
    slopes -= special.digamma(alpha.sum() + 100) - special.digamma(alpha.sum())
    np.testing.assert_allclose(alpha * slopes.sum(axis=0), 0, atol=1e-4)
    assert abs(found.prior_size - 8) < 0.6
    with jax.enable_x64(False):
        single = ebmultinomial(np.asarray(c))
        assert single.mean.dtype == jnp.float32
        np.testing.assert_allclose(single.mean, alone.mean, rtol=2e-3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([1, 2, 3], r"counts must have a row for each client and a column for each category, got \(3,\)"),
        ([[1], [2]], r"counts must be of at least 2 clients and 2 categories, got shape \(2, 1\)"),
        ([[1, 2], [0.5, 1]], "counts must be whole numbers of at least 0, got 0.5 for client 1 in column 0"),
        ([[1, 2], [1, -1]], "counts must be whole numbers of at least 0, got -1.0 for client 1 in column 1"),
        ([[1, 2], [0, 0]], "client 1 has no counts: leave it out"),
        ([[1, 0], [2, 0]], "category 1 has no counts: leave it out"),
        ([["a", "b"]] * 2, r"counts must be numbers, a row for each client, got \[\["),
    ],
)
def test_bad_counts_are_refused_in_a_line(given, said):
    with pytest.raises(JaxpflError, match=said) as error:
        ebmultinomial(given)
    assert "\n" not in str(error.value)
