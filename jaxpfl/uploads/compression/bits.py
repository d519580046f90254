"""Bit strings on the host: uint8 arrays of zeros and ones, written in pieces and read from left to right."""

from __future__ import annotations

import numpy as np

from jaxpfl.support.errors import JaxpflError

FLOAT = 32
"""Bits of an uncompressed number."""


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
          JaxpflError: if something is: the message is of a longer vector, or of another one too.
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
