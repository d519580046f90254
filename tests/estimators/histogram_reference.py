"""Histogram estimators in float64 NumPy, written from the equations, and small users to try them on."""

from __future__ import annotations

import numpy as np
from scipy.special import gammaln

from jaxpfl.benchmarks.studies.histogram import simulated_users
from jaxpfl.estimators.histograms import base as histogram

FLOOR = 1e-5


def small(seed: int = 0, n: int = 60, d: int = 30, k: int = 3, alpha: float = 60.0, size: int | None = None):
    """Counts [n, d], true histograms [n, d], clusters [n] and the population; users of one size or of 20 to 79."""
    rng = np.random.default_rng(seed)
    population = simulated_users.zipf_mixture(rng, d, k, alpha)
    drawn = simulated_users.draw_users(rng, population, np.full(n, size) if size else rng.integers(20, 80, n))
    counts = np.zeros((n, d), int)
    counts[drawn.counts.rows, drawn.counts.indices] = drawn.counts.counts
    return counts, drawn.histograms.astype(float), drawn.clusters, population


def users_of(counts: np.ndarray, block: int = 16) -> histogram.Users:
    """From dense counts [n, d], in blocks of which the last is not full."""
    rows, indices = np.nonzero(counts)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(counts)))])
    return histogram.from_sparse(indptr, indices, counts[rows, indices], counts.shape[1], block)


def floored(p: np.ndarray, s: float = FLOOR) -> np.ndarray:
    p = np.maximum(p, s)
    return p / p.sum(-1, keepdims=True)


def kl(q: np.ndarray, p: np.ndarray) -> np.ndarray:
    return np.where(q > 0, q * (np.log(np.where(q > 0, q, 1)) - np.log(p)), 0).sum(-1)


def apart(q: np.ndarray, centers: np.ndarray) -> np.ndarray:
    return np.stack([kl(q, c) for c in centers], axis=1)


def algorithm_2(q: np.ndarray, start: np.ndarray, rounds: int, rate: float = 1.0) -> tuple[np.ndarray, list[float]]:
    centers, objective = floored(start), []
    for _ in range(rounds):
        distances = apart(q, centers)
        objective.append(distances.min(1).mean())
        own, new = distances.argmin(1), []
        for j, c in enumerate(centers):
            members = q[own == j]
            if len(members):
                new.append(c + rate * (members.mean(0) - c))
            else:
                new.append(np.full(q.shape[1], 1 / q.shape[1]) if rate == 1 else c)
        centers = floored(np.array(new))
    return centers, objective


def dirichlet_likelihood(c: np.ndarray, a: np.ndarray) -> np.ndarray:
    """[n, k]."""
    whole = a.sum(1)
    terms = gammaln(c[:, None] + a) - gammaln(a)
    return terms.sum(2) + gammaln(whole) - gammaln(c.sum(1)[:, None] + whole)
