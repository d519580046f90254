r"""Exact lengths in bits of the messages that compressors send; traced, so that no message is written.

Elias gamma code of positive integers: self-delimiting, short for small numbers, without an upper limit. n is written as
:math:`\lfloor \log_2 n \rfloor` zeros and then n in binary: 1 -> 1, 2 -> 010, 3 -> 011, 4 -> 00100.

Positions of sent entries: their number and the gaps between them, in the Elias gamma code.

Run-length code of a vector: each run of equal numbers once, with its length in the Elias gamma code. Lossless. The
message of a vector with R runs and D distinct numbers has the shorter of two forms, given by its first bit:

- 0, the runs' lengths, their numbers (32 bits each);
- 1, the runs' lengths, the code of D, the D numbers (32 bits each), then for each run the index of its number among
  them (:math:`\lceil \log_2 D \rceil` bits).

The receiver knows d, and therefore the end of the lengths. Numbers are equal if their bits are, so that minus zero and
every NaN are preserved.

Reference: Elias 1975, "Universal codeword sets and representations of the integers".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array

FLOAT = 32
"""Bits of an uncompressed number."""


def elias_bits(numbers: Array) -> Array:
    """Lengths of the Elias gamma codes in bits, ``2 floor(log2 n) + 1``, int32 of the numbers' shape; 0 below 1.

    Implements: Zhao et al., section III, codes.
    """
    numbers = jnp.asarray(numbers, jnp.int32)
    return jnp.where(numbers > 0, 2 * (31 - jax.lax.clz(numbers)) + 1, 0)


def position_bits(sent: Array) -> Array:
    """Length of the code for the positions where ``sent`` [d] is true, [] int32."""
    place = jnp.arange(1, sent.shape[0] + 1, dtype=jnp.int32)
    last = jax.lax.cummax(jnp.where(sent, place, 0))
    gaps = place - jnp.concatenate([jnp.zeros(1, jnp.int32), last[:-1]])
    return elias_bits(sent.sum(dtype=jnp.int32) + 1) + jnp.where(sent, elias_bits(gaps), 0).sum()


def run_bits(x: Array) -> Array:
    """Length of the run-length message of a vector [d] float32, [] int32.

    Implements: Zhao et al., section III, codes.
    Reference: Zhao et al., Figure 5.
    """
    pattern = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    d = x.shape[0]
    starts = jnp.diff(pattern, prepend=~pattern[:1]) != 0
    # Start of the next run for each entry: the nearest start on its right.
    places = jnp.where(starts, jnp.arange(d), d)
    nexts = jax.lax.cummin(jnp.append(places[1:], d), reverse=True)
    lengths = jnp.where(starts, elias_bits(nexts - jnp.arange(d)), 0).sum()
    runs = starts.sum(dtype=jnp.int32)
    ordered = jnp.sort(pattern)
    distinct = (jnp.diff(ordered, prepend=~ordered[:1]) != 0).sum(dtype=jnp.int32)
    plain = FLOAT * runs
    table = elias_bits(distinct) + FLOAT * distinct + runs * _width(distinct)
    return 1 + lengths + jnp.minimum(plain, table)


def _width(distinct: Array) -> Array:
    """``ceil(log2 D)``, the bits of an index."""
    return jnp.where(distinct > 1, 32 - jax.lax.clz(distinct - 1), 0)
