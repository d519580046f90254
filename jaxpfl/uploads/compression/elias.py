r"""Elias gamma code of positive integers: self-delimiting, short for small numbers, without an upper limit.

n is written as :math:`\lfloor \log_2 n \rfloor` zeros and then n in binary: 1 -> 1, 2 -> 010, 3 -> 011, 4 -> 00100.

Reference: Elias 1975, "Universal codeword sets and representations of the integers".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core.types import Array
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.compression.bits import Reader

LARGEST = 2**31 - 1
"""The largest integer, that of int32."""


def lengths(numbers: Array) -> Array:
    """Code lengths in bits, ``2 floor(log2 n) + 1``, int32 of the numbers' shape; 0 below 1. Exact; may be traced."""
    numbers = jnp.asarray(numbers, jnp.int32)
    return jnp.where(numbers > 0, 2 * (31 - jax.lax.clz(numbers)) + 1, 0)


def encode(numbers: np.ndarray) -> np.ndarray:
    """Codes of integers [n], concatenated, as bits.

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


def decode(reader: Reader, number: int) -> np.ndarray:
    """The next integers, [number] int64.

    Raises:
      JaxpflError: if the message ends before.
    """
    return np.array([decode_one(reader) for _ in range(number)], np.int64)


def decode_one(reader: Reader) -> int:
    """The next integer.

    Raises:
      JaxpflError: if the message ends before, or the integer is above `LARGEST`.
    """
    zeros = 0
    while not reader.take(1)[0]:
        zeros += 1
        if zeros > 30:
            raise JaxpflError(f"an Elias gamma code of an integer above {LARGEST}")
    return int((1 << zeros) + reader.fixed(1, zeros)[0])
