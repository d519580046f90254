r"""QSGD: stochastic rounding of entries to s levels of the vector's norm; most become zero and cost nothing.

.. math:: l_i = \lfloor z_i \rfloor + \mathrm{Bernoulli}(z_i - \lfloor z_i \rfloor), \quad
   z_i = \frac{s |x_i|}{\|x\|_2}, \qquad Q(x)_i = \frac{\|x\|_2}{s} \operatorname{sign}(x_i)\, l_i

E Q(x) = x, and :math:`E \|Q(x) - x\|^2 \le \min(d / s^2, \sqrt d / s) \|x\|^2`. The message is the norm (32 bits), the
positions of the nonzero entries, and for each of them a sign bit and l_i in the Elias gamma code.

Reference: Alistarh et al. 2017, section 3; their code of integers is Elias's recursive one, which is longer below 16.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxpfl.core.types import Array, Key
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.compression import elias, positions
from jaxpfl.uploads.compression.binary_scale import exponent, times_power
from jaxpfl.uploads.compression.bits import FLOAT, Reader, fixed, floats
from jaxpfl.uploads.compression.compressed import Compressed
from jaxpfl.uploads.compression.quantizers import rounded


def compress(key: Key, x: Array, s: int) -> Compressed:
    """``Q(x)`` of x [d], and the length of its message; Q(x) is not finite if x is not, or if the norm of x overflows.

    Implements: Zhao et al., section III, codes.

    Args:
      key: of the stochastic rounding.
      x: the vector to send.
      s: number of levels besides zero.

    Raises:
      JaxpflError: for s below 1.
    """
    norm, levels = quantize(key, x, s)
    return Compressed(dequantize(norm, levels, s), count_bits(levels))


def quantize(key: Key, x: Array, s: int) -> tuple[Array, Array]:
    """Content of the message: the norm [] and the signed levels [d] int32.

    Raises:
      JaxpflError: for s below 1.
    """
    if s < 1:
        raise JaxpflError(f"s must be at least 1, got {s}")
    # Squares of small or large numbers underflow or overflow; those of numbers about one do not.
    e = exponent(x)
    share = times_power(x, -e)
    length = jnp.sqrt((share**2).sum())
    z = s * jnp.abs(share) / jnp.where(length > 0, length, 1)
    return times_power(length, e), (jnp.sign(x) * rounded(key, z)).astype(jnp.int32)


def dequantize(norm: Array, levels: Array, s: int) -> Array:
    """``Q(x)`` [d], as computed by the receiver."""
    return norm * (levels / s)


def count_bits(levels: Array) -> Array:
    """Exact length of the message of signed levels [d], [] int32; may be traced."""
    sent = levels != 0
    each = jnp.where(sent, 1 + elias.lengths(jnp.abs(levels)), 0)
    return FLOAT + positions.count_bits(sent) + each.sum()


def encode(norm: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """The message, as bits."""
    levels = np.asarray(levels, np.int64)
    places = np.flatnonzero(levels)
    sent = levels[places]
    signs = fixed(sent < 0, 1)
    return np.concatenate([floats(np.reshape(norm, 1)), positions.encode(places), signs, elias.encode(np.abs(sent))])


def decode(bits: np.ndarray, d: int) -> tuple[np.ndarray, np.ndarray]:
    """The norm [] float32 and the signed levels [d] int32 of a message.

    Raises:
      JaxpflError: if the message is not of a vector of this size.
    """
    reader = Reader(bits)
    norm = reader.floats(1)[0]
    places = positions.decode(reader, d)
    signs = 1 - 2 * reader.fixed(len(places), 1)
    levels = np.zeros(d, np.int32)
    levels[places] = signs * elias.decode(reader, len(places))
    reader.end()
    return norm, levels
