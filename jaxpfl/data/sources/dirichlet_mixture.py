r"""Synthetic users with histograms from a mixture of Dirichlet distributions (Setlur et al. 2023, section 2.1).

.. math:: c_u \sim w, \quad Q_u \sim Dir(\alpha P_{c_u}), \quad counts_u \sim Multinomial(m_u, Q_u)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpfl.data.sources.token_counts import TokenCounts, build
from jaxpfl.support.errors import JaxpflError


class DirichletMixture(NamedTuple):
    """A population: centers P [k, d], shares w [k], and the concentration alpha."""

    centers: np.ndarray
    shares: np.ndarray
    alpha: float


class Drawn(NamedTuple):
    """Users of a population: their counts, true histograms [n, d] float32, and clusters [n]."""

    counts: TokenCounts
    histograms: np.ndarray
    clusters: np.ndarray


def zipf_mixture(
    rng: np.random.Generator, tokens: int, clusters: int, alpha: float, spread: float = 1.0
) -> DirichletMixture:
    """Mixture with equal shares and centers ``P_k`` in proportion to ``exp(spread N(0, 1)) / rank``.

    These are word frequencies by Zipf's law, perturbed on the logarithmic scale in each cluster.

    Raises:
      JaxpflError: if alpha is not positive, or the spread is negative.
    """
    if not (0 < alpha < np.inf and 0 <= spread < np.inf):
        raise JaxpflError(f"alpha must be > 0 and spread >= 0, got {alpha} and {spread}")
    centers = np.exp(spread * rng.standard_normal((clusters, tokens))) / np.arange(1, tokens + 1)
    return DirichletMixture(centers / centers.sum(axis=1, keepdims=True), np.full(clusters, 1 / clusters), alpha)


def draw_users(rng: np.random.Generator, population: DirichletMixture, sizes: np.ndarray) -> Drawn:
    """Draw users with m_u = ``sizes[u]`` tokens each."""
    n, d = len(sizes), population.centers.shape[1]
    clusters = rng.choice(len(population.shares), size=n, p=population.shares)
    truth = np.empty((n, d), np.float32)
    rows, indices, counts = [], [], []
    for low in range(0, n, 1000):  # a gamma variable for each token: no more than 8 MB at a time
        part = slice(low, low + 1000)
        gammas = rng.standard_gamma(population.alpha * population.centers[clusters[part]])
        q = gammas / gammas.sum(axis=1, keepdims=True)
        found = rng.multinomial(sizes[part], q)
        u, x = np.nonzero(found)
        truth[part] = q
        rows.append(u + low)
        indices.append(x)
        counts.append(found[u, x])
    users, words = np.arange(n), np.arange(d).astype(str)
    made = build(np.concatenate(rows), np.concatenate(indices), np.concatenate(counts), users, words)
    return Drawn(made, truth, clusters)
