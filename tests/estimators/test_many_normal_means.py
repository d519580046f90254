"""Weights of a grid from bins of many clients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxpfl.estimators.empirical_bayes import ebnm, grid
from jaxpfl.estimators.empirical_bayes.grid import MANY, binned


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def data(rare: float = 0.2, far: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    m = MANY + 100
    s = rng.uniform(0.5, 1.5, m)
    return np.where(rng.random(m) < rare, far * rng.normal(size=m), 0.0) + s * rng.normal(size=m), s


@pytest.mark.slow
@pytest.mark.parametrize("prior", ["scale-mixture", "npmle"])
def test_weights_from_bins_are_nearly_the_likeliest_of_all_clients(prior):
    """Kiefer and Wolfowitz's condition on all clients in NumPy, and the weights that are found without bins."""
    x, s = data()
    found: Any = ebnm(x, s, prior=prior, components=40)
    L = stats.norm.pdf(x[:, None], found.prior.means, np.hypot(s[:, None], found.prior.sds))
    slack = (L / (L @ np.asarray(found.prior.weights))[:, None]).mean(axis=0).max() - 1
    assert slack < 1e-3  # of the bins it is none
    alone, _ = grid.weights(jnp.log(jnp.asarray(L)))
    np.testing.assert_allclose(found.log_marginal, np.log(L @ np.asarray(alone)).sum(), rtol=1e-6)


def test_bins_keep_weights_and_means():
    x, s = (jnp.asarray(of) for of in data())
    w = jnp.arange(len(x)) / jnp.arange(len(x)).sum()
    own, errors, weights = binned(x, s, w)
    np.testing.assert_allclose(weights.sum(), 1.0)
    np.testing.assert_allclose(weights @ own, w @ x, rtol=1e-9)
    np.testing.assert_allclose(weights @ errors, w @ s, rtol=1e-9)
    alike = binned(jnp.ones(5), jnp.ones(5), jnp.full(5, 0.2))
    np.testing.assert_allclose(alike[2].max(), 1.0)
