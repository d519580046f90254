"""Some clients' examples out of a store on the host, packed one client's after the other's into a buffer."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from jaxpfl.core.types import ClientData


def packed(data: ClientData, rows: np.ndarray, length: int) -> ClientData:
    """The clients of some rows, in a store of ``length`` examples of their own.

    Args:
      data: a stack on the host, whose examples may be memory-mapped: only those of these clients are read.
      rows: [k], rows of the stack; ``len(data.size)`` and beyond for nobody, without examples.
      length: at least the clients' examples together, and at least 1.
    """
    real = rows < len(data.size)
    at = np.where(real, rows, 0)
    size = np.where(real, np.asarray(data.size)[at], 0)
    ends = np.cumsum(size, dtype=np.int64)
    start = np.where(size > 0, ends - size, 0)
    places = np.arange(int(size.sum(dtype=np.int64))) + np.repeat(np.asarray(data.start)[at] - start, size)

    def taken(leaf: np.ndarray) -> np.ndarray:
        buffer = np.zeros((length, *leaf.shape[1:]), leaf.dtype)
        if len(places):
            np.take(leaf, places, axis=0, out=buffer[: len(places)], mode="clip")
        return buffer

    examples = jax.tree.map(taken, data.examples)
    return replace(data, examples=examples, start=start.astype(np.int32), size=size.astype(np.int32))


def most(data: ClientData, clients: int) -> int:
    """Examples that so many clients have at most together, at least 1."""
    largest = np.sort(np.asarray(data.size))[::-1][:clients]
    return max(int(largest.sum(dtype=np.int64)), 1)


def length_for(data: ClientData, rows: np.ndarray, bound: int) -> int:
    """Length of a buffer for these clients: a power of two, so that few lengths occur, but not beyond a bound.

    Args:
      data: the stack.
      rows: as for `packed`.
      bound: `most` of as many clients.
    """
    total = int(np.asarray(data.size)[rows[rows < len(data.size)]].sum(dtype=np.int64))
    return min(bound, 1 << max(total - 1, 0).bit_length())
