"""Mixtures of free normals beside SciPy's optimiser, and the steps of EM."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special, stats

from jaxpfl.estimators import ebnm
from jaxpfl.estimators.normal_means import NormalMixture
from jaxpfl.estimators.normal_means.free_mixture import em_step
from jaxpfl.support.errors import JaxpflError


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    theta = np.where(rng.random(150) < 0.4, rng.normal(-3, 0.5, 150), rng.normal(4, 1.5, 150))
    s = rng.uniform(0.5, 1.5, 150)
    return 1000 + theta + s * rng.normal(size=150), s


def log_likelihood(x: np.ndarray, s: np.ndarray, weights: Any, means: Any, sds: Any) -> float:
    spread = np.hypot(s[:, None], np.asarray(sds))
    return np.log(stats.norm.pdf(x[:, None], np.asarray(means), spread) @ np.asarray(weights)).sum()


def test_two_components_are_the_likeliest():
    x, s = data()
    found = ebnm(x, s, prior="normal-mixture")
    assert isinstance(found.prior, NormalMixture)
    np.testing.assert_allclose(found.log_marginal, log_likelihood(x, s, *found.prior), rtol=1e-10)

    def minus(at: np.ndarray) -> float:
        weight = special.expit(at[0])
        return -log_likelihood(x, s, [weight, 1 - weight], 1000 + at[1:3], np.exp(at[3:]))

    start = np.array([-0.4, -3, 4, np.log(0.5), np.log(1.5)])  # the truth
    options = {"xatol": 1e-7, "fatol": 1e-11, "maxiter": 10_000, "maxfev": 10_000}
    best: Any = optimize.minimize(minus, start, method="Nelder-Mead", options=options)
    np.testing.assert_allclose(found.log_marginal, -best.fun, rtol=1e-10)
    np.testing.assert_allclose(found.prior.weights[0], special.expit(best.x[0]), rtol=1e-4)
    np.testing.assert_allclose(found.prior.means, 1000 + best.x[1:3], rtol=1e-6)
    np.testing.assert_allclose(found.prior.sds, np.exp(best.x[3:]), rtol=1e-3)
    other = ebnm(1e3 * x, 1e3 * s, prior="normal-mixture")  # other units
    np.testing.assert_allclose(other.mean, 1e3 * found.mean, rtol=1e-6)


def test_no_step_of_em_lowers_the_likelihood():
    x, s = (jnp.asarray(of) for of in data())
    w = jnp.full(len(x), 1 / len(x))
    step = jax.jit(em_step)
    for means, sds in (([990.0, 1010], [0.1, 3]), ([1000, 1000.001], [5, 1e-3]), ([900, 1000], [1, 1])):
        at = NormalMixture(jnp.array([0.5, 0.5]), jnp.array(means), jnp.array(sds, float))
        values = []
        for _ in range(40):
            values.append(float(at.log_marginal(x, s) @ w))
            at = step(at, x, s, w)
        assert (np.diff(values) > -1e-12).all()
        assert values[-1] > values[0] + 0.01
        np.testing.assert_allclose(at.weights.sum(), 1)


@pytest.mark.slow
def test_one_component_is_the_normal_prior_and_weights_repeat_clients():
    x, s = data()
    one, plain = ebnm(x, s, prior="normal-mixture", components=1), ebnm(x, s)
    np.testing.assert_allclose(one.log_marginal, plain.log_marginal, rtol=1e-10)
    np.testing.assert_allclose(one.mean, plain.mean, rtol=1e-6)
    times = np.arange(150) % 3
    weighted = ebnm(x, s, prior="normal-mixture", weights=times)
    repeated = ebnm(np.repeat(x, times), np.repeat(s, times), prior="normal-mixture")
    np.testing.assert_allclose(weighted.log_marginal / 150, repeated.log_marginal / times.sum(), rtol=1e-6)
    alike = ebnm(np.full(5, 3.0), 1.0, prior="normal-mixture")
    np.testing.assert_allclose(alike.mean, 3, rtol=1e-6)


def test_what_it_does_not_take_is_refused():
    with pytest.raises(JaxpflError, match="prior normal-mixture has no center, got 3"):
        ebnm([1.0, 2], 1.0, prior="normal-mixture", center=3)
    with pytest.raises(JaxpflError, match="components must be a whole number of at least 1, got 0"):
        ebnm([1.0, 2], 1.0, prior="normal-mixture", components=0)
