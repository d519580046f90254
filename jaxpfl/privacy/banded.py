r"""Banded matrix factorisation of the prefix sums: the coefficients of C, and the error of the sums under its noise.

The server's model is a prefix sum of the rounds' releases, A x with A the lower triangle of ones. Noise
:math:`C^{-1} Z` on x, with Z independent N(0, s^2), is as private as Z on C x; for C lower triangular this holds for
adaptive x too (Denisov et al. 2022). Here C is Toeplitz with b bands, :math:`C_{ij} = c_{i-j}` for
:math:`0 \le i - j < b`, and :math:`\|c\| = 1`. Columns that are at least b apart share no row, so that a client in k
rounds, at least b apart, changes C x by at most :math:`\sqrt k` times its clipping norm. The mean squared error of
the R prefix sums is

.. math:: \frac{s^2}{R} \sum_{t < R} \sum_{i \le t} w_i^2, \qquad w = A C^{-1} e_1

and :math:`s^2 (R + 1) / 2` for independent noise, C = I.

Reference: Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization: A unified approach to private
training", https://arxiv.org/abs/2306.08153.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from jaxpfl.core import checks
from jaxpfl.support.errors import JaxpflError


@lru_cache(maxsize=64)
def coefficients(bands: int, rounds: int) -> tuple[float, ...]:
    """Coefficients c of the C with the least mean squared error of the prefix sums, of norm 1.

    They are found by L-BFGS in float64 from those of the square root of A, cut to the bands.

    Args:
      bands: b, at most R.
      rounds: R.

    Raises:
      JaxpflError: for bands outside 1 ... R.

    Examples:
      >>> [round(c, 3) for c in coefficients(3, 20)]
      [0.8, 0.477, 0.363]
    """
    from scipy.optimize import minimize

    checks.count("rounds", rounds)
    checks.count("bands", bands, most=rounds)
    if bands == 1:
        return (1.0,)
    k = np.arange(1, bands)
    root = np.cumprod((2 * k - 1) / (2 * k))
    found = minimize(_log_error, root, (rounds,), jac=True, method="L-BFGS-B", options={"maxiter": 500, "gtol": 1e-8})
    c = np.concatenate([[1.0], found.x])
    return tuple((c / np.linalg.norm(c)).tolist())


def prefix_error(c: tuple[float, ...], rounds: int) -> float:
    """Root of the mean squared error of the prefix sums over R rounds, for s = 1 and C of norm |c|."""
    w = _filtered(np.asarray(c), np.ones(rounds))
    return float(np.sqrt(w**2 @ np.arange(rounds, 0, -1) / rounds))


def ratio(c: tuple[float, ...], rounds: int) -> float:
    """Error of R prefix sums over that of independent noise, at an equal epsilon for the same cohorts.

    A client's k turns cost the same under both: in each, its sum is released with noise multiplier z.

    Examples:
      >>> round(ratio(coefficients(10, 100), 100), 3)
      0.415
    """
    return prefix_error(c, rounds) / prefix_error((1.0,), rounds)


def check_coefficients(c: tuple[float, ...], bands: int) -> None:
    """Refuse coefficients that are not b finite ones of norm 1 with a positive first.

    Raises:
      JaxpflError.
    """
    values = np.asarray(c, float)
    if values.shape != (bands,) or not np.isfinite(values).all() or values[0] <= 0:
        raise JaxpflError(f"coefficients must be bands = {bands} finite numbers, the first positive, got {c}")
    if abs(np.linalg.norm(values) - 1) > 1e-9:
        raise JaxpflError(f"coefficients must be of norm 1, got {np.linalg.norm(values):g}")


def _filtered(c: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Solution w of C w = x."""
    from scipy.signal import lfilter

    return np.asarray(lfilter([1.0], c, x))


def _log_error(free: np.ndarray, rounds: int) -> tuple[float, np.ndarray]:
    """Logarithm of |c|^2 times the mean squared error, for c = (1, free), and its gradient by the adjoint of C."""
    c = np.concatenate([[1.0], free])
    weights = np.arange(rounds, 0, -1) / rounds
    w = _filtered(c, np.ones(rounds))
    error, norm = w**2 @ weights, c @ c
    if not np.isfinite(error):
        return np.inf, np.zeros_like(free)
    adjoint = _filtered(c, (2 * weights * w)[::-1])[::-1]
    slope = np.array([-adjoint[j:] @ w[: rounds - j] for j in range(1, len(c))])
    return float(np.log(error) + np.log(norm)), slope / error + 2 * free / norm
