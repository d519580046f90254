"""Rows of clients on the host: of states in memory, [S, m, ...], and pages of memory-mapped data."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxpfl.core.types import PyTree
from jaxpfl.support import host_memory

Take = Callable[[int, np.ndarray], PyTree]
"""``(run, rows)`` copies the states of some clients as `take` does, wherever they are."""
_MAPPED = 16 * 2**20
"""Bytes of a file that are read before its pages are given back."""


def take(tree: PyTree, run: int, rows: np.ndarray) -> PyTree:
    """Copies of some rows of one run, leaves [k, ...]; rows beyond the last client give the last one's."""
    return jax.tree.map(lambda leaf: np.take(leaf[run], rows, axis=0, mode="clip"), tree)


def put(tree: PyTree, run: int, rows: np.ndarray, values: PyTree) -> None:
    """Write rows of one run in place."""

    def write(leaf: np.ndarray, new: Any) -> None:
        leaf[run, rows] = new

    jax.tree.map(write, tree, values)


def memory(array: np.ndarray) -> memoryview:
    """The bytes of an array, where they lie if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


class Pages:
    """Pages of memory-mapped leaves, given back to the system, which keeps them as cache, once many were read.

    A process's resident size counts them, and would come to that of the files.
    """

    def __init__(self, tree: PyTree):
        found = map(host_memory.pages_of, jax.tree.leaves(tree))
        self._maps = [pages for pages in found if pages is not None]
        self._read = 0

    def were_read(self, amount: int) -> None:
        """Note that so many bytes were read."""
        self._read += amount
        if self._read > _MAPPED:
            self._read = 0
            for pages in self._maps:
                pages.madvise(mmap.MADV_DONTNEED)
