"""Rows of one memory-mapped ``.npy`` file, read and written by calls.

Through the map, the system holds pages of up to 2 MiB; the process's resident size counts each that is touched, and
the system writes it out as a whole. 100 rows of the CNN's states, 18 MB a round, became 565 MB.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxpfl.data.sources.npy import read_npy
from jaxpfl.engine.streamed.rows import memory
from jaxpfl.errors import JaxpflError, writing


class RowFile:
    """An array [S, m, ...] in a file.

    Attributes:
      array: the array, mapped; it shows what `put` has written.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: np.dtype):
        """Open it.

        Raises:
          UnwritableError: if it cannot be opened.
          JaxpflError: if it is damaged, or holds another array.
        """
        self._path = path
        with writing(path):
            found = read_npy(path, mode="r+")
            self._file = open(path, "r+b", buffering=0)  # noqa: SIM115, it stays open
        if found.shape != shape or found.dtype.itemsize != dtype.itemsize:
            raise JaxpflError(f"{path} is damaged: it holds {found.shape} of {found.dtype}")
        self.array = found.view(dtype)  # a file knows types of NumPy's own alone, not bfloat16
        self._start = path.stat().st_size - found.nbytes
        self._row, self._dtype = shape[2:], dtype
        self.row_bytes = int(np.prod(shape[2:])) * dtype.itemsize

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Copies [k, ...] of the rows of some numbers, [k], among those of all runs, 0 ... S m - 1.

        Raises:
          JaxpflError: if the file has become shorter.
        """
        rows = np.empty((len(numbers), *self._row), self._dtype)
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
        rows = np.ascontiguousarray(rows, self._dtype).reshape(len(numbers), *self._row)
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
