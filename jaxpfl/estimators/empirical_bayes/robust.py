r"""Empirical Bayes confidence intervals that are valid for any distribution of the clients' means.

Client i's linear estimate is :math:`c + w_i (x_i - c)` with :math:`w_i = \mu_2 / (\mu_2 + s_i^2)`. The interval
:math:`\pm\, \mathrm{cva}(s_i^2 / \mu_2, \kappa)\, w_i s_i` about the estimate covers theta_i with at least the nominal
probability, on average over the clients, for any distribution of the theta_i with the variance mu_2 and the kurtosis
kappa. Let the half width chi and the bias be in units of the estimate's standard deviation. The function :math:`r(t,
\chi) = \Phi(-\chi - \sqrt t) + \Phi(\sqrt t - \chi)` is the probability that an interval of half width chi misses
theta_i if the squared bias is t. The critical value cva(t, kappa) is the chi for which the largest expectation of r,
over all distributions of the squared bias with mean t and mean square kappa t^2, is 1 - level.

By duality the largest expectation at a given chi is the minimum, over t_0, of

.. math:: r(t_0) + (t - t_0) r'(t_0) + \lambda \big((t - t_0)^2 + (\kappa - 1) t^2\big),

where lambda >= 0 is the smallest number for which the quadratic function :math:`r(t_0) + (u - t_0) r'(t_0) + \lambda (u
- t_0)^2` of the squared bias u is never below r(u). Both t_0 and lambda are searched on a grid; probabilities are
accurate to 4e-5. All computations run on the host, with SciPy, because differences of probabilities lose their digits
in single precision.

Reference: Armstrong, Kolesar and Plagborg-Moller 2022, "Robust empirical Bayes confidence intervals".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer

from jaxpfl.core.types import Scalar
from jaxpfl.estimators.empirical_bayes import inputs
from jaxpfl.estimators.empirical_bayes.normal_means import checked_arrays
from jaxpfl.support.errors import JaxpflError

_PLACES, _TANGENTS, _TABLE = 240, 60, 64  # numbers of biases and tangents; fewest table entries
_STEP = 0.055  # largest step of log(1 + t) in the table
_REACH = 9.0  # the probability of a miss rises within this distance from chi


class RobustIntervals(NamedTuple):
    """Linear estimates and their intervals.

    Attributes:
      mean: linear estimates c + w (x - c), [m].
      low, high: endpoints of the intervals, [m].
      weight: weights w of the clients' own estimates, [m].
      center: center c, [].
      variance: variance mu_2 of the clients' means, positive, [].
      kurtosis: kurtosis kappa of the clients' means, at least 1, [].
    """

    mean: Any
    low: Any
    high: Any
    weight: Any
    center: Any
    variance: Any
    kurtosis: Any


def robust_intervals(x: Any, s: Any, level: float = 0.95, *, kurtosis: Scalar | None = None) -> RobustIntervals:
    r"""Robust intervals about the linear estimates, with mu_2 and kappa learned from all clients.

    c is the mean of x with weights :math:`\omega_i = s_i^{-2}`. Let e = x - c. With the same weights, mu_2 is the mean
    of :math:`e_i^2 - s_i^2`, and kappa mu_2^2 is the mean of :math:`e_i^4 - 6 s_i^2 e_i^2 + 3 s_i^4`. If an estimate of
    mu_2 or kappa is below a lower bound, the bound is used instead (the paper's posterior mean trimming). The bound is
    the posterior mean of the parameter under a flat prior if its estimate is zero.

    Results are NumPy arrays and numbers.

    Args:
      x: the clients' estimates, [m].
      s: positive standard errors, [m], or one for all clients.
      level: coverage probability, in (0, 1).
      kurtosis: kurtosis kappa; by default learned. If infinite, only the variance is used, which makes the intervals
        wider. Use infinity if there are too few clients to learn a fourth moment. If standard errors are larger than
        the spread of the means, a few thousand clients are needed.

    Raises:
      JaxpflError: as in `ebnm`; or if the level is outside (0, 1), or the function is called in a JAX transformation.
    """
    inputs.level_within(level, np.float64)
    own, errors = checked_arrays(x, s, one=False)
    if isinstance(own, Tracer) or isinstance(errors, Tracer):
        raise JaxpflError("robust intervals run on the host: call robust_intervals outside jit and vmap")
    errors = np.broadcast_to(errors, own.shape)
    unit = float(np.exp(np.log(errors).mean()))
    e, y = errors / unit, own / unit
    omega = e**-2.0
    total = omega.sum()
    center = omega @ y / total
    off = y - center
    least = 2 * (omega**2 @ e**4) / (total * (omega @ e**2))
    variance = np.maximum(omega @ (off**2 - e**2) / total, least)
    fourth = omega @ (off**4 - 6 * e**2 * off**2 + 3 * e**4) / total
    flattest = 1 + 32 * (omega**2 @ e**8) / (variance**2 * total * (omega @ e**4))
    kurtosis = float(np.maximum(fourth / variance**2, flattest) if kurtosis is None else kurtosis)
    weight = variance / (variance + e**2)
    reach = critical_value(e**2 / variance, kurtosis, level) * weight * e
    mean = center + weight * off
    numbers = (float(unit * center), float(unit**2 * variance), kurtosis)
    return RobustIntervals(unit * mean, unit * (mean - reach), unit * (mean + reach), weight, *numbers)


def critical_value(t: Any, kurtosis: Scalar = np.inf, level: float = 0.95) -> np.ndarray:
    """Half width, in standard deviations, of intervals about a biased estimate.

    The intervals are valid for every distribution of the bias with mean square t and the given kurtosis.

    Args:
      t: mean squares of the bias in units of the estimate's variance, shape [...], at least 0. For more than 64
        distinct values the result is interpolated, and is then too large by less than 0.1 %.
      kurtosis: kurtosis of the bias, at least 1; infinite if unknown.
      level: coverage probability, in (0, 1).

    Raises:
      JaxpflError: if a number is outside its range.
    """
    inputs.level_within(level, np.float64)
    flat = np.ravel(np.asarray(t, np.float64))
    if not (np.isfinite(flat) & (flat >= 0)).all():
        raise JaxpflError(f"t must be finite and at least 0, got {flat[~(flat >= 0) | ~np.isfinite(flat)][0]}")
    if not kurtosis >= 1:
        raise JaxpflError(f"kurtosis must be at least 1, got {kurtosis}")
    at, back = np.unique(flat, return_inverse=True)
    low, high = np.log1p(at[0]), np.log1p(at[-1])
    places = max(_TABLE, int((high - low) / _STEP) + 1)
    if len(at) <= places:
        return _critical(at, kurtosis, level)[back].reshape(np.shape(t))
    table = np.expm1(np.linspace(low, high, places))
    return np.interp(np.log1p(flat), np.log1p(table), _critical(table, kurtosis, level)).reshape(np.shape(t))


def worst_miss(t: float, kurtosis: Scalar, chi: float) -> float:
    """Largest probability that an interval of half width chi misses theta.

    The maximum is over all distributions of the bias with mean square t and the given kurtosis.
    """
    from scipy import special

    # The grid is dense near chi, because r rises only within a few units of chi, even if chi is large.
    rise = chi + np.linspace(-np.minimum(_REACH, chi), _REACH, _PLACES // 2)
    b = np.sort(np.concatenate([np.linspace(0, chi, _PLACES // 2), rise]))
    x, r = b**2, special.ndtr(-chi - b) + special.ndtr(b - chi)
    # Tangent points t_0 at the mean, and on both sides of the mean.
    near_mean = np.reshape(np.maximum(np.sqrt(t), 1e-6), 1)
    b0 = np.concatenate([np.linspace(0, chi, _TANGENTS // 2), rise[:: _PLACES // _TANGENTS], near_mean])
    x0, r0 = b0**2, special.ndtr(-chi - b0) + special.ndtr(b0 - chi)
    density = lambda u: np.exp(-(u**2) / 2) / np.sqrt(2 * np.pi)  # noqa: E731
    # Derivative of r with respect to b^2, with its limit at zero.
    slope = np.where(b0 > 1e-4, (density(b0 - chi) - density(b0 + chi)) / np.maximum(2 * b0, 1e-12), chi * density(chi))
    gap = x[None] - x0[:, None]
    near = np.abs(gap) < 1e-6 * (1 + x0[:, None])
    above = np.where(near, 0, (r[None] - r0[:, None] - gap * slope[:, None]) / np.where(near, 1, gap) ** 2)
    bend = np.maximum(above.max(axis=1), 0)
    finite = np.where(np.isinf(kurtosis), 1.0, kurtosis)
    spread = np.where(np.isinf(kurtosis), np.inf, (x0 - t) ** 2 + (finite - 1) * t**2)
    bound = r0 + (t - x0) * slope + np.where(bend > 0, np.where(bend > 0, bend, 1) * spread, 0)
    root = np.sqrt(t)
    alike = special.ndtr(-chi - root) + special.ndtr(root - chi)  # at kurtosis 1 every bias has the same size
    most = np.minimum(np.minimum(bound.min(), _envelope(t, x, r)), 1.0)
    return float(np.where(t >= x[-1], 1.0, np.where(kurtosis == 1, alike, most)))


def _envelope(t: Any, x: Any, r: Any) -> Any:
    """Smallest concave function above r(x), at t: a chord from r(0) that touches r, then r itself."""
    chords = np.where(x > 0, (r - r[0]) / np.where(x > 0, x, 1), -np.inf)
    touch = np.argmax(chords)
    return np.where(t <= x[touch], r[0] + t * chords[touch], np.interp(t, x, r))


def _critical(t: np.ndarray, kurtosis: Scalar, level: float) -> np.ndarray:
    from scipy import special

    least = special.ndtri((1 + level) / 2)
    ends = (least + 0 * t, least + (t / (1 - level)) ** 0.5 + 1e-9)  # by Chebyshev's inequality
    found = np.empty_like(t)
    for i, (own, low, high) in enumerate(zip(t, *ends, strict=True)):
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if worst_miss(own, kurtosis, middle) > 1 - level else (low, middle)
        found[i] = high
    return found
