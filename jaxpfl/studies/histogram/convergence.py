r"""Convergence of clusterings to synthetic users' true clusters: the share of misclustered users after every round.

Appendix D of the paper bounds it by :math:`\exp(-\Delta^2 / (8 \sigma^2))`, up to factors that vanish, with Delta the
least distance of two centers and sigma^2 a sub-Gaussian parameter of a user's histogram about its center. The analysis
is of Lloyd's algorithm in Euclidean distance with such noise, not of the divergence: the bound is shown for comparison.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Key
from jaxpfl.data.sources.token_counts import DirichletMixture
from jaxpfl.estimators.histograms import base as histogram
from jaxpfl.estimators.histograms import clusters as histogram_clusters
from jaxpfl.estimators.histograms.base import Users
from jaxpfl.studies.histogram.settings import HistogramSettings, Prepared

RATES = {"Algorithm 2": 1.0, "IFCA": None}
"""Rate of a step towards the mean; None for the settings'."""


def wrong(labels: np.ndarray, true: np.ndarray, clusters: int) -> float:
    """Share of users in a wrong cluster, [n] and [n], under the best matching of labels to true clusters."""
    from scipy.optimize import linear_sum_assignment

    table = np.zeros((clusters, clusters))
    np.add.at(table, (labels, true), 1)
    return float(1 - table[linear_sum_assignment(-table)].sum() / len(true))


def rate(population: DirichletMixture, tokens: float) -> float:
    """Rate ``exp(-Delta^2 / (8 sigma^2))`` of the bound, with sigma^2 the largest variance of a histogram's entry.

    That variance about the center is ``P (1 - P) (1/(alpha + 1) + (1 - 1/(alpha + 1)) / m)``; the largest eigenvalue of
    the covariance is not much larger for small P.
    """
    centers, about = population.centers, 1 / (population.alpha + 1)
    apart = ((centers[:, None] - centers) ** 2).sum(axis=-1)
    nearest = apart[~np.eye(len(centers), dtype=bool)].min() if len(centers) > 1 else np.inf
    variance = (centers * (1 - centers)).max() * (about + (1 - about) / tokens)
    return float(np.exp(-nearest / (8 * variance)))


def misclustering(data: Prepared, given: HistogramSettings) -> dict[str, Any]:
    """Misclustering rates of the users after 0 ... T rounds, averaged over runs, by method; and the bound's rate.

    Clusters beyond the larger of both numbers cannot be matched; users in them count as wrong.

    Implements: Setlur et al. 2023, appendix D.
    """
    assert data.population is not None
    assert data.kinds is not None
    steps = {name: given.ifca_rate if r is None else r for name, r in RATES.items()}

    @full_precision.jit
    def labels(keys: Key, users: Users) -> dict[str, Array]:
        def of_run(key: Key) -> dict[str, Array]:
            start = histogram_clusters.far_apart(
                key,
                users,
                given.clusters,
                temperature=given.temperature,
                floor=given.floor,
                direction=given.direction,
            )

            def rounds(step: float) -> Array:
                def one(centers: Array, _: None) -> tuple[Array, Array]:
                    near = jax.lax.map(lambda b: histogram.nearest(histogram.histograms(b), centers), users)
                    after = histogram_clusters.cluster(users, centers, 1, floor=given.floor, rate=step).centers
                    return after, near.astype(jnp.int32)

                return jax.lax.scan(one, start, None, length=given.rounds + 1)[1]

            return {name: rounds(step) for name, step in steps.items()}

        return jax.lax.map(of_run, keys)

    key = jax.random.key(given.seed)
    keys = jax.vmap(lambda r: jax.random.fold_in(key, r))(jnp.arange(given.repetitions))
    clusters = max(given.clusters, len(data.population.shares))
    found = {name: histogram.each(own, data.clients.users) for name, own in labels(keys, data.clients.users).items()}
    sizes = np.asarray(data.clients.users.size)[np.asarray(data.clients.users.valid)]
    return {
        "bound": rate(data.population, float(np.median(sizes))),
        "wrong": {
            name: [float(np.mean([wrong(run[t], data.kinds, clusters) for run in own])) for t in range(own.shape[1])]
            for name, own in found.items()
        },
    }
