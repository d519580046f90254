"""Edges of fits that mutants showed no test to notice: empty clusters, single clients, clients that are alike."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxpfl.estimators import base, gaussian_columns, mixture
from jaxpfl.estimators.clustering import Clusters
from jaxpfl.estimators.empirical_bayes import ebnm, robust_intervals
from jaxpfl.support.errors import JaxpflError


@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        ([0.0, 3.0, 1.0], [0.0, 0.75, 0.25]),
        ([-2.0, 0.3, 0.1], [0.0, 0.75, 0.25]),
        ([0.0, -1.0, 0.0], [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_shares_of_clusters_are_those_of_their_points(sizes: list[float], shares: list[float]):
    """Noisy sizes may be negative or below one; without any points all clusters are alike."""
    found = Clusters(jnp.zeros((3, 2)), jnp.array(sizes)).as_prior
    np.testing.assert_allclose(found[0], shares, rtol=1e-6)


def test_robust_intervals_need_more_than_one_client():
    with pytest.raises(JaxpflError, match="of a single one, nothing can be learned of the others"):
        robust_intervals([1.0], [0.5])


@pytest.mark.parametrize("prior", ["normal", "point-normal"])
def test_clients_alike_have_the_mean_weighted_by_precision(prior: str):
    """Effects that spread less than their unequal errors: the null's mean, and its log likelihood in closed form."""
    with jax.enable_x64(True):
        s = np.array([0.5, 2.0, 1.0, 4.0])
        x = 3 + 0.1 * s * np.array([1.0, -1.0, 0.5, 1.0])
        found: Any = ebnm(x, s, prior=prior, center="learned")
        mean = (x / s**2).sum() / (1 / s**2).sum()
        assert float(found.prior.weights[0]) == 1
        np.testing.assert_allclose(found.mean, mean, rtol=1e-9)
        np.testing.assert_allclose(found.log_marginal, stats.norm(mean, s).logpdf(x).sum(), rtol=1e-9)


@pytest.mark.slow
def test_clients_of_one_sample_weigh_by_its_whole_variance():
    """The weights of the mean of all are 1 / (st2 + sx2 / n), also at n = 1, without a variance of its own."""
    rng = np.random.default_rng(0)
    sizes = np.array([1, 1, 6, 6, 6, 6])
    x = jnp.asarray(rng.normal(size=(6, 1, 1)) + rng.normal(size=(6, 6, 1)))
    clients = base.Samples(x, jnp.arange(6) < jnp.asarray(sizes)[:, None])
    told = base.estimate(gaussian_columns.personalized(), jax.random.key(0), clients).shared
    variances = jax.tree.map(lambda of: of[0], told.variances)
    squares = jax.vmap(gaussian_columns.scatter)(clients)[:, 0]
    s2 = np.asarray(variances.of_client(squares, jnp.asarray(sizes) - 1.0)) / sizes
    np.testing.assert_allclose(told.weight[0], (1 / (float(told.st2[0]) + s2)).sum(), rtol=1e-5)


@pytest.mark.slow
def test_soft_memberships_of_clients_with_one_sample_have_its_variance():
    """EM without noise comes to rest where a step in closed form moves nothing."""
    x = jnp.array([-1.2, -0.7, -0.9, 0.8, 1.1, 0.3])[:, None, None]
    made = mixture.private(2, 0.5, radius=4.0, noise=0.0, steps=200, soft=True)
    told = base.estimate(made, jax.random.key(1), base.every(x)).shared
    centers, shares = np.asarray(told.mixture.mu)[:, 0], np.asarray(told.mixture.p)
    own = np.asarray(x)[:, 0, 0]
    density = shares * np.exp(-((own[:, None] - centers) ** 2) / (2 * 0.5))
    parts = density / density.sum(axis=1, keepdims=True)
    assert abs(centers[0] - centers[1]) > 0.5
    np.testing.assert_allclose((parts * own[:, None]).sum(axis=0) / parts.sum(axis=0), centers, atol=1e-3)
