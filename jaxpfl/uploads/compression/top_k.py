"""Top-k sparsification: the k entries of largest magnitude are kept, the others are zero.

The message holds the positions of the nonzero entries (`positions`) and their values, 32 bits each.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core.types import Array
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.compression import positions
from jaxpfl.uploads.compression.bits import FLOAT, Reader, floats
from jaxpfl.uploads.compression.compressed import Compressed


def compress(x: Array, k: int) -> Compressed:
    """x [d] with all but k entries set to zero; ties go to the first.

    Raises:
      JaxpflError: for k outside 1 ... d.
    """
    if not 1 <= k <= x.shape[0]:
        raise JaxpflError(f"k must be between 1 and the {x.shape[0]} entries of the vector, got {k}")
    places = jax.lax.top_k(jnp.abs(x), k)[1]
    value = jnp.zeros_like(x).at[places].set(x[places])
    return Compressed(value, count_bits(value))


def count_bits(value: Array) -> Array:
    """Exact length of ``encode(value)``, [] int32; may be traced."""
    # All bits but the sign: XLA would take the smallest numbers for zero in a float comparison.
    sent = jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.uint32) << 1 != 0
    return positions.count_bits(sent) + FLOAT * sent.sum(dtype=jnp.int32)


def encode(value: np.ndarray) -> np.ndarray:
    """The message of a vector [d] float32, as an array [bits] of zeros and ones."""
    places = np.flatnonzero(value)
    return np.concatenate([positions.encode(places), floats(value[places])])


def decode(bits: np.ndarray, d: int) -> np.ndarray:
    """The vector [d] float32 that `encode` made a message of, with zeros for minus zeros.

    Args:
      bits: the message, [bits].
      d: entries of the vector.

    Raises:
      JaxpflError: if the message is cut short, or of a vector of another size.
    """
    reader = Reader(bits)
    places = positions.decode(reader, d)
    value = np.zeros(d, np.float32)
    value[places] = reader.floats(len(places))
    reader.end()
    return value
