"""Copies of clients' states [S, m, ...] and examples on the host, and the thread that moves them to the devices."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxpfl.core import trees
from jaxpfl.core.types import ClientData, PyTree
from jaxpfl.support import host_memory

Take = Callable[[int, np.ndarray], PyTree]
"""Function ``(run, rows) -> states`` that copies the states of some clients, from memory (`take`) or from files."""
_MAPPED = 16 * 2**20
"""Number of bytes that are read from memory-mapped files before their pages are released."""


def take(tree: PyTree, run: int, rows: np.ndarray) -> PyTree:
    """Copy the states of k clients of one run, leaves [k, ...]. A row number above the last gives the last state."""
    return jax.tree.map(lambda leaf: np.take(leaf[run], rows, axis=0, mode="clip"), tree)


def put(tree: PyTree, run: int, rows: np.ndarray, values: PyTree) -> None:
    """Write the states [k, ...] of some clients of one run in place."""

    def write(leaf: np.ndarray, new: Any) -> None:
        leaf[run, rows] = new

    jax.tree.map(write, tree, values)


def memory(array: np.ndarray) -> memoryview:
    """The bytes of an array, without a copy if the array is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


class Pages:
    """Memory-mapped leaves, whose pages are released to the system's file cache after many bytes were read.

    Otherwise, the pages would count in the process's resident size, which would grow to the size of the files.
    """

    def __init__(self, tree: PyTree):
        self._leaves = jax.tree.leaves(tree)
        self._read = 0

    def were_read(self, data: PyTree) -> None:
        """Record that copies ``data`` of examples were read; release the pages after `_MAPPED` bytes."""
        self._read += trees.num_bytes(data)
        if self._read > _MAPPED:
            self._read = 0
            host_memory.give_back(*self._leaves)


def packed(data: ClientData, rows: np.ndarray, length: int) -> ClientData:
    """Copy some clients' examples to new arrays of ``length`` examples.

    Args:
      data: stacked clients on the host. Their examples may be memory-mapped: only the chosen clients' examples are
        read.
      rows: rows of the clients, [k]. A row number of ``len(data.size)`` or more stands for no client.
      length: length of the new arrays, at least 1 and at least the total number of the clients' examples.
    """
    real = rows < len(data.size)
    at = np.where(real, rows, 0)
    size = np.where(real, np.asarray(data.size)[at], 0)
    ends = np.cumsum(size, dtype=np.int64)
    start = np.where(size > 0, ends - size, 0)
    places = np.arange(int(size.sum(dtype=np.int64))) + np.repeat(np.asarray(data.start)[at] - start, size)

    def copy(leaf: np.ndarray) -> np.ndarray:
        buffer = np.zeros((length, *leaf.shape[1:]), leaf.dtype)
        if len(places):
            np.take(leaf, places, axis=0, out=buffer[: len(places)], mode="clip")
        return buffer

    examples = jax.tree.map(copy, data.examples)
    return replace(data, examples=examples, start=start.astype(np.int32), size=size.astype(np.int32))


def most(data: ClientData, clients: int) -> int:
    """Largest total number of examples that a set of ``clients`` clients can have, at least 1."""
    largest = np.sort(np.asarray(data.size))[::-1][:clients]
    return max(int(largest.sum(dtype=np.int64)), 1)


def length_for(data: ClientData, rows: np.ndarray, bound: int) -> int:
    """Length of the arrays for these clients' examples: a power of two, or ``bound`` if that is smaller.

    Powers of two limit the number of different lengths, each of which needs its own compiled program.

    Args:
      data: stacked clients.
      rows: rows of the clients, as in `packed`.
      bound: result of `most` for the same number of clients.
    """
    total = int(np.asarray(data.size)[rows[rows < len(data.size)]].sum(dtype=np.int64))
    return min(bound, 1 << max(total - 1, 0).bit_length())


class Courier(ThreadPoolExecutor):
    """Executor with one thread, which runs its tasks one after the other.

    ``jax.enable_x64`` as a context applies only in the thread that entered it. Each task therefore runs with its
    caller's setting. Otherwise, float64 rows would arrive on the devices as float32.
    """

    def __init__(self) -> None:
        super().__init__(1, thread_name_prefix="clients")

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Schedule ``fn(*args, **kwargs)`` with the caller's setting of ``jax_enable_x64``."""
        wide = jax.dtypes.canonicalize_dtype(np.float64) == np.float64

        def task() -> Any:
            with jax.enable_x64(wide):
                return fn(*args, **kwargs)

        return super().submit(task)
