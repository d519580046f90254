r"""Tails of the normal distribution without cancellation: Mills' ratio, and moments of truncated normals.

With :math:`M(t) = \Phi(-t) / \phi(t)` and the continued fraction

.. math:: 1 / M(t) = t + d, \quad d = 1 / (t + e), \quad e = 2 / (t + 3 / (t + \dots))

N(0, 1) truncated to (t, inf) has the mean t + d and the variance d (e - d), to all digits however large t is, where the
textbook's 1 - d / M is a difference of nearly equal numbers.

Reference: Abramowitz and Stegun 1964, 26.2.14.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import erfc

from jaxpfl.types import Array

_FAR = 4.0
_LEVELS = 48
_ROOT_HALF = math.sqrt(0.5)
_HALF_LOG_2PI = math.log(2 * math.pi) / 2


class Truncated(NamedTuple):
    """Mean less the end, and variance, of N(0, 1) truncated to (t, inf)."""

    excess: Array
    variance: Array


def log_density(u: Array) -> Array:
    """Log density of N(0, 1)."""
    return -(u**2) / 2 - _HALF_LOG_2PI


def log_above(t: Array) -> Array:
    """Logarithm of Phi(-t), for t of a few units or below zero (cheaper to compile than JAX's for all t)."""
    return jnp.log(erfc(t * _ROOT_HALF) / 2)


def log_mills(t: Array) -> Array:
    """Logarithm of Phi(-t) exp(t^2 / 2), for t of any sign; below zero it grows with t^2 / 2."""
    far = jnp.maximum(t, _FAR)
    near = jnp.minimum(t, _FAR)
    return jnp.where(t > _FAR, -jnp.log(far + _fractions(far)[0]) - _HALF_LOG_2PI, log_above(near) + near**2 / 2)


def truncated(t: Array) -> Truncated:
    """Moments of N(0, 1) truncated to (t, inf)."""
    far, near = jnp.maximum(t, _FAR), jnp.minimum(t, _FAR)
    d, e = _fractions(far)
    hazard = jnp.exp(log_density(near) - log_above(near))
    own = Truncated(hazard - near, 1 - hazard * (hazard - near))
    return Truncated(jnp.where(t > _FAR, d, own.excess), jnp.where(t > _FAR, d * (e - d), own.variance))


def share_beyond(t: Array, more: Array) -> Array:
    """Probability that N(0, 1), truncated to (t, inf), exceeds t + more, for more >= 0."""
    above, below = jnp.maximum(t, 0), jnp.minimum(t, 0)
    far = log_mills(above + more) - log_mills(above) - more * (above + more / 2)
    return jnp.where(t > 0, jnp.exp(far), erfc((below + more) * _ROOT_HALF) / erfc(below * _ROOT_HALF))


def _fractions(t: Array) -> tuple[Array, Array]:
    """d and e, for t of at least `_FAR`."""

    def deeper(level: Array, below: Array) -> Array:
        return (_LEVELS - level) / (t + below)

    e = jax.lax.fori_loop(0, _LEVELS - 1, deeper, jnp.zeros_like(t))
    return 1 / (t + e), e
