"""Rows of clients on the host: their states in memory, [S, m, ...], their examples, and the thread that moves both."""

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
"""Function of ``(run, rows)`` that copies the states of some clients, as `take` does, from wherever the states are."""
_MAPPED = 16 * 2**20
"""Bytes of a file that are read before its pages are given back."""


def take(tree: PyTree, run: int, rows: np.ndarray) -> PyTree:
    """Copy some rows of one run, leaves [k, ...]; a row beyond the last client gives the row of the last client."""
    return jax.tree.map(lambda leaf: np.take(leaf[run], rows, axis=0, mode="clip"), tree)


def put(tree: PyTree, run: int, rows: np.ndarray, values: PyTree) -> None:
    """Write rows of one run in place."""

    def write(leaf: np.ndarray, new: Any) -> None:
        leaf[run, rows] = new

    jax.tree.map(write, tree, values)


def memory(array: np.ndarray) -> memoryview:
    """The bytes of an array, without a copy if the array is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


class Pages:
    """Pages of memory-mapped leaves, which are given back to the system (and its cache) once many were read.

    Such pages count in the process's resident size, which would otherwise grow to the size of the files.
    """

    def __init__(self, tree: PyTree):
        self._leaves = jax.tree.leaves(tree)
        self._read = 0

    def were_read(self, data: PyTree) -> None:
        """Note that data of this size were read."""
        self._read += trees.num_bytes(data)
        if self._read > _MAPPED:
            self._read = 0
            host_memory.give_back(*self._leaves)


def packed(data: ClientData, rows: np.ndarray, length: int) -> ClientData:
    """Copy the clients in some rows to a new store with ``length`` examples.

    Args:
      data: a stack on the host, whose examples may be memory-mapped: only these clients' examples are read.
      rows: [k], rows of the stack. A row of ``len(data.size)`` or more stands for no client and gets no examples.
      length: size of the store, at least 1 and at least the total number of the clients' examples.
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
    """Largest number of examples that so many clients hold together, at least 1."""
    largest = np.sort(np.asarray(data.size))[::-1][:clients]
    return max(int(largest.sum(dtype=np.int64)), 1)


def length_for(data: ClientData, rows: np.ndarray, bound: int) -> int:
    """Length of a buffer for these clients: a power of two, so that few lengths occur, but not beyond a bound.

    Args:
      data: the stack.
      rows: rows, as in `packed`.
      bound: result of `most` for as many clients.
    """
    total = int(np.asarray(data.size)[rows[rows < len(data.size)]].sum(dtype=np.int64))
    return min(bound, 1 << max(total - 1, 0).bit_length())


class Courier(ThreadPoolExecutor):
    """Executor with one thread, which runs its tasks one after the other.

    ``jax.enable_x64`` as a context applies only in the thread that entered it. Tasks therefore run with the setting of
    their caller; otherwise float64 rows would arrive on the devices as float32.
    """

    def __init__(self) -> None:
        super().__init__(1, thread_name_prefix="clients")

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Schedule ``fn(*args, **kwargs)``."""
        wide = jax.dtypes.canonicalize_dtype(np.float64) == np.float64

        def task() -> Any:
            with jax.enable_x64(wide):
                return fn(*args, **kwargs)

        return super().submit(task)
