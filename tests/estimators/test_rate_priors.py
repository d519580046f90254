"""The choice of a prior of counts on held-out clients, beside SciPy's distributions and an optimizer of its own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special, stats

from jaxpfl.estimators import compare_binomial_priors, compare_poisson_priors, ebbinomial, ebpoisson
from jaxpfl.estimators.normal_means import best, leads
from jaxpfl.estimators.rate_folds import CountScores
from jaxpfl.support.errors import JaxpflError


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def binomial_clients(m: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Shares of .1 and .7: far from any single Beta distribution."""
    rng = np.random.default_rng(3)
    n = rng.integers(15, 40, m)
    return rng.binomial(n, np.where(rng.random(m) < 0.5, 0.1, 0.7)), n


def poisson_clients(m: int = 40) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    e = rng.uniform(1, 3, m)
    return rng.poisson(e * np.where(rng.random(m) < 0.5, 1.0, 12.0)), e


def beta_binomial(at: np.ndarray, z: np.ndarray, n: np.ndarray) -> np.ndarray:
    mean, size = special.expit(at[0]), np.exp(at[1])
    return stats.betabinom.logpmf(z, n, mean * size, (1 - mean) * size)


def negative_binomial(at: np.ndarray, z: np.ndarray, e: np.ndarray) -> np.ndarray:
    shape, size = np.exp(at[0] + at[1]), np.exp(at[1])  # mean and pseudo-exposure
    return stats.nbinom.logpmf(z, shape, size / (size + e))


def held_out(log_density: Any, z: np.ndarray, n: np.ndarray, folds: int) -> np.ndarray:
    """Log probability of every client under the likeliest parameters of the other folds."""
    found, fold = np.empty(len(z)), np.arange(len(z)) % folds
    for k in range(folds):
        out = fold == k
        at = optimize.minimize(
            lambda at, out=out: -log_density(at, z[~out], n[~out]).sum(), [0.0, 0.0], method="Nelder-Mead",
            options={"xatol": 1e-9, "fatol": 1e-12, "maxiter": 4000},
        ).x  # fmt: skip
        found[out] = log_density(at, z[out], n[out])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compare", "name", "clients", "log_density"),
    [
        (compare_binomial_priors, "beta", binomial_clients, beta_binomial),
        (compare_poisson_priors, "gamma", poisson_clients, negative_binomial),
    ],
)
def test_single_distributions_beside_another_optimizer(compare, name, clients, log_density):
    z, n = clients()
    found = compare(z, n, [name], folds=4)[name]
    expected = held_out(log_density, z, n, 4)
    np.testing.assert_allclose(found.log_densities, expected, rtol=1e-5, atol=1e-6)
    # Of clients in their own fit the score is another: the folds are there.
    whole = optimize.minimize(lambda at: -log_density(at, z, n).sum(), [0.0, 0.0], method="Nelder-Mead").x
    np.testing.assert_allclose(found.log_marginal, log_density(whole, z, n).sum(), rtol=1e-6)
    assert np.abs(log_density(whole, z, n) - expected).max() > 0.01


