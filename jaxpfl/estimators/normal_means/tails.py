r"""Tails of the normal distribution without cancellation: Mills' ratio, and moments of truncated normals.

With :math:`M(t) = \Phi(-t) / \phi(t)` and the continued fraction

.. math:: 1 / M(t) = t + d, \quad d = 1 / (t + e), \quad e = 2 / (t + 3 / (t + \dots))

N(0, 1) truncated to (t, inf) has the mean t + d and the variance d (e - d), to all digits however large t is, where the
textbook's 1 - d / M is a difference of nearly equal numbers.

For t >= 0, (t + 1.6) e(t) is a smooth function of (t - 5) / (t + 5) up to t = inf, and is summed as a Chebyshev series
to 1e-16 of itself. The derivative of log M is -d, and that of d minus the variance, which are given to JAX as they are.

Reference: Abramowitz and Stegun 1964, 26.2.14; Shepherd and Laframboise 1981, "Chebyshev approximation of (1 + 2x)
exp(x^2) erfc x in 0 <= x < inf", for the series.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import erfc

from jaxpfl.core.types import Array

_ROOT_HALF = math.sqrt(0.5)
_HALF_LOG_2PI = math.log(2 * math.pi) / 2
_MIDDLE, _SHIFT = 5.0, 1.6
_SERIES = (
    2.20411509894547166, -0.0793332252290306333, -0.19421442555065735, 0.0807303645711211887, -0.00865170887014980047,
    -0.0041236512158927761, 0.00153653707680616853, 5.95213638738726845e-5, -1.43699477599584539e-4,
    1.85327590001796818e-5, 9.9547353410823596e-6, -3.17375058410131207e-6, -4.4405000905129704e-7,
    3.50433034243940606e-7, -6.90195934332181234e-9, -3.08845972212728799e-8, 4.55501285402490961e-9,
    2.21488912202745933e-9, -6.77360058876181846e-10, -1.16407161802301027e-10, 7.36629596721271167e-11,
    1.6750510405574251e-12, -6.63242467202496896e-12, 6.15803960819201235e-13, 5.02183390063093058e-13,
    -1.10567140999503046e-13, -3.01816343399207197e-14, 1.29288436424480987e-14, 1.04826596488621276e-15,
    -1.22191346819654179e-15, 5.74814795722739659e-17,
)  # fmt: skip


class Truncated(NamedTuple):
    """Mean less the end, and variance, of N(0, 1) truncated to (t, inf)."""

    excess: Array
    variance: Array


def log_density(u: Array) -> Array:
    """Log density of N(0, 1)."""
    return -(u**2) / 2 - _HALF_LOG_2PI


def log_sum(parts: Sequence[Array]) -> Array:
    """Logarithm of a sum of few terms, given by their logarithms, each of shape [...]."""
    return functools.reduce(jnp.logaddexp, parts)


def log_above(t: Array) -> Array:
    """Logarithm of Phi(-t), for t of a few units or below zero (cheaper to compile than JAX's for all t)."""
    return jnp.log(erfc(t * _ROOT_HALF) / 2)


@jax.custom_jvp
def log_mills(t: Array) -> Array:
    """Logarithm of Phi(-t) exp(t^2 / 2), for t of any sign; below zero it grows with t^2 / 2."""
    far, near = jnp.maximum(t, 0), jnp.minimum(t, 0)
    return jnp.where(t > 0, -jnp.log(far + _fractions(far)[0]) - _HALF_LOG_2PI, log_above(near) + near**2 / 2)


@log_mills.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (t,), (change,) = primals, tangents
    return log_mills(t), -_excess(t) * change


@jax.custom_jvp
def _excess(t: Array) -> Array:
    return truncated(t).excess


@_excess.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    excess, variance = truncated(*primals)
    return excess, -variance * tangents[0]


def truncated(t: Array) -> Truncated:
    """Moments of N(0, 1) truncated to (t, inf)."""
    far, near = jnp.maximum(t, 0), jnp.minimum(t, 0)
    d, e = _fractions(far)
    hazard = 2 * jnp.exp(log_density(near)) / erfc(near * _ROOT_HALF)
    excess = jnp.where(t > 0, d, hazard - near)
    return Truncated(excess, jnp.where(t > 0, d * (e - d), 1 - hazard * excess))


def share_beyond(t: Array, more: Array) -> Array:
    """Probability that N(0, 1), truncated to (t, inf), exceeds t + more, for more >= 0."""
    above, below = jnp.maximum(t, 0), jnp.minimum(t, 0)
    far = log_mills(above + more) - log_mills(above) - more * (above + more / 2)
    return jnp.where(t > 0, jnp.exp(far), erfc((below + more) * _ROOT_HALF) / erfc(below * _ROOT_HALF))


def _fractions(t: Array) -> tuple[Array, Array]:
    """d and e, for t >= 0, by Clenshaw's recurrence."""
    y = 2 * (t - _MIDDLE) / (t + _MIDDLE)
    after, last = jnp.zeros_like(t), jnp.zeros_like(t)
    for term in reversed(_SERIES[1:]):
        after, last = term + y * after - last, after
    e = (_SERIES[0] + y / 2 * after - last) / (t + _SHIFT)
    return 1 / (t + e), e
