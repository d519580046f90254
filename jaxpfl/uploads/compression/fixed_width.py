r"""Compressors with a common scale (32 bits) and a fixed number of bits per entry.

`sign`: :math:`(\|x\|_1 / d) \operatorname{sign}(x)`, one bit per entry, biased: it needs error feedback (Karimireddy et
al. 2019). `uniform`: stochastic rounding to 2^b levels on [-max |x|, max |x|], unbiased (`quantizers`).
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxpfl.core.types import Array, Key
from jaxpfl.uploads.compression import quantizers
from jaxpfl.uploads.compression.binary_scale import exponent, times_power
from jaxpfl.uploads.compression.bits import FLOAT
from jaxpfl.uploads.compression.compressed import Compressed


def sign(x: Array) -> Compressed:
    """Scaled sign of x [d]; zero counts as positive."""
    e = exponent(x)
    scale = times_power(jnp.abs(times_power(x, -e)).mean(), e)  # the sum alone may be above the largest float
    return Compressed(jnp.where(x < 0, -scale, scale), jnp.int32(FLOAT + x.shape[0]))


def uniform(key: Key, x: Array, bits: int) -> Compressed:
    """Stochastic rounding of x [d] to 2^bits levels.

    Raises:
      JaxpflError: as in `quantizers.check_bits`.
    """
    scale = jnp.abs(x).max()
    value = quantizers.quantize(key, x, jnp.where(scale == 0, 1, scale), bits)
    # For zeros alone the scale that is sent is zero, and so is the vector that is read.
    return Compressed(jnp.where(scale == 0, 0, value), jnp.int32(FLOAT + bits * x.shape[0]))
