"""Logarithms of rising factorials, of which the likelihoods of counts under conjugate priors consist."""

from __future__ import annotations

import jax.numpy as jnp

from jaxpfl.core.types import Array

SHIFT = 8
"""Steps of the recurrence before Stirling's series."""


def stirling(y: Array) -> Array:
    """Stirling's series of log Gamma(y) beyond its leading terms, for y of at least `SHIFT`."""
    r = 1 / y  # powers of y overflow in single precision, and their slopes would be NaN
    return r / 12 - r**3 / 360 + r**5 / 1260 - r**7 / 1680


def log_rise(a: Array, n: Array) -> Array:
    """Logarithm of Gamma(a + n) / Gamma(a), without cancellation for large a, and of elementary functions.

    Stirling's series after eight steps of the recurrence: derivatives of JAX's gammaln take XLA long to compile.
    """
    y = a + SHIFT
    far = (y + n - 0.5) * jnp.log1p(n / y) + n * (jnp.log(y) - 1) + stirling(y + n) - stirling(y)
    return far - sum(jnp.log1p(n / (a + k)) for k in range(SHIFT))
