r"""Run-length code of a vector: each run of equal numbers once, with its length in the Elias gamma code. Lossless.

The message of a vector with R runs and D distinct numbers has the shorter of two forms, given by its first bit:

- 0, the runs' lengths, their numbers (32 bits each);
- 1, the runs' lengths, the code of D, the D numbers (32 bits each), then for each run the index of its number among
  them (:math:`\lceil \log_2 D \rceil` bits).

The receiver knows d, and therefore the end of the lengths. Numbers are equal if their bits are, so that minus zero and
every NaN are preserved.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core.types import Array
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.compression import elias
from jaxpfl.uploads.compression.bits import FLOAT, Reader, fixed, floats


def count_bits(x: Array) -> Array:
    """Exact length of ``encode(x)``, [] int32; x is [d] float32 and may be traced."""
    pattern = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    d = x.shape[0]
    starts = jnp.diff(pattern, prepend=~pattern[:1]) != 0
    # Start of the next run for each entry: the nearest start on its right.
    places = jnp.where(starts, jnp.arange(d), d)
    nexts = jax.lax.cummin(jnp.append(places[1:], d), reverse=True)
    lengths = jnp.where(starts, elias.lengths(nexts - jnp.arange(d)), 0).sum()
    runs = starts.sum(dtype=jnp.int32)
    ordered = jnp.sort(pattern)
    distinct = (jnp.diff(ordered, prepend=~ordered[:1]) != 0).sum(dtype=jnp.int32)
    plain = FLOAT * runs
    table = elias.lengths(distinct) + FLOAT * distinct + runs * _width(distinct)
    return 1 + lengths + jnp.minimum(plain, table)


def encode(x: np.ndarray) -> np.ndarray:
    """The message of [d] float32, d >= 1, as bits.

    Implements: Zhao et al., section III, codes.
    Reference: Zhao et al., Figure 5.
    """
    pattern = np.ascontiguousarray(x, np.float32).view(np.uint32)
    starts = np.flatnonzero(np.diff(pattern.astype(np.int64), prepend=-1))
    lengths = elias.encode(np.diff(starts, append=len(pattern)))
    known, place = np.unique(pattern[starts], return_inverse=True)
    width = (len(known) - 1).bit_length()
    plain = floats(pattern[starts].view(np.float32))
    table = np.concatenate([elias.encode(np.array([len(known)])), floats(known.view(np.float32)), fixed(place, width)])
    tabled = len(table) < len(plain)
    return np.concatenate([np.array([tabled], np.uint8), lengths, table if tabled else plain])


def decode(bits: np.ndarray, d: int) -> np.ndarray:
    """The vector [d] float32 of a message.

    Raises:
      JaxpflError: if the message is not of a vector of this size.
    """
    reader = Reader(bits)
    tabled = bool(reader.take(1)[0])
    lengths, filled = [], 0
    while filled < d:
        lengths.append(elias.decode_one(reader))
        filled += lengths[-1]
    if filled > d:
        raise JaxpflError(f"the message has runs of {filled} entries, expected {d}")
    if not tabled:
        numbers = reader.floats(len(lengths))
        reader.end()
        return np.repeat(numbers, lengths)
    distinct = elias.decode_one(reader)
    known = reader.floats(distinct)
    place = reader.fixed(len(lengths), (distinct - 1).bit_length())
    if place.max() >= distinct:
        raise JaxpflError(f"the message has number {place.max()}, expected at most {distinct - 1}")
    reader.end()
    return np.repeat(known[place], lengths)


def _width(distinct: Array) -> Array:
    """``ceil(log2 D)``, the bits of an index."""
    return jnp.where(distinct > 1, 32 - jax.lax.clz(distinct - 1), 0)
