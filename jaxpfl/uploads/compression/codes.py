r"""Exact lengths, in bits, of the messages that compressors send; the messages themselves are never written.

Elias gamma code: a self-delimiting code of positive integers, which is short for small numbers and has no upper limit.
The code of n is :math:`\lfloor \log_2 n \rfloor` zeros followed by n in binary: 1 -> 1, 2 -> 010, 3 -> 011, 4 -> 00100.

Code of the positions of the entries that are sent: the Elias gamma code of 1 + the number of positions, and then the
Elias gamma codes of the gaps between positions.

Run-length code of a vector: for each run of equal numbers, the number and the Elias gamma code of the run's length. The
code is lossless. For a vector with R runs and D distinct numbers, the message has the shorter of two forms, indicated
by its first bit:

- 0, then the codes of the runs' lengths, and the runs' numbers in 32 bits each;
- 1, then the codes of the runs' lengths, the code of D, a table of the D numbers in 32 bits each, and for each run the
  index of its number in the table, in :math:`\lceil \log_2 D \rceil` bits.

The receiver knows d, the sum of the lengths, and can therefore find where the lengths end. Numbers are equal if their
bits are equal, so that minus zero and every NaN are preserved.

Reference: Elias 1975, "Universal codeword sets and representations of the integers".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array

FLOAT = 32
"""Number of bits of an uncompressed number."""


def elias_bits(numbers: Array) -> Array:
    """Lengths of Elias gamma codes in bits, ``2 floor(log2 n) + 1``, int32 in the shape of ``numbers``; 0 for n < 1.

    Implements: Zhao et al., section III, codes.
    """
    numbers = jnp.asarray(numbers, jnp.int32)
    return jnp.where(numbers > 0, 2 * (31 - jax.lax.clz(numbers)) + 1, 0)


def position_bits(sent: Array) -> Array:
    """Length [] int32 of the code for the positions where ``sent`` [d] is true."""
    place = jnp.arange(1, sent.shape[0] + 1, dtype=jnp.int32)
    last = jax.lax.cummax(jnp.where(sent, place, 0))
    gaps = place - jnp.concatenate([jnp.zeros(1, jnp.int32), last[:-1]])
    # The number of positions plus one is coded, because the Elias gamma code has no word for zero.
    return elias_bits(sent.sum(dtype=jnp.int32) + 1) + jnp.where(sent, elias_bits(gaps), 0).sum()


def run_bits(x: Array) -> Array:
    """Length [] int32 of the run-length message of a vector [d] float32.

    Implements: Zhao et al., section III, codes.
    Reference: Zhao et al., Figure 5.
    """
    pattern = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    d = x.shape[0]
    # The inverted first pattern differs from the first pattern, so that the first entry starts a run.
    starts = jnp.diff(pattern, prepend=~pattern[:1]) != 0
    # For each entry, the start of the next run: the nearest start on the right.
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
    """Number of bits that index a table of D = ``distinct`` numbers, ``ceil(log2 D)``."""
    return jnp.where(distinct > 1, 32 - jax.lax.clz(distinct - 1), 0)
