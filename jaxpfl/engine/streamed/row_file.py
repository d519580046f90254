"""Rows of one memory-mapped file, read and written by calls.

Through the map, the system holds pages of up to 2 MiB; the process's resident size counts each that is touched, and
the system writes it out as a whole. 100 rows of the CNN's states, 18 MB a round, became 565 MB.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Self

import numpy as np

from jaxpfl.data.sources.npz import read_npy
from jaxpfl.engine.streamed.rows import memory
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, writing


class RowFile:
    """An array [S, m, ...] in a file.

    Attributes:
      array: the array, mapped; it shows what `put` has written.
    """

    def __init__(self, path: Path, file: IO[bytes], array: np.ndarray, start: int = 0):
        self._path, self._file, self.array, self._start = path, file, array, start
        self._row = array.shape[2:]
        self.row_bytes = int(np.prod(self._row)) * array.dtype.itemsize

    @classmethod
    def temporary(cls, folder: Path, shape: tuple[int, ...], dtype: np.dtype) -> Self:
        """Make a file without a name, of which nothing stays once its process is gone, however it ends.

        Raises:
          UnwritableError: if there is no room for it.
        """
        size = int(np.prod(shape)) * dtype.itemsize
        with writing(folder):
            file = tempfile.TemporaryFile(prefix="jaxpfl-", dir=folder, buffering=0)  # noqa: SIM115, it stays open
            if not size:  # which no system maps
                return cls(folder, file, np.empty(shape, dtype))
            host_memory.reserve(file, size)
            return cls(folder, file, np.memmap(file, dtype, "r+", shape=shape))

    @classmethod
    def existing(cls, path: Path, shape: tuple[int, ...], dtype: np.dtype) -> Self:
        """Open a ``.npy`` file.

        Raises:
          UnwritableError: if it cannot be opened.
          JaxpflError: if it is damaged, or holds another array.
        """
        with writing(path):
            found = read_npy(path, mode="r+")
            file = open(path, "r+b", buffering=0)  # noqa: SIM115, it stays open
        if found.shape != shape or found.dtype.itemsize != dtype.itemsize:
            raise JaxpflError(f"{path} is damaged: it holds {found.shape} of {found.dtype}")
        # A file knows types of NumPy's own alone, not bfloat16.
        return cls(path, file, found.view(dtype), path.stat().st_size - found.nbytes)

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Copies [k, ...] of the rows of some numbers, [k], among those of all runs, 0 ... S m - 1.

        Raises:
          JaxpflError: if the file has become shorter.
        """
        rows = np.empty((len(numbers), *self._row), self.array.dtype)
        for part, place in self._parts(numbers, rows):
            while part:
                done = os.preadv(self._file.fileno(), [part], place)
                if not done:
                    raise JaxpflError(f"{self._path} is damaged: it ends at byte {place}")
                part, place = part[done:], place + done
        return rows

    def put(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        """Write rows [k, ...], as `take` reads them.

        Raises:
          UnwritableError: as on a full disk.
        """
        rows = np.ascontiguousarray(rows, self.array.dtype).reshape(len(numbers), *self._row)
        with writing(self._path):
            for part, place in self._parts(numbers, rows):
                while part:
                    done = os.pwrite(self._file.fileno(), part, place)
                    part, place = part[done:], place + done

    def flush(self) -> None:
        """Bring what was written to the disk."""
        with writing(self._path):
            os.fsync(self._file.fileno())

    def _parts(self, numbers: np.ndarray, rows: np.ndarray) -> Iterator[tuple[memoryview, int]]:
        """Memory of rows with consecutive numbers, and its place in the file."""
        if not rows.size:
            return
        whole = memory(rows)
        ends = np.append(np.flatnonzero(np.diff(numbers) != 1) + 1, len(numbers))
        first = 0
        for end, number in zip(ends.tolist(), numbers[np.append(0, ends[:-1])].tolist(), strict=True):
            yield whole[first * self.row_bytes : end * self.row_bytes], self._start + number * self.row_bytes
            first = end
