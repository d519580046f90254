"""Mixtures as priors of Poisson rates beside SciPy's distributions and optimiser, quadrature, and the NPMLE's
condition."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special, stats

from jaxpfl.estimators import ebpoisson
from jaxpfl.estimators.poisson_mixtures import Gammas, Places, _shape_of, em_step
from jaxpfl.estimators.rate_mixtures import mean_log_likelihood, posterior
from jaxpfl.support.errors import JaxpflError


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def counts(m: int = 150) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    exposure = rng.uniform(1, 5, m)
    rate = np.where(rng.random(m) < 0.6, rng.gamma(4, 0.25, m), rng.gamma(20, 0.4, m))
    return rng.poisson(rate * exposure), exposure


def likelihoods(z: Any, e: Any, means: Any, sizes: Any) -> np.ndarray:
    """Probabilities of counts [m] under components [K], by SciPy's negative binomial distribution, [m, K]."""
    return stats.nbinom.pmf(z[:, None], means * sizes, sizes / (sizes + e[:, None]))


def test_components_are_negative_binomials():
    z, e = counts(20)
    means, sizes = np.array([0.8, 6.0]), np.array([0.01, 300.0])
    prior = Gammas(jnp.array([0.3, 0.7]), jnp.asarray(means), jnp.asarray(sizes))
    of = jnp.asarray(z, float), jnp.asarray(e)
    found = prior.log_components(*of) + prior.log_constant(*of)[:, None]
    np.testing.assert_allclose(np.exp(found), likelihoods(z, e, means, sizes), rtol=1e-9)


def test_posteriors_of_places():
    prior = Places(jnp.array([0.2, 0.5, 0.3]), jnp.array([0.0, 0.4, 3.0]))
    z, e = np.array([0.0, 2.0, 9.0]), np.array([3.0, 4.0, 5.0])
    found = posterior(prior, jnp.asarray(z), jnp.asarray(e), jnp.zeros(()))
    joint = stats.poisson.pmf(z[:, None], e[:, None] * np.asarray(prior.means)) * np.asarray(prior.weights)
    shares = joint / joint.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found.membership(), shares, rtol=1e-12)
    np.testing.assert_allclose(found.log_marginal, np.log(joint.sum(axis=1)).sum())
    np.testing.assert_allclose(found.mean, shares @ prior.means)
    np.testing.assert_array_equal(found.quantile(0.5), [0.0, 0.4, 3.0])


def test_shapes_solve_their_equation():
    shape = np.array([1e-3, 0.1, 1.0, 7.0, 1e4])
    np.testing.assert_allclose(_shape_of(jnp.asarray(np.log(shape) - special.digamma(shape))), shape, rtol=1e-6)


def test_no_step_of_em_lowers_the_likelihood():
    z, e = (jnp.asarray(of, float) for of in counts())
    w = jnp.full(len(z), 1 / len(z))
    step, value = jax.jit(em_step), jax.jit(mean_log_likelihood)
    for means, sizes in (([0.1, 6.0], [3.0, 300.0]), ([2.0, 2.0001], [1e-2, 1e5]), ([0.01, 50.0], [1.0, 1.0])):
        at = Gammas(jnp.array([0.5, 0.5]), jnp.array(means), jnp.array(sizes))
        values = [float(value(at, z, e, w))]
        for _ in range(40):
            at = step(at, z, e, w)
            values.append(float(value(at, z, e, w)))
        assert (np.diff(values) > -1e-10).all()
        assert values[-1] > values[0] + 0.01
        np.testing.assert_allclose(at.weights.sum(), 1)