def mixture_pmf(prior: Any, z: np.ndarray, n: np.ndarray, kind: str) -> np.ndarray:
    prior = jax.tree.map(np.asarray, prior)
    z, n = z[:, None], n[:, None]
    if kind == "beta-mixture":
        a = prior.means * prior.sizes
        each = stats.betabinom.pmf(z, n, a, prior.sizes - a)
    elif kind == "gamma-mixture":
        each = stats.nbinom.pmf(z, prior.means * prior.sizes, prior.sizes / (prior.sizes + n))
    else:
        each = stats.binom.pmf(z, n, prior.means) if n.dtype.kind == "i" else stats.poisson.pmf(z, n * prior.means)
    return each @ prior.weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compare", "fit", "clients", "prior"),
    [
        (compare_binomial_priors, ebbinomial, binomial_clients, "beta-mixture"),
        (compare_binomial_priors, ebbinomial, binomial_clients, "npmle"),
        (compare_poisson_priors, ebpoisson, poisson_clients, "gamma-mixture"),
        (compare_poisson_priors, ebpoisson, poisson_clients, "npmle"),
    ],
)
def test_mixtures_beside_fits_to_the_other_clients(compare, fit, clients, prior):
    """Held-out clients have no part in the fit, nor in the ends of the grid of atoms."""
    z, n = clients()
    z[6] = n[6] if prior == "npmle" and fit is ebbinomial else z[6]  # the only share of one, in a fold of its own
    found = compare(z, n, [prior])[prior]
    fold = np.arange(len(z)) % 5
    for k in (0, 1):
        out = fold == k
        fitted = fit(z[~out], n[~out], prior=prior).prior
        expected = np.log(mixture_pmf(fitted, z[out], n[out], prior))
        np.testing.assert_allclose(found.log_densities[out], expected, rtol=1e-4, atol=1e-5)
    whole = fit(z, n, prior=prior)
    np.testing.assert_allclose(found.log_marginal, whole.log_marginal, rtol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compare", "clients", "single"),
    [(compare_binomial_priors, binomial_clients, "beta"), (compare_poisson_priors, poisson_clients, "gamma")],
)
def test_the_best_of_two_kinds_of_clients_is_a_mixture(compare, clients, single):
    found = compare(*clients(100))
    assert best(found) != single
    gap = leads(found)
    assert gap[single].difference > 3 * gap[single].stderr
    assert gap[best(found)].difference == 0
    differences = np.asarray(found[best(found)].log_densities - found[single].log_densities)
    np.testing.assert_allclose(gap[single].stderr, differences.std(ddof=1) / 10)


@pytest.mark.slow
def test_equal_clients_have_a_single_rate():
    """The prior of the 9 others' 27 successes of 90 trials each time: binomial, with p = .3."""
    found = compare_binomial_priors([3] * 12, [10] * 12, ["beta"], folds=4)["beta"]
    np.testing.assert_allclose(found.log_densities, stats.binom.logpmf(3, 10, 0.3), rtol=1e-10)
    found = compare_poisson_priors([3] * 12, 10, ["gamma"], folds=4)["gamma"]
    np.testing.assert_allclose(found.log_densities, stats.poisson.logpmf(3, 3.0), rtol=1e-10)


@pytest.mark.slow
def test_single_precision_gets_the_digits_of_double():
    z, n = np.array([5e5, 2e6, 1.2e6, 9e5, 4e5, 1.5e6]), np.full(6, 4e6)
    double = compare_binomial_priors(z, n, ["beta"], folds=3)["beta"]
    with jax.enable_x64(False):
        single = compare_binomial_priors(z, n, ["beta"], folds=3)["beta"]
        assert single.log_densities.dtype == jnp.float32
    np.testing.assert_allclose(single.log_densities, double.log_densities, rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (([1, 2, 3], 4, ["betas"]), "unknown prior 'betas': did you mean 'beta'"),
        (([1, 2, 3], 4, ["beta", "beta"]), "priors must differ, got beta 2 times"),
        (([1, 2, 3], 4, []), "priors must be at least one family, got none"),
        (([1, 2, 3], 4), "folds must be from 2 to the number of clients, 3, got 5"),
        (([1, 9, 3], 4), "successes must be at most trials, got 9 of 4 for client 1"),
        (([2, 0, 0, 0, 0], 4), r"without clients 0, 5, ... \(fold 0 of 5\): all successes are zero"),
        (([2, 4, 4, 4, 4], 4), r"without clients 0, 5, ... \(fold 0 of 5\): all trials are successes"),
        (([1, 1, 0, 1, 1], [3, 1, 1, 1, 1]), r"\(fold 0 of 5\): trials must be above 1 for some client"),
    ],
)
def test_bad_comparisons_are_refused_in_a_line(given, said):
    with pytest.raises(JaxpflError, match=said) as error:
        compare_binomial_priors(*given)
    assert "\n" not in str(error.value)


def test_comparisons_under_transformations_and_risks_are_refused():
    with pytest.raises(JaxpflError, match="compare_poisson_priors runs on the host"):
        jax.jit(lambda z: compare_poisson_priors(z, 3.0))(jnp.array([1, 2, 1]))
    with pytest.raises(JaxpflError, match="unknown prior 'beta'"):
        compare_poisson_priors([1, 2], 1.0, ["beta"])  # pyright: ignore[reportArgumentType]
    scores = {"beta": CountScores(jnp.zeros(()), jnp.zeros(3))}
    assert best(scores) == "beta"
    with pytest.raises(JaxpflError, match="by must be likelihood for counts, whose scores have no risk, got risk"):
        best(scores, "risk")
