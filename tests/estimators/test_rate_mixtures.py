"""Mixtures as priors of probabilities beside SciPy's optimisers, quadrature, and Kiefer and Wolfowitz's condition."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special, stats

from jaxpfl.estimators import compare_components, ebbinomial
from jaxpfl.estimators.rate_answers import RateMixture
from jaxpfl.estimators.rate_components import best_components
from jaxpfl.estimators.rate_mixtures import (
    Atoms,
    Betas,
    em_step,
    log_beta_binomial,
    mean_log_likelihood,
    posterior,
)
from jaxpfl.support.errors import JaxpflError


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def counts(m: int = 150) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    n = rng.integers(5, 40, m)
    p = np.where(rng.random(m) < 0.6, rng.beta(5, 45, m), rng.beta(12, 8, m))
    return rng.binomial(n, p), n


def log_likelihood(z: np.ndarray, n: np.ndarray, weights: Any, alpha: Any, beta: Any) -> float:
    """By SciPy's Beta-binomial distribution, of counts [m] and components [K]."""
    return np.log(stats.betabinom.pmf(z[:, None], n[:, None], alpha, beta) @ weights).sum()


def test_the_beta_binomial_distribution():
    z, n = counts(20)
    found = log_beta_binomial(jnp.asarray(z, float), jnp.asarray(n, float), jnp.asarray(0.7), jnp.asarray(1e4))
    by_product = [
        np.log(np.concatenate([0.7 + np.arange(a), 1e4 + np.arange(b - a)]) / (0.7 + 1e4 + np.arange(b))).sum()
        for a, b in zip(z, n, strict=True)
    ]
    np.testing.assert_allclose(found, by_product, rtol=1e-9)


def test_posteriors_of_atoms():
    prior = Atoms(jnp.array([0.2, 0.5, 0.3]), jnp.array([0.0, 0.4, 1.0]))
    z, n = np.array([0.0, 2.0, 5.0]), np.array([3.0, 4.0, 5.0])
    found = posterior(prior, jnp.asarray(z), jnp.asarray(n), jnp.zeros(()))
    joint = stats.binom.pmf(z[:, None], n[:, None], prior.means) * np.asarray(prior.weights)
    shares = joint / joint.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found.membership(), shares, rtol=1e-12)
    np.testing.assert_allclose(found.log_marginal, np.log(joint.sum(axis=1)).sum())
    np.testing.assert_allclose(found.mean, shares @ prior.means)
    np.testing.assert_allclose(found.sd**2, shares @ np.asarray(prior.means) ** 2 - np.asarray(found.mean) ** 2)
    np.testing.assert_array_equal(found.quantile(0.5), [0.0, 0.4, 1.0])  # .65 at 0, certain, and .85 at 1
    np.testing.assert_array_equal(found.quantile(0.99), [0.4, 0.4, 1.0])


@pytest.mark.slow
def test_two_components_are_the_likeliest():
    z, n = counts()
    found = ebbinomial(z, n, prior="beta-mixture", components=2)
    assert isinstance(found.prior, Betas)

    def minus(at: np.ndarray) -> float:
        weight = special.expit(at[0])
        mean, size = special.expit(at[1:3]), np.exp(at[3:])
        return -log_likelihood(z, n, [weight, 1 - weight], mean * size, (1 - mean) * size)

    start = np.array([0.4, special.logit(0.1), special.logit(0.6), np.log(50), np.log(20)])  # the truth
    options = {"xatol": 1e-7, "fatol": 1e-11, "maxiter": 10_000, "maxfev": 10_000}
    best: Any = optimize.minimize(minus, start, method="Nelder-Mead", options=options)
    np.testing.assert_allclose(found.log_marginal, -best.fun, rtol=1e-10)
    weight = special.expit(best.x[0])
    np.testing.assert_allclose(found.prior.weights, [weight, 1 - weight], rtol=1e-4)
    np.testing.assert_allclose(found.prior.means, special.expit(best.x[1:3]), rtol=1e-4)
    np.testing.assert_allclose(found.prior.sizes, np.exp(best.x[3:]), rtol=1e-3)

    # Posteriors by quadrature.
    alpha, beta = found.prior.means * found.prior.sizes, (1 - found.prior.means) * found.prior.sizes
    p = (np.arange(200_000) + 0.5) / 200_000
    prior = stats.beta.pdf(p[:, None], alpha, beta) @ np.asarray(found.prior.weights)
    low, high = found.interval(0.9)
    for i in (0, 7, 30):
        density = prior * stats.binom.pmf(z[i], n[i], p)
        density /= density.sum()
        np.testing.assert_allclose(found.mean[i], density @ p, rtol=1e-7)
        np.testing.assert_allclose(found.sd[i] ** 2, density @ p**2 - (density @ p) ** 2, rtol=1e-6)
        np.testing.assert_allclose(np.interp([low[i], high[i]], p, np.cumsum(density)), [0.05, 0.95], atol=1e-4)


