"""Logarithms of rising factorials, of which the likelihoods of counts under conjugate priors consist."""

from __future__ import annotations

import jax.numpy as jnp

from jaxpfl.types import Array

_SHIFT = 8


def log_rise(a: Array, n: Array) -> Array:
    """Logarithm of Gamma(a + n) / Gamma(a), without cancellation for large a, and of elementary functions.

    Stirling's series after eight steps of the recurrence: derivatives of JAX's gammaln take XLA long to compile.
    """
    y = a + _SHIFT

    def correction(y: Array) -> Array:
        return 1 / (12 * y) - 1 / (360 * y**3) + 1 / (1260 * y**5) - 1 / (1680 * y**7)

    far = (y + n - 0.5) * jnp.log1p(n / y) + n * (jnp.log(y) - 1) + correction(y + n) - correction(y)
    return far - sum(jnp.log1p(n / (a + k)) for k in range(_SHIFT))