@pytest.mark.slow
def test_two_components_are_the_likeliest_and_their_posteriors_those_of_quadrature():
    z, e = counts()
    found = ebpoisson(z, e, prior="gamma-mixture", components=2)

    def minus(at: np.ndarray) -> float:
        weight = special.expit(at[0])
        return -np.log(likelihoods(z, e, np.exp(at[1:3]), np.exp(at[3:])) @ [weight, 1 - weight]).sum()

    start = np.array([0.4, 0.0, np.log(8), np.log(4), np.log(2.5)])  # the truth
    options = {"xatol": 1e-7, "fatol": 1e-11, "maxiter": 10_000, "maxfev": 10_000}
    best: Any = optimize.minimize(minus, start, method="Nelder-Mead", options=options)
    np.testing.assert_allclose(found.log_marginal, -best.fun, rtol=1e-9)
    np.testing.assert_allclose(found.prior.means, np.exp(best.x[1:3]), rtol=1e-4)
    np.testing.assert_allclose(found.prior.sizes, np.exp(best.x[3:]), rtol=1e-3)

    shape, size = found.prior.means * found.prior.sizes, found.prior.sizes
    rate = (np.arange(400_000) + 0.5) / 400_000 * 40
    prior = stats.gamma.pdf(rate[:, None], shape, scale=1 / np.asarray(size)) @ np.asarray(found.prior.weights)
    low, high = found.interval(0.9)
    for i in (0, 7, 30):
        density = prior * stats.poisson.pmf(z[i], e[i] * rate)
        density /= density.sum()
        np.testing.assert_allclose(found.mean[i], density @ rate, rtol=1e-6)
        np.testing.assert_allclose(found.sd[i] ** 2, density @ rate**2 - (density @ rate) ** 2, rtol=1e-5)
        np.testing.assert_allclose(np.interp([low[i], high[i]], rate, np.cumsum(density)), [0.05, 0.95], atol=1e-4)


@pytest.mark.slow
def test_a_single_component_is_the_gamma_prior_and_tracers_change_nothing():
    z, e = counts()
    one, mixed = ebpoisson(z, e), ebpoisson(z, e, prior="gamma-mixture", components=1)
    np.testing.assert_allclose(mixed.log_marginal, one.log_marginal, rtol=1e-10)
    np.testing.assert_allclose(mixed.mean, one.mean, rtol=1e-6)
    np.testing.assert_allclose(mixed.quantile(0.2), one.quantile(0.2), rtol=1e-5)
    traced = jax.jit(lambda z, e: ebpoisson(z, e, prior="gamma-mixture", components=1))(z, e)
    np.testing.assert_allclose(traced.mean, mixed.mean, rtol=1e-6)


@pytest.mark.slow
def test_the_npmle_satisfies_its_condition():
    z, e = counts()
    found = ebpoisson(z, e, prior="npmle", components=100)
    joint = stats.poisson.pmf(z[:, None], e[:, None] * np.asarray(found.prior.means))
    fitted = joint @ np.asarray(found.prior.weights)
    np.testing.assert_allclose(found.log_marginal, np.log(fitted).sum(), rtol=1e-9)
    slopes = (joint / fitted[:, None]).mean(axis=0) - 1  # nowhere above zero (Kiefer and Wolfowitz)
    assert slopes.max() < 1e-7
    assert found.log_marginal > ebpoisson(z, e, prior="gamma-mixture").log_marginal


@pytest.mark.slow
@pytest.mark.parametrize("precise", [True, False])
def test_clients_without_events_keep_all_finite(precise):
    z, e = np.array([0] * 20 + [80] * 30), np.full(50, 2.0)
    with jax.enable_x64(precise):
        found = jax.tree.map(np.asarray, ebpoisson(z, e, prior="gamma-mixture"))
    assert all(np.isfinite(of).all() for of in (*found.prior, found.mean, found.sd))
    np.testing.assert_allclose(found.mean, z / 2, atol=0.1)
    np.testing.assert_allclose(found.prior.weights, [0.4, 0.6], atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"prior": "gammas"}, "unknown prior 'gammas': did you mean 'gamma'"),
        ({"components": 2}, "prior gamma has no components, got 2"),
        ({"prior": "gamma-mixture", "components": 0}, "components must be a whole number of at least 1, got 0"),
        ({"prior": "npmle", "components": 1}, "components must be at least 2 for npmle, got 1"),
    ],
)
def test_bad_choices_are_refused_in_a_line(arguments, said):
    with pytest.raises(JaxpflError, match=said) as error:
        ebpoisson([1, 2], 3.0, **arguments)
    assert "\n" not in str(error.value)
