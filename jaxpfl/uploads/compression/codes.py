r"""Codes of messages as bit strings on the host: uint8 arrays of zeros and ones, read from left to right.

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
import numpy as np

from jaxpfl.core.types import Array
from jaxpfl.support.errors import JaxpflError

FLOAT = 32
"""Bits of an uncompressed number."""
LARGEST = 2**31 - 1
"""Largest integer with an Elias gamma code: the largest int32."""


def fixed(numbers: np.ndarray, width: int) -> np.ndarray:
    """Integers [n] in [0, 2^width) -> [n * width] bits, the highest first."""
    shifts = np.arange(width - 1, -1, -1)
    return ((np.asarray(numbers, np.int64)[:, None] >> shifts) & 1).astype(np.uint8).reshape(-1)


def floats(numbers: np.ndarray) -> np.ndarray:
    """Single-precision numbers [n] -> [32 n] bits, exact for every number (minus zero, NaN)."""
    return fixed(np.ascontiguousarray(numbers, np.float32).view(np.uint32), FLOAT)


class Reader:
    """Reader of a bit string, from left to right.

    Raises:
      JaxpflError: if a read goes past the end.
    """

    def __init__(self, bits: np.ndarray):
        self.bits = np.asarray(bits, np.uint8)
        self.at = 0

    def take(self, number: int) -> np.ndarray:
        """The next bits, [number]."""
        end = self.at + number
        if end > len(self.bits):
            raise JaxpflError(f"the message ends at bit {len(self.bits)}, but bit {end} is read")
        self.at, start = end, self.at
        return self.bits[start:end]

    def end(self) -> None:
        """Check that nothing is left.

        Raises:
          JaxpflError: if bits remain: the message holds a longer vector, or another one too.
        """
        if self.at != len(self.bits):
            raise JaxpflError(f"the message has {len(self.bits)} bits, expected {self.at}")

    def fixed(self, number: int, width: int) -> np.ndarray:
        """The next integers, [number] int64, of ``width`` bits each."""
        weights = 1 << np.arange(width - 1, -1, -1, dtype=np.int64)
        return self.take(number * width).reshape(number, width).astype(np.int64) @ weights

    def floats(self, number: int) -> np.ndarray:
        """The next single-precision numbers, [number] float32."""
        return self.fixed(number, FLOAT).astype(np.uint32).view(np.float32)

    def elias(self, number: int) -> np.ndarray:
        """The next integers in the Elias gamma code, [number] int64.

        Raises:
          JaxpflError: if the message ends before, or an integer is above `LARGEST`.
        """
        return np.array([self._elias() for _ in range(number)], np.int64)

    def _elias(self) -> int:
        zeros = 0
        while not self.take(1)[0]:
            zeros += 1
            if zeros > 30:
                raise JaxpflError(f"an Elias gamma code of an integer above {LARGEST}")
        return int((1 << zeros) + self.fixed(1, zeros)[0])

    def positions(self, d: int) -> np.ndarray:
        """The next positions, [n] int64, as `encode_positions` writes them.

        Raises:
          JaxpflError: if a position is outside 0 ... d - 1.
        """
        number = self._elias() - 1
        if number > d:
            raise JaxpflError(f"the message has {number} entries, expected at most {d}")
        places = np.cumsum(self.elias(number)) - 1
        if number and places[-1] >= d:
            raise JaxpflError(f"the message has entry {places[-1]}, expected at most {d - 1}")
        return places


def elias_bits(numbers: Array) -> Array:
    """Lengths of the Elias gamma codes in bits, ``2 floor(log2 n) + 1``, int32 of the numbers' shape; 0 below 1.

    Exact; may be traced.
    """
    numbers = jnp.asarray(numbers, jnp.int32)
    return jnp.where(numbers > 0, 2 * (31 - jax.lax.clz(numbers)) + 1, 0)


def encode_elias(numbers: np.ndarray) -> np.ndarray:
    """Elias gamma codes of integers [n], concatenated, as bits.

    Implements: Zhao et al., section III, codes.

    Raises:
      JaxpflError: for an integer below 1 or above `LARGEST`.
    """
    numbers = np.asarray(numbers, np.int64)
    bad = (numbers < 1) | (numbers > LARGEST)
    if bad.any():
        raise JaxpflError(f"Elias gamma codes are of integers from 1 to {LARGEST}, got {numbers[bad][0]}")
    zeros = np.frexp(numbers.astype(np.float64))[1] - 1
    ends = np.cumsum(2 * zeros + 1)
    bits = np.zeros(ends[-1] if len(ends) else 0, np.uint8)
    for place in range(int(zeros.max(initial=-1)) + 1):
        has = zeros >= place
        bits[ends[has] - 1 - place] = (numbers[has] >> place) & 1
    return bits


def position_bits(sent: Array) -> Array:
    """Exact length of ``encode_positions(flatnonzero(sent))``, [] int32; sent is [d] bool and may be traced."""
    place = jnp.arange(1, sent.shape[0] + 1, dtype=jnp.int32)
    last = jax.lax.cummax(jnp.where(sent, place, 0))
    gaps = place - jnp.concatenate([jnp.zeros(1, jnp.int32), last[:-1]])
    return elias_bits(sent.sum(dtype=jnp.int32) + 1) + jnp.where(sent, elias_bits(gaps), 0).sum()


def encode_positions(places: np.ndarray) -> np.ndarray:
    """Increasing positions [n], from 0, as bits."""
    return encode_elias(np.concatenate([[len(places) + 1], np.diff(places, prepend=-1)]))


def run_bits(x: Array) -> Array:
    """Exact length of ``encode_runs(x)``, [] int32; x is [d] float32 and may be traced."""
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


def encode_runs(x: np.ndarray) -> np.ndarray:
    """The message of [d] float32, d >= 1, as bits.

    Implements: Zhao et al., section III, codes.
    Reference: Zhao et al., Figure 5.
    """
    pattern = np.ascontiguousarray(x, np.float32).view(np.uint32)
    starts = np.flatnonzero(np.diff(pattern.astype(np.int64), prepend=-1))
    lengths = encode_elias(np.diff(starts, append=len(pattern)))
    known, place = np.unique(pattern[starts], return_inverse=True)
    width = (len(known) - 1).bit_length()
    plain = floats(pattern[starts].view(np.float32))
    table = np.concatenate([encode_elias(np.array([len(known)])), floats(known.view(np.float32)), fixed(place, width)])
    tabled = len(table) < len(plain)
    return np.concatenate([np.array([tabled], np.uint8), lengths, table if tabled else plain])


def decode_runs(bits: np.ndarray, d: int) -> np.ndarray:
    """The vector [d] float32 of a message.

    Raises:
      JaxpflError: if the message does not hold a vector of this size.
    """
    reader = Reader(bits)
    tabled = bool(reader.take(1)[0])
    lengths, filled = [], 0
    while filled < d:
        lengths.append(int(reader.elias(1)[0]))
        filled += lengths[-1]
    if filled > d:
        raise JaxpflError(f"the message has runs of {filled} entries, expected {d}")
    if not tabled:
        numbers = reader.floats(len(lengths))
        reader.end()
        return np.repeat(numbers, lengths)
    distinct = int(reader.elias(1)[0])
    known = reader.floats(distinct)
    place = reader.fixed(len(lengths), (distinct - 1).bit_length())
    if place.max() >= distinct:
        raise JaxpflError(f"the message has number {place.max()}, expected at most {distinct - 1}")
    reader.end()
    return np.repeat(known[place], lengths)


def _width(distinct: Array) -> Array:
    """``ceil(log2 D)``, the bits of an index."""
    return jnp.where(distinct > 1, 32 - jax.lax.clz(distinct - 1), 0)
