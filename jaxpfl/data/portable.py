"""Random numbers that are identical on every platform: uniform, normal, and log-gamma draws.

NumPy's own normal, gamma and Dirichlet draws call the platform's ``log`` and ``exp``. The last bit of their results
differs between C libraries, so a split drawn with them can differ by an example. This module starts from PCG64's raw
64-bit integers. It uses only additions, multiplications, divisions and square roots in float64, because IEEE 754
prescribes how their results are rounded. Each NumPy call does one operation, so no two operations are fused. Sums are
computed in the order of the elements.
"""

from __future__ import annotations

import numpy as np

_LOG2_HIGH = 0.693147180369123816490  # ln 2 = high + low; the last bits of high are zero, so k * high is exact
_LOG2_LOW = 1.90821492927058770002e-10
_INVERSE_LOG2 = 1.4426950408889634
_ROOT_HALF = 0.7071067811865476
_LOG_TERMS = 13  # the first term left out is below 1e-20, as |s| <= 0.172
_EXP_TERMS = 18  # the first term left out is below 1e-25, as |rest| <= ln(2) / 2
_SMALLEST_EXPONENT = -745.0  # exp of this is the smallest positive float64


def uniform(rng: np.random.Generator, n: int) -> np.ndarray:
    """Uniform draws strictly between 0 and 1, [n]: each is the midpoint of one of 2**52 equal intervals."""
    raw = rng.bit_generator.random_raw(n)
    return ((np.asarray(raw, np.uint64) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def log(x: np.ndarray) -> np.ndarray:
    """Natural logarithm of positive numbers, accurate to a few units in the last place.

    x is decomposed into mantissa * 2**exponent, with the mantissa near 1. The logarithm of the mantissa is computed by
    the series of 2 artanh((mantissa - 1) / (mantissa + 1)).
    """
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    low = mantissa < _ROOT_HALF
    mantissa = np.where(low, mantissa * 2.0, mantissa)
    exponent = exponent - low
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = np.full_like(s, 1.0 / (2 * _LOG_TERMS - 1))
    for k in range(_LOG_TERMS - 2, -1, -1):
        series = series * square
        series = series + 1.0 / (2 * k + 1)
    return exponent * _LOG2_HIGH + (exponent * _LOG2_LOW + 2.0 * s * series)


def exp(x: np.ndarray) -> np.ndarray:
    """Exponential of numbers <= 700, accurate to a few units in the last place.

    The result is 2**k exp(r) with x = k ln 2 + r and an integer k. exp(r) is computed from its Taylor series.
    """
    x = np.maximum(np.asarray(x, np.float64), _SMALLEST_EXPONENT)
    power = np.rint(x * _INVERSE_LOG2)
    rest = (x - power * _LOG2_HIGH) - power * _LOG2_LOW
    series = np.ones_like(rest)
    for k in range(_EXP_TERMS, 0, -1):
        series = series * rest / k
        series = series + 1.0
    return np.ldexp(series, power.astype(np.int64))


def normal(rng: np.random.Generator, n: int) -> np.ndarray:
    """Standard normal draws, [n], by Marsaglia's polar method (Marsaglia and Bray 1964)."""
    found, missing = [np.zeros(0)], n
    while missing > 0:
        pairs = 2.0 * uniform(rng, missing + missing % 2).reshape(2, -1) - 1.0
        square = pairs[0] * pairs[0] + pairs[1] * pairs[1]
        inside = (square > 0.0) & (square < 1.0)
        pairs, square = pairs[:, inside], square[inside]
        found.append((pairs * np.sqrt(-2.0 * log(square) / square)).ravel())
        missing -= found[-1].size
    return np.concatenate(found)[:n]


def log_gamma(rng: np.random.Generator, shape: float, n: int) -> np.ndarray:
    """Logarithms of Gamma(shape, 1) draws, [n] (Marsaglia and Tsang 2000).

    For a shape a < 1, a draw with shape a + 1 is multiplied by U**(1 / a), with U uniform in (0, 1). The logarithms are
    returned, because most draws with a small shape would underflow to zero.
    """
    larger = shape if shape >= 1.0 else shape + 1.0
    d = larger - 1.0 / 3.0
    c = 1.0 / float(np.sqrt(9.0 * d))
    found, missing = [np.zeros(0)], n
    while missing > 0:
        x, u = normal(rng, missing), uniform(rng, missing)
        root = 1.0 + c * x
        good = root > 0.0
        x, u, root = x[good], u[good], root[good]
        v = root * root * root
        log_v = log(v)
        accepted = log(u) < 0.5 * x * x + d - d * v + d * log_v
        found.append(log_v[accepted])
        missing -= found[-1].size
    draws = np.concatenate(found)[:n] + log(np.array([d]))
    return draws if shape >= 1.0 else draws + log(uniform(rng, n)) / shape


def proportions(log_weights: np.ndarray) -> np.ndarray:
    """Return exp(log_weights), normalized to the sum 1 along the last axis. The largest weight never underflows."""
    weights = exp(log_weights - log_weights.max(axis=-1, keepdims=True))
    return weights / np.add.accumulate(weights, axis=-1)[..., -1:]
