r"""Empirical Bayes confidence intervals that cover whatever the distribution of the clients' means.

About the linear estimate :math:`c + w_i (x_i - c)`, :math:`w_i = \mu_2 / (\mu_2 + s_i^2)`, the interval
:math:`\pm\, \mathrm{cva}(s_i^2 / \mu_2, \kappa)\, w_i s_i` covers theta_i at least with the nominal probability, on
average over the clients, for any distribution with the variance mu_2 and the kurtosis kappa. With
:math:`r(t, \chi) = \Phi(-\chi - \sqrt t) + \Phi(\sqrt t - \chi)`, the probability of missing at the squared bias t,
cva(t, kappa) is the chi at which the greatest expectation of r is 1 - level, over all distributions of a squared bias
with mean t and mean square kappa t^2.

By duality that expectation is the least, over t_0, of

.. math:: r(t_0) + (t - t_0) r'(t_0) + \lambda \big((t - t_0)^2 + (\kappa - 1) t^2\big),

with the least lambda >= 0 for which the quadratic lies above r everywhere. Both are searched for on a grid, on the
host, in double precision: probabilities are right to 4e-5.

Reference: Armstrong, Kolesar and Plagborg-Moller 2022, "Robust empirical Bayes confidence intervals".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer

from jaxpfl import checks
from jaxpfl.errors import JaxpflError
from jaxpfl.estimators.normal_means.fit import values

_PLACES, _TANGENTS, _TABLE = 240, 60, 64
_REACH = 9.0


class RobustIntervals(NamedTuple):
    """Linear estimates and their intervals.

    Attributes:
      mean: c + w (x - c), [m].
      low, high: ends, [m].
      weight: w, [m].
      center: c.
      variance: mu_2, of the clients' means, above zero.
      kurtosis: kappa, at least 1.
    """

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    weight: np.ndarray
    center: float
    variance: float
    kurtosis: float


def robust_intervals(x: Any, s: Any, level: float = 0.95, *, kurtosis: float | None = None) -> RobustIntervals:
    r"""Intervals about the linear estimates, with mu_2 and kappa learned from all clients.

    c is the mean with weights :math:`\omega_i = s_i^{-2}`, and with the same weights mu_2 is the mean of
    :math:`e_i^2 - s_i^2`, kappa mu_2^2 that of :math:`e_i^4 - 6 s_i^2 e_i^2 + 3 s_i^4`, for e = x - c; both are kept
    from below by what a posterior mean under a flat prior has at zero (the paper's posterior mean trimming).

    Args:
      x: the clients' estimates, [m].
      s: their standard errors, [m], or one for all.
      level: within (0, 1).
      kurtosis: kappa, learned unless given; infinite lets the variance alone count, which widens the intervals where
        clients are too few to learn a fourth moment (below some thousands, if errors are larger than effects).

    Raises:
      JaxpflError: as `ebnm`; under a transformation; and for a level outside (0, 1).
    """
    checks.probability("level", level)
    if isinstance(x, Tracer) or isinstance(s, Tracer):
        raise JaxpflError("robust_intervals run on the host: call them outside jit and vmap")
    own, errors = values(x, s, one=False)
    errors = np.broadcast_to(errors, own.shape)
    unit = float(np.exp(np.log(errors).mean()))
    e, y = errors / unit, own / unit
    omega = e**-2.0
    total = omega.sum()
    center = omega @ y / total
    off = y - center
    least = 2 * (omega**2 @ e**4) / (total * (omega @ e**2))
    variance = max(omega @ (off**2 - e**2) / total, least)
    fourth = omega @ (off**4 - 6 * e**2 * off**2 + 3 * e**4) / total
    flattest = 1 + 32 * (omega**2 @ e**8) / (variance**2 * total * (omega @ e**4))
    if kurtosis is None:
        kurtosis = float(max(fourth / variance**2, flattest))
    weight = variance / (variance + e**2)
    reach = critical_value(e**2 / variance, kurtosis, level) * weight * e
    mean = center + weight * off
    ends = mean - reach, mean + reach
    return RobustIntervals(
        unit * mean,
        unit * ends[0],
        unit * ends[1],
        weight,
        float(unit * center),
        float(unit**2 * variance),
        float(kurtosis),
    )


def critical_value(t: Any, kurtosis: float = np.inf, level: float = 0.95) -> np.ndarray:
    """The half width, in standard deviations, that covers at a mean squared bias t of this kurtosis.

    Args:
      t: mean squares of the bias in units of the estimate's variance, shape [...], at least 0. Of more than 64
        different ones the values are interpolated, which changes them by less than 1e-3 of themselves.
      kurtosis: of the bias, at least 1; infinite where it is not known.
      level: within (0, 1).

    Raises:
      JaxpflError.
    """
    checks.probability("level", level)
    flat = np.ravel(np.asarray(t, np.float64))
    if not (np.isfinite(flat) & (flat >= 0)).all():
        raise JaxpflError(f"t must be finite and at least 0, got {flat[~(flat >= 0) | ~np.isfinite(flat)][0]}")
    if not kurtosis >= 1:
        raise JaxpflError(f"kurtosis must be at least 1, got {kurtosis}")
    at, back = np.unique(flat, return_inverse=True)
    if len(at) <= _TABLE:
        found = _critical(at, kurtosis, level)[back]
    else:
        table = np.expm1(np.linspace(np.log1p(at[0]), np.log1p(at[-1]), _TABLE))
        found = np.interp(np.log1p(flat), np.log1p(table), _critical(table, kurtosis, level))
    return found.reshape(np.shape(t))


def worst_miss(t: float, kurtosis: float, chi: float) -> float:
    """The greatest probability of missing at a mean squared bias t of this kurtosis."""
    from scipy import special

    # r rises within a few units about chi, however large that is.
    rise = chi + np.linspace(-min(_REACH, chi), _REACH, _PLACES // 2)
    b = np.unique(np.append(np.linspace(0, chi, _PLACES // 2), rise))
    x, r = b**2, special.ndtr(-chi - b) + special.ndtr(b - chi)
    if t >= x[-1]:
        return 1.0
    if kurtosis == 1:
        return float(special.ndtr(-chi - t**0.5) + special.ndtr(t**0.5 - chi))
    # Tangents at the mean itself, and on either side of it.
    b0 = np.concatenate([np.linspace(0, chi, _TANGENTS // 2), rise[:: _PLACES // _TANGENTS], [max(t**0.5, 1e-6)]])
    x0, r0 = b0**2, special.ndtr(-chi - b0) + special.ndtr(b0 - chi)
    density = lambda u: np.exp(-(u**2) / 2) / np.sqrt(2 * np.pi)  # noqa: E731
    # By b^2, with its limit at zero.
    slope = np.where(b0 > 1e-4, (density(b0 - chi) - density(b0 + chi)) / np.maximum(2 * b0, 1e-12), chi * density(chi))
    gap = x[None] - x0[:, None]
    near = np.abs(gap) < 1e-6 * (1 + x0[:, None])
    above = np.where(near, 0, (r[None] - r0[:, None] - gap * slope[:, None]) / np.where(near, 1, gap) ** 2)
    bend = np.maximum(above.max(axis=1), 0)
    spread = (x0 - t) ** 2 + ((kurtosis - 1) * t**2 if np.isfinite(kurtosis) else np.inf)
    with np.errstate(invalid="ignore"):
        bound = r0 + (t - x0) * slope + np.where(bend > 0, bend * spread, 0)
    return float(min(bound.min(), _envelope(t, x, r), 1.0))


def _envelope(t: float, x: np.ndarray, r: np.ndarray) -> float:
    """The least concave function above r: of chords from zero, the steepest one that starts below t."""
    chords = (r[1:] - r[0]) / x[1:]
    touch = 1 + int(np.argmax(chords))
    return float(r[0] + t * chords[touch - 1]) if t <= x[touch] else float(np.interp(t, x, r))


def _critical(t: np.ndarray, kurtosis: float, level: float) -> np.ndarray:
    from scipy import special

    z = float(special.ndtri((1 + level) / 2))
    found = np.empty_like(t)
    for i, own in enumerate(t):
        low, high = z, z + (own / (1 - level)) ** 0.5 + 1e-9  # Chebyshev
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if worst_miss(own, kurtosis, middle) > 1 - level else (low, middle)
        found[i] = high
    return found
