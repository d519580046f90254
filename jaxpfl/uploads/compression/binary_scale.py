"""Scaling by powers of two, which keeps sums, squares and reciprocals of a vector in the range of floats.

Multiplying by a power of two is exact, so the computation in between is the same to the bit, except that no
intermediate value overflows. XLA flushes subnormal numbers to zero on most devices, 1 / 3e38 for example.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array, Scalar


def exponent(x: Array) -> Array:
    """Exponent e [] int32 of the largest magnitude in x, which lies in [2^e, 2^(e + 1)).

    It is clipped so that both 2^e and 2^-e are normal numbers: in single precision the magnitude may be just below
    2^128 (or not finite) at e = 126, and zero at e = -126.
    """
    info = jnp.finfo(x.dtype)
    pattern = jax.lax.bitcast_convert_type(jnp.abs(x).max(), _integers(x))
    most = int(info.maxexp) - 2
    return jnp.clip((pattern >> info.nmant).astype(jnp.int32) - (most + 1), -most, most)


def times_power(x: Array, e: Scalar) -> Array:
    """``x * 2^e`` of x's shape, for e in the range of `exponent`."""
    info = jnp.finfo(x.dtype)
    pattern = (jnp.asarray(e, jnp.int32) + (int(info.maxexp) - 1)).astype(_integers(x)) << info.nmant
    return x * jax.lax.bitcast_convert_type(pattern, x.dtype)


def room(x: Array) -> Array:
    """Exponent [] int32 to divide out so that sums of many entries stay finite.

    It is 0 unless numbers are huge, so that small entries keep their digits.
    """
    most = int(jnp.finfo(x.dtype).maxexp)
    return jnp.where(exponent(x) >= most - most // 4, most // 4, 0)


def _integers(x: Array) -> jnp.dtype:
    return jnp.dtype(f"int{jnp.finfo(x.dtype).bits}")
