"""Means in groups by dense matrices in float64 NumPy and SciPy: an oracle that shares no formula with the package."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy import linalg, optimize, stats

TURNIPS = np.array(
    [
        [[3.28, 3.09], [3.52, 3.48], [2.88, 2.80]], [[2.46, 2.44], [1.87, 1.92], [2.19, 2.19]],
        [[2.77, 2.66], [3.74, 3.44], [2.55, 2.55]], [[3.78, 3.87], [4.07, 4.12], [3.31, 3.31]],
    ]
)  # fmt: skip
"""Calcium in turnip greens, in per cent: four plants, three leaves of each, two determinations of each leaf (Snedecor
and Cochran, "Statistical Methods", analysed also in the manual of SAS's NESTED procedure)."""


class Groups(NamedTuple):
    within: float
    between: float
    log_likelihood: float
    overall: float
    mean: np.ndarray
    mse: np.ndarray
    group_mean: np.ndarray
    group_mse: np.ndarray
    residual: np.ndarray
    risk: float


def log_likelihood(x: np.ndarray, s: np.ndarray, group: np.ndarray, A: float, B: float) -> float:
    """Density of contrasts of all estimates that a common mean does not touch."""
    one = np.ones((len(x), 1))
    V: Any = covariance(s, group, A, B)
    contrasts = linalg.null_space(one.T).T
    return stats.multivariate_normal.logpdf(contrasts @ x, np.zeros(len(x) - 1), contrasts @ V @ contrasts.T)


def covariance(s: np.ndarray, group: np.ndarray, A: float, B: float) -> np.ndarray:
    return np.diag(A + s**2) + B * (group[:, None] == group)


def mean_of(V: np.ndarray) -> np.ndarray:
    half = linalg.solve(V, np.ones(len(V)))
    return half / half.sum()


def groups(x: np.ndarray, s: np.ndarray, group: np.ndarray) -> Groups:
    """Fit and predict; group of whole numbers from 0."""
    m, same = len(x), (group[:, None] == group).astype(float)
    member = (np.arange(group.max() + 1)[:, None] == group).astype(float)

    def minus(logs: np.ndarray, which: tuple[bool, bool]) -> float:
        both = np.zeros(2)
        both[list(which)] = np.exp(2 * logs)
        return -log_likelihood(x, s, group, both[0], both[1])

    found = [(-log_likelihood(x, s, group, 0, 0), np.zeros(2))]
    for which in ((True, False), (False, True), (True, True)):
        for start in (-1.0, 0.5):
            best: Any = optimize.minimize(
                lambda logs, which=which: minus(logs, which),
                np.full(sum(which), start),
                method="Nelder-Mead",
                options={"xatol": 1e-9, "fatol": 1e-13},
            )
            both = np.zeros(2)
            both[list(which)] = np.exp(2 * best.x)
            found.append((best.fun, both))
    least = min(value for value, _ in found)
    A, B = next(both for value, both in found if value <= least + 1e-9)
    V = covariance(s, group, A, B)

    def predictors(A: float, B: float) -> np.ndarray:
        """Linear maps of x to the groups' means, then the clients', [G + m, m]."""
        V = covariance(s, group, A, B)
        overall = np.outer(np.ones(m), mean_of(V))
        rest = np.eye(m) - overall
        of_groups = overall[: len(member)] + B * member @ linalg.solve(V, rest)
        return np.vstack([of_groups, overall + (A * np.eye(m) + B * same) @ linalg.solve(V, rest)])

    def error(A: float, B: float) -> np.ndarray:
        """Mean squared errors at the spreads A and B, known."""
        M, V = predictors(A, B), covariance(s, group, A, B)
        truth = np.vstack([B * member, A * np.eye(m) + B * same])  # covariance with x
        own = np.concatenate([np.full(len(member), B), np.full(m, A + B)])
        return np.diag(M @ V @ M.T) - 2 * (M * truth).sum(axis=1) + own

    M = predictors(A, B)
    inverse = linalg.inv(V)
    parts = [np.eye(m), same]
    information = np.array([[np.trace(inverse @ a @ inverse @ b) / 2 for b in parts] for a in parts])
    h = 1e-4 * s.min() ** 2
    # Known overall mean for the third term, as to this order it does not matter.
    moves = []
    for step in np.eye(2) * h:
        up, down = (shrinker(s, group, member, same, A + a, B + b) for a, b in (step, -step))
        moves.append((up - down) / (2 * h))
    slopes = np.array([[np.einsum("ij,jk,ik->i", a, V, b) for b in moves] for a in moves])
    of_fit = np.einsum("abi,ab->i", slopes, linalg.inv(information))
    mse = error(A, B) + 2 * of_fit
    residual = []
    for i in range(m):
        others = np.arange(m) != i
        own, cross = V[np.ix_(others, others)], V[i, others]
        a = mean_of(own)
        weight = a + linalg.solve(own, cross) @ (np.eye(m - 1) - np.outer(np.ones(m - 1), a))
        spread = V[i, i] - 2 * weight @ cross + weight @ own @ weight
        residual.append((x[i] - weight @ x[others]) / spread**0.5)
    G = len(member)
    risk = ((M[G:] @ x - x) ** 2 + 2 * s**2 * np.diag(M[G:]) - s**2).mean()
    return Groups(
        A, B, log_likelihood(x, s, group, A, B), float(mean_of(V) @ x), M[G:] @ x, mse[G:], M[:G] @ x, mse[:G],
        np.array(residual), risk,
    )  # fmt: skip


def shrinker(s: np.ndarray, group: np.ndarray, member: np.ndarray, same: np.ndarray, A: float, B: float) -> np.ndarray:
    """Covariances with x times its inverse covariance, [G + m, m]."""
    V = covariance(s, group, A, B)
    return np.vstack([B * member, A * np.eye(len(s)) + B * same]) @ linalg.inv(V)