@pytest.mark.slow
def test_no_step_of_em_lowers_the_likelihood():
    z, n = (jnp.asarray(of, float) for of in counts())
    w = jnp.full(len(z), 1 / len(z))
    step = jax.jit(em_step)
    for means, sizes in (([0.1, 0.6], [3.0, 300.0]), ([0.5, 0.5001], [1e-2, 1e5]), ([0.01, 0.99], [30.0, 30.0])):
        at = Betas(jnp.array([0.5, 0.5]), jnp.array(means), jnp.array(sizes))
        values = [float(mean_log_likelihood(at, z, n, w))]
        for _ in range(40):
            at = step(at, z, n, w)
            values.append(float(mean_log_likelihood(at, z, n, w)))
        assert (np.diff(values) > -1e-12).all()
        assert values[-1] > values[0] + 0.01
        np.testing.assert_allclose(at.weights.sum(), 1)


@pytest.mark.slow
def test_a_single_component_is_the_beta_prior_and_tracers_change_nothing():
    z, n = counts()
    one, mixed = ebbinomial(z, n), ebbinomial(z, n, prior="beta-mixture", components=1)
    np.testing.assert_allclose(mixed.log_marginal, one.log_marginal, rtol=1e-10)
    np.testing.assert_allclose(mixed.mean, one.mean, rtol=1e-5)
    np.testing.assert_allclose(mixed.quantile(0.2), one.quantile(0.2), rtol=1e-5)
    traced = jax.jit(lambda z, n: ebbinomial(z, n, prior="beta-mixture", components=1))(z, n)
    np.testing.assert_allclose(traced.mean, mixed.mean, rtol=1e-6)


@pytest.mark.slow
def test_the_npmle_satisfies_its_condition():
    z, n = counts()
    found: RateMixture = ebbinomial(z, n, prior="npmle", components=100)
    L = stats.binom.pmf(z[:, None], n[:, None], found.prior.means)
    fitted = L @ np.asarray(found.prior.weights)
    np.testing.assert_allclose(found.log_marginal, np.log(fitted).sum(), rtol=1e-9)
    slopes = (L / fitted[:, None]).mean(axis=0) - 1  # nowhere above zero (Kiefer and Wolfowitz)
    assert slopes.max() < 1e-7
    np.testing.assert_allclose(slopes.max(), found.slack, atol=1e-9)
    two = ebbinomial(z, n, prior="beta-mixture")
    assert found.log_marginal > two.log_marginal
    shares = L * np.asarray(found.prior.weights) / fitted[:, None]
    median = np.asarray(found.quantile(0.5))[:, None]
    assert (shares @ np.ones(100) - 1 < 1e-12).all()
    assert ((shares * (found.prior.means <= median)).sum(axis=1) >= 0.5 - 1e-9).all()
    assert ((shares * (found.prior.means < median)).sum(axis=1) < 0.5 + 1e-9).all()


@pytest.mark.slow
def test_the_number_of_components_by_held_out_likelihood():
    z, n = counts(100)
    scores = compare_components(z, n, most=2)
    assert best_components(scores) == 2
    fold = np.arange(100) % 5
    out = fold == 3
    without = ebbinomial(z[~out], n[~out])
    size, mean = without.prior_size, without.prior_mean
    np.testing.assert_allclose(
        scores[1].log_densities[out], stats.betabinom.logpmf(z[out], n[out], mean * size, (1 - mean) * size), rtol=1e-6
    )
    np.testing.assert_allclose(scores[1].log_marginal, ebbinomial(z, n).log_marginal, rtol=1e-10)
    assert scores[2].log_marginal > scores[1].log_marginal


@pytest.mark.slow
@pytest.mark.parametrize("precise", [True, False])
def test_clients_without_any_success_keep_all_finite(precise):
    z, n = np.array([0] * 20 + [8] * 30), np.full(50, 8)
    with jax.enable_x64(precise):
        found = ebbinomial(z, n, prior="beta-mixture")
        found = jax.tree.map(np.asarray, found)
    assert all(np.isfinite(of).all() for of in (*found.prior, found.mean, found.sd))
    np.testing.assert_allclose(found.mean, z / 8, atol=0.02)
    np.testing.assert_allclose(found.prior.weights, [0.4, 0.6], atol=1e-3)
    np.testing.assert_allclose(found.log_marginal, 20 * np.log(0.4) + 30 * np.log(0.6), rtol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"prior": "betas"}, "unknown prior 'betas': did you mean 'beta'"),
        ({"components": 2}, "prior beta has no components, got 2"),
        ({"prior": "beta-mixture", "components": 0}, "components must be a whole number of at least 1, got 0"),
        ({"prior": "npmle", "components": 1}, "components must be at least 2 for npmle, got 1"),
    ],
)
def test_bad_choices_are_refused_in_a_line(arguments, said):
    with pytest.raises(JaxpflError, match=said) as error:
        ebbinomial([1, 2], 3, **arguments)
    assert "\n" not in str(error.value)


def test_bad_comparisons_are_refused_in_a_line():
    with pytest.raises(JaxpflError, match="folds must be from 2 to the number of clients, 3, got 5"):
        compare_components([1, 2, 1], 3)
    with pytest.raises(JaxpflError, match="most must be a whole number of at least 1, got 0"):
        compare_components([1, 2, 1], 3, most=0)
    with pytest.raises(JaxpflError, match="compare_components runs on the host"):
        jax.jit(lambda z: compare_components(z, 3))(jnp.array([1, 2, 1]))
