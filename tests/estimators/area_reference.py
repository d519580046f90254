"""The area model by dense matrices in float64 NumPy and SciPy: an oracle that shares no formula with the package."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy import linalg, optimize, stats

BCG = np.array(
    [
        [4, 119, 11, 128, 44, 1948], [6, 300, 29, 274, 55, 1949], [3, 228, 11, 209, 42, 1960],
        [62, 13536, 248, 12619, 52, 1977], [33, 5036, 47, 5761, 13, 1973], [180, 1361, 372, 1079, 44, 1953],
        [8, 2537, 10, 619, 19, 1973], [505, 87886, 499, 87892, 13, 1980], [29, 7470, 45, 7232, 27, 1968],
        [17, 1699, 65, 1600, 42, 1961], [186, 50448, 141, 27197, 18, 1974], [5, 2493, 3, 2338, 33, 1969],
        [27, 16886, 29, 17825, 33, 1976],
    ],
    float,
)  # fmt: skip
"""Thirteen trials of the BCG vaccine (Colditz et al. 1994): cases and others among the vaccinated, cases and others
among controls, latitude, year."""


def bcg() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log risk ratios, their standard errors, and latitude and year."""
    a, b, c, d, *z = BCG.T
    x = np.log(a / (a + b)) - np.log(c / (c + d))
    return x, (1 / a - 1 / (a + b) + 1 / c - 1 / (c + d)) ** 0.5, np.stack(z, axis=1)


class Area(NamedTuple):
    variance: float
    log_likelihood: float
    beta: np.ndarray
    beta_covariance: np.ndarray
    mean: np.ndarray
    mse: np.ndarray
    risk: float


def area(x: np.ndarray, s: np.ndarray, z: np.ndarray, fit: str) -> Area:
    """Fit and predict; z with its column of ones.

    The restricted likelihood is that of contrasts that the columns do not touch. Errors of the predictor at a known A
    are those of a linear map of x; what fitting A costs is by differences of the map, and its bias by the expectation
    of the likelihood's derivative.
    """
    m = len(z)
    contrasts = linalg.null_space(z.T).T

    def log_likelihood(A: float) -> float:
        V: Any = np.diag(A + s**2)
        if fit == "reml":
            own = contrasts @ x
            return stats.multivariate_normal.logpdf(own, np.zeros(len(own)), contrasts @ V @ contrasts.T)
        return stats.multivariate_normal.logpdf(x, z @ coefficients(A) @ x, V)

    def coefficients(A: float) -> np.ndarray:
        root = 1 / np.sqrt(A + s**2)
        return linalg.pinv(root[:, None] * z) * root

    def predictor(A: float) -> np.ndarray:
        line = z @ coefficients(A)
        return line + np.diag(A / (A + s**2)) @ (np.eye(m) - line)

    tries: list[Any] = [
        optimize.minimize_scalar(
            lambda log_sd: -log_likelihood(np.exp(2 * log_sd)),
            bounds=(low, low + 1), method="bounded", options={"xatol": 1e-11},
        )
        for low in np.log(s.min()) + np.arange(-6, 8)
    ]  # fmt: skip
    best = min(tries, key=lambda found: found.fun)
    A = 0.0 if log_likelihood(0.0) >= -best.fun - 1e-9 else float(np.exp(2 * best.x))
    V = np.diag(A + s**2)
    M = predictor(A)
    known = np.diag(M @ V @ M.T - A * (M + M.T) + A * np.eye(m))
    information = (np.diag(V) ** -2.0).sum() / 2

    def own_weight(A: float) -> np.ndarray:
        return A / (A + s**2)

    h = 1e-5 * (A + s.min() ** 2)
    moved = (own_weight(A + h) - own_weight(A - h)) / (2 * h)
    of_fit = moved**2 * np.diag(V) / information
    mse = known + 2 * of_fit
    if fit == "ml":
        inverse = np.linalg.inv(V)
        P = inverse - inverse @ z @ coefficients(A)
        bias = (np.trace(P) - np.trace(inverse)) / 2 / information
        slope = (own_weight(A + h) * s**2 - own_weight(A - h) * s**2) / (2 * h)
        mse = mse - bias * slope
    beta = coefficients(A)
    risk = ((M @ x - x) ** 2 + 2 * s**2 * np.diag(M) - s**2).mean()
    return Area(A, log_likelihood(A), beta @ x, beta @ V @ beta.T, M @ x, mse, risk)
