r"""Empirical Bayes confidence intervals that cover whatever the distribution of the clients' means.

About the linear estimate :math:`c + w_i (x_i - c)`, :math:`w_i = \mu_2 / (\mu_2 + s_i^2)`, the interval
:math:`\pm\, \mathrm{cva}(s_i^2 / \mu_2, \kappa)\, w_i s_i` covers theta_i at least with the nominal probability, on
average over the clients, for any distribution with the variance mu_2 and the kurtosis kappa. With
:math:`r(t, \chi) = \Phi(-\chi - \sqrt t) + \Phi(\sqrt t - \chi)`, the probability of missing at the squared bias t,
cva(t, kappa) is the chi at which the greatest expectation of r is 1 - level, over all distributions of a squared bias
with mean t and mean square kappa t^2.

By duality that expectation is the least, over t_0, of

.. math:: r(t_0) + (t - t_0) r'(t_0) + \lambda \big((t - t_0)^2 + (\kappa - 1) t^2\big),

with the least lambda >= 0 for which the quadratic lies above r everywhere. Both are searched for on a grid, in double
precision: probabilities are right to 4e-5. The same code runs in NumPy where values are known, and in JAX under `jit`
and `vmap`, which need ``jax.enable_x64(True)``: differences of probabilities cancel in single precision.

Reference: Armstrong, Kolesar and Plagborg-Moller 2022, "Robust empirical Bayes confidence intervals".
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Scalar
from jaxpfl.estimators import inputs
from jaxpfl.estimators.intervals import bisect
from jaxpfl.estimators.normal_means.fit import values
from jaxpfl.support.errors import JaxpflError

_PLACES, _TANGENTS, _TABLE = 240, 60, 64
_STEP = 0.055  # of log(1 + t) in the table, at most
_REACH = 9.0
_HALVINGS = 32


class RobustIntervals(NamedTuple):
    """Linear estimates and their intervals.

    Attributes:
      mean: c + w (x - c), [m].
      low, high: ends, [m].
      weight: w, [m].
      center: c, [].
      variance: mu_2, of the clients' means, above zero, [].
      kurtosis: kappa, at least 1, [].
    """

    mean: Any
    low: Any
    high: Any
    weight: Any
    center: Any
    variance: Any
    kurtosis: Any


def robust_intervals(x: Any, s: Any, level: float = 0.95, *, kurtosis: Scalar | None = None) -> RobustIntervals:
    r"""Intervals about the linear estimates, with mu_2 and kappa learned from all clients.

    c is the mean with weights :math:`\omega_i = s_i^{-2}`, and with the same weights mu_2 is the mean of
    :math:`e_i^2 - s_i^2`, kappa mu_2^2 that of :math:`e_i^4 - 6 s_i^2 e_i^2 + 3 s_i^4`, for e = x - c; both are kept
    from below by what a posterior mean under a flat prior has at zero (the paper's posterior mean trimming).

    Results are NumPy arrays and numbers where x and s are known. Jits, and vmaps over problems, in double precision;
    the level is static.

    Args:
      x: the clients' estimates, [m].
      s: their standard errors, [m], or one for all.
      level: within (0, 1).
      kurtosis: kappa, learned unless given; infinite lets the variance alone count, which widens the intervals where
        clients are too few to learn a fourth moment (below some thousands, if errors are larger than effects).

    Raises:
      JaxpflError: as `ebnm`; for a level outside (0, 1); and under a transformation in single precision.
    """
    inputs.level(level, np.float64)
    own, errors = values(x, s, one=False)
    traced = _traced(own, errors, kurtosis)
    xp: Any = jnp if traced else np
    errors = xp.broadcast_to(errors, own.shape)
    unit = xp.exp(xp.log(errors).mean())
    e, y = errors / unit, own / unit
    omega = e**-2.0
    total = omega.sum()
    center = omega @ y / total
    off = y - center
    least = 2 * (omega**2 @ e**4) / (total * (omega @ e**2))
    variance = xp.maximum(omega @ (off**2 - e**2) / total, least)
    fourth = omega @ (off**4 - 6 * e**2 * off**2 + 3 * e**4) / total
    flattest = 1 + 32 * (omega**2 @ e**8) / (variance**2 * total * (omega @ e**4))
    if kurtosis is None:
        kurtosis = xp.maximum(fourth / variance**2, flattest)
    weight = variance / (variance + e**2)
    reach = critical_value(e**2 / variance, kurtosis, level) * weight * e
    mean = center + weight * off
    numbers: Any = (unit * center, unit**2 * variance, kurtosis)
    if not traced:
        numbers = tuple(float(of) for of in numbers)
    return RobustIntervals(unit * mean, unit * (mean - reach), unit * (mean + reach), weight, *numbers)


def critical_value(t: Any, kurtosis: Scalar = np.inf, level: float = 0.95) -> Any:
    """The half width, in standard deviations, that covers at a mean squared bias t of this kurtosis.

    Args:
      t: mean squares of the bias in units of the estimate's variance, shape [...], at least 0. Of more than 64
        different ones (under a transformation, of more than 64) the values are interpolated, which makes them greater
        by less than 1e-3 of themselves at the level .95. Under a transformation that holds for t up to 30: the 64
        places are spread over all t, and for t from 0.001 to 1e9 values are up to 2.2 % too great.
      kurtosis: of the bias, at least 1; infinite where it is not known.
      level: within (0, 1); static.

    Raises:
      JaxpflError: for numbers outside these ranges, where they are known; and under a transformation in single
        precision.
    """
    inputs.level(level, np.float64)
    if _traced(t, kurtosis):
        flat = jnp.ravel(jnp.asarray(t, float))
        if len(flat) <= _TABLE:
            return _critical_traced(flat, kurtosis, level).reshape(jnp.shape(t))
        table = jnp.expm1(jnp.linspace(jnp.log1p(flat.min()), jnp.log1p(flat.max()), _TABLE))
        found = jnp.interp(jnp.log1p(flat), jnp.log1p(table), _critical_traced(table, kurtosis, level))
        return found.reshape(jnp.shape(t))
    flat = np.ravel(np.asarray(t, np.float64))
    if not (np.isfinite(flat) & (flat >= 0)).all():
        raise JaxpflError(f"t must be finite and at least 0, got {flat[~(flat >= 0) | ~np.isfinite(flat)][0]}")
    if not kurtosis >= 1:
        raise JaxpflError(f"kurtosis must be at least 1, got {kurtosis}")
    at, back = np.unique(flat, return_inverse=True)
    low, high = np.log1p(at[0]), np.log1p(at[-1])
    places = max(_TABLE, int((high - low) / _STEP) + 1)
    if len(at) <= places:
        found = _critical(at, kurtosis, level)[back]
    else:
        table = np.expm1(np.linspace(low, high, places))
        found = np.interp(np.log1p(flat), np.log1p(table), _critical(table, kurtosis, level))
    return found.reshape(np.shape(t))


def worst_miss(t: Any, kurtosis: Any, chi: Any, xp: Any = np) -> Any:
    """The greatest probability of missing at a mean squared bias t of this kurtosis, [] each.

    Args:
      t, kurtosis, chi: numbers.
      xp: NumPy, or ``jax.numpy`` for traced numbers.
    """
    special: Any = jax.scipy.special if xp is jnp else _special()
    # r rises within a few units about chi, however large that is.
    rise = chi + xp.linspace(-xp.minimum(_REACH, chi), _REACH, _PLACES // 2)
    b = xp.sort(xp.concatenate([xp.linspace(0, chi, _PLACES // 2), rise]))
    x, r = b**2, special.ndtr(-chi - b) + special.ndtr(b - chi)
    # Tangents at the mean itself, and on either side of it.
    near_mean = xp.reshape(xp.maximum(xp.sqrt(t), 1e-6), 1)
    b0 = xp.concatenate([xp.linspace(0, chi, _TANGENTS // 2), rise[:: _PLACES // _TANGENTS], near_mean])
    x0, r0 = b0**2, special.ndtr(-chi - b0) + special.ndtr(b0 - chi)
    density = lambda u: xp.exp(-(u**2) / 2) / np.sqrt(2 * np.pi)  # noqa: E731
    # By b^2, with its limit at zero.
    slope = xp.where(b0 > 1e-4, (density(b0 - chi) - density(b0 + chi)) / xp.maximum(2 * b0, 1e-12), chi * density(chi))
    gap = x[None] - x0[:, None]
    near = xp.abs(gap) < 1e-6 * (1 + x0[:, None])
    above = xp.where(near, 0, (r[None] - r0[:, None] - gap * slope[:, None]) / xp.where(near, 1, gap) ** 2)
    bend = xp.maximum(above.max(axis=1), 0)
    finite = xp.where(xp.isinf(kurtosis), 1.0, kurtosis)
    spread = xp.where(xp.isinf(kurtosis), np.inf, (x0 - t) ** 2 + (finite - 1) * t**2)
    bound = r0 + (t - x0) * slope + xp.where(bend > 0, xp.where(bend > 0, bend, 1) * spread, 0)
    root = xp.sqrt(t)
    known = special.ndtr(-chi - root) + special.ndtr(root - chi)  # every bias is the same
    most = xp.minimum(xp.minimum(bound.min(), _envelope(t, x, r, xp)), 1.0)
    return xp.where(t >= x[-1], 1.0, xp.where(kurtosis == 1, known, most))


def _special() -> Any:
    from scipy import special

    return special


def _envelope(t: Any, x: Any, r: Any, xp: Any) -> Any:
    """The least concave function above r: of chords from zero, the steepest one that starts below t."""
    chords = xp.where(x > 0, (r - r[0]) / xp.where(x > 0, x, 1), -np.inf)
    touch = xp.argmax(chords)
    return xp.where(t <= x[touch], r[0] + t * chords[touch], xp.interp(t, x, r))


def _critical(t: np.ndarray, kurtosis: Scalar, level: float) -> np.ndarray:
    found = np.empty_like(t)
    for i, (own, low, high) in enumerate(zip(t, *_between(t, level), strict=True)):
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if worst_miss(own, kurtosis, middle) > 1 - level else (low, middle)
        found[i] = high
    return found


@partial(full_precision.jit, static_argnames="level")
def _critical_traced(t: Array, kurtosis: Scalar, level: float) -> Array:
    def of(ends: tuple[Array, Array, Array]) -> Array:
        own, low, high = ends
        below = lambda chi: worst_miss(own, kurtosis, chi, jnp) > 1 - level  # noqa: E731
        return bisect(below, low, high, _HALVINGS)

    return jax.lax.map(of, (t, *_between(t, level)))


def _between(t: Any, level: float) -> tuple[Any, Any]:
    """Numbers between which the critical values lie, by Chebyshev's inequality."""
    z = float(_special().ndtri((1 + level) / 2))
    return z + 0 * t, z + (t / (1 - level)) ** 0.5 + 1e-9


def _traced(*given: Any) -> bool:
    """Tell whether a value is not known yet.

    Raises:
      JaxpflError: for one that is not, in single precision.
    """
    if not any(isinstance(of, Tracer) for of in given):
        return False
    if jnp.result_type(float) != jnp.float64:
        raise JaxpflError("robust intervals under jit and vmap need double precision: set JAX_ENABLE_X64=true")
    return True
