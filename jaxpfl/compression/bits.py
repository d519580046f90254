"""Strings of bits on the host: uint8 arrays of zeros and ones, written in pieces and read from left to right."""

from __future__ import annotations

import numpy as np

from jaxpfl.errors import JaxpflError

FLOAT = 32
"""Bits of a number that is sent as it is."""


def fixed(numbers: np.ndarray, width: int) -> np.ndarray:
    """Integers [n] in [0, 2^width) -> [n * width] bits, the highest first."""
    shifts = np.arange(width - 1, -1, -1)
    return ((np.asarray(numbers, np.int64)[:, None] >> shifts) & 1).astype(np.uint8).reshape(-1)


def floats(numbers: np.ndarray) -> np.ndarray:
    """Single-precision numbers [n] -> [32 n] bits, whatever they are (minus zero, NaN)."""
    return fixed(np.ascontiguousarray(numbers, np.float32).view(np.uint32), FLOAT)


def packed(bits: np.ndarray) -> bytes:
    """What goes over the wire: eight bits a byte, the last one filled up with zeros."""
    return np.packbits(bits).tobytes()


class Reader:
    """Reads a string of bits from left to right.

    Raises:
      JaxpflError: where it ends within what is read.
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

    def fixed(self, number: int, width: int) -> np.ndarray:
        """Integers, [number] int64."""
        weights = 1 << np.arange(width - 1, -1, -1, dtype=np.int64)
        return self.take(number * width).reshape(number, width).astype(np.int64) @ weights

    def floats(self, number: int) -> np.ndarray:
        """[number] float32."""
        return self.fixed(number, FLOAT).astype(np.uint32).view(np.float32)
