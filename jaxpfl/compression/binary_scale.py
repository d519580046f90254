"""Powers of two, taken out of a vector before its sums, squares and reciprocals are formed and put back afterwards.

Multiplying by a power of two is exact, so what is computed between is the same to the bit, except that nothing on the
way leaves the range of floats. XLA's arithmetic takes subnormal numbers for zero on most devices: 1 / 3e38, too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpfl.types import Array, Scalar


def exponent(x: Array) -> Array:
    """e [] int32 of the largest magnitude in x, which is in [2^e, 2^(e + 1)), cut to where both 2^e and 2^-e are normal
    numbers: at e = 126 in single precision it may be just below 2^128 (or not finite), at -126 it may be zero."""
    info = jnp.finfo(x.dtype)
    pattern = jax.lax.bitcast_convert_type(jnp.abs(x).max(), _integers(x))
    most = int(info.maxexp) - 2
    return jnp.clip((pattern >> info.nmant).astype(jnp.int32) - (most + 1), -most, most)


def times_power(x: Array, e: Scalar) -> Array:
    """``x * 2^e`` of x's shape, for e as `exponent` has it, or minus that."""
    info = jnp.finfo(x.dtype)
    pattern = (jnp.asarray(e, jnp.int32) + (int(info.maxexp) - 1)).astype(_integers(x)) << info.nmant
    return x * jax.lax.bitcast_convert_type(pattern, x.dtype)


def room(x: Array) -> Array:
    """Powers of two [] int32 to take out so that sums of many entries stay finite: 0 for all but huge numbers, so that
    small entries beside them keep their digits."""
    most = int(jnp.finfo(x.dtype).maxexp)
    return jnp.where(exponent(x) >= most - most // 4, most // 4, 0)


def _integers(x: Array) -> jnp.dtype:
    return jnp.dtype(f"int{jnp.finfo(x.dtype).bits}")
