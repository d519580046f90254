r"""Simulated users of the histogram study.

The token distribution :math:`Q_u` of each user u is drawn from a mixture of Dirichlet distributions with weights w,
means :math:`P_c` and concentration alpha; the user then has :math:`m_u` tokens (Setlur et al. 2023, section 2.1):

.. math:: c_u \sim w, \quad Q_u \sim Dir(\alpha P_{c_u}), \quad counts_u \sim Multinomial(m_u, Q_u)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpfl.core import checks

from . import token_counts


class DirichletMixture(NamedTuple):
    """A mixture of Dirichlet distributions with centers P [k, d], shares w [k], and concentration alpha."""

    centers: np.ndarray
    shares: np.ndarray
    alpha: float


class Drawn(NamedTuple):
    """Users drawn from a `DirichletMixture`: their counts, true histograms [n, d] float32, and true clusters [n]."""

    counts: token_counts.TokenCounts
    histograms: np.ndarray
    clusters: np.ndarray


def zipf_mixture(
    rng: np.random.Generator, tokens: int, clusters: int, alpha: float, spread: float = 1.0
) -> DirichletMixture:
    """Return a mixture with equal shares, whose centers ``P_k`` are proportional to ``exp(spread N(0, 1)) / rank``.

    The centers follow Zipf's law, multiplied by log-normal noise that is independent for each cluster and token.

    Raises:
      JaxpflError: if alpha is not positive, the spread is negative, or either is not finite.
    """
    checks.positive("alpha", alpha)
    checks.not_negative("spread", spread)
    centers = np.exp(spread * rng.standard_normal((clusters, tokens))) / np.arange(1, tokens + 1)
    return DirichletMixture(centers / centers.sum(axis=1, keepdims=True), np.full(clusters, 1 / clusters), alpha)


def draw_users(rng: np.random.Generator, population: DirichletMixture, sizes: np.ndarray) -> Drawn:
    """Draw users with m_u = ``sizes[u]`` tokens each."""
    n, d = len(sizes), population.centers.shape[1]
    clusters = rng.choice(len(population.shares), size=n, p=population.shares)
    truth = np.empty((n, d), np.float32)
    rows, indices, counts = [], [], []
    for low in range(0, n, 1000):  # in blocks of users, to limit memory: each user needs a gamma draw for every token
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
    made = token_counts.build(np.concatenate(rows), np.concatenate(indices), np.concatenate(counts), users, words)
    return Drawn(made, truth, clusters)
