"""Undo journals of memory-mapped rows: what rows held at a checkpoint, so that a killed run goes back to it.

A row's old content is appended, with a checksum and flushed to the disk, before the row is first written after a
checkpoint. A record that is torn belongs to rows that were not yet written.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from jaxpfl.engine.streamed.rows import memory
from jaxpfl.support.errors import JaxpflError, writing
from jaxpfl.support.files import no_link, opened

_HEAD = struct.Struct("<IQI")  # rows, bytes of the body, its checksum
_PIECES = 1024
"""Buffers of one write, at most: IOV_MAX of Linux and macOS."""
_to_disk = getattr(os, "fdatasync", os.fsync)  # macOS has the second only


class Journal:
    """The journal of one checkpoint.

    Attributes:
      path: its file.
    """

    def __init__(self, path: Path, rows: int, size: int):
        """Open a journal for rows 0 ... rows - 1 of ``size`` bytes each, and continue it if there is one.

        Raises:
          UnwritableError: as on a full disk.
          JaxpflError: as `records`.
        """
        self.path = path
        self._kept = np.zeros(rows, bool)
        whole = 0
        for numbers, content in records(path, rows, size):
            self._kept[numbers] = True
            whole += _HEAD.size + numbers.nbytes + len(content)
        with writing(path):
            # Without a buffer, whose content would be written at some later time after an error.
            self._file = open(path, "ab", buffering=0, opener=no_link)  # noqa: SIM115, it stays open
            self._file.truncate(whole)  # without what was torn

    def keep(self, numbers: np.ndarray, content: Callable[[np.ndarray], list[np.ndarray]]) -> None:
        """Keep the content of those rows that are not kept yet.

        Args:
          numbers: [k] int64, distinct.
          content: ``numbers -> arrays``, each [k, ...], in the order in which they are given back.

        Raises:
          UnwritableError: as on a full disk.
        """
        new = numbers[~self._kept[numbers]]
        if not len(new):
            return
        # As they lie, without a copy: a round's rows may be many megabytes, on cores that its computing needs.
        parts = [memory(part) for part in (new.astype("<i8"), *content(new))]
        check = 0
        for part in parts:
            check = zlib.crc32(part, check)
        rest = [memoryview(_HEAD.pack(len(new), sum(map(len, parts)), check)), *parts]
        with writing(self.path):
            while rest:
                done = os.writev(self._file.fileno(), rest[:_PIECES])
                while rest and done >= len(rest[0]):
                    done -= len(rest.pop(0))
                if done:
                    rest[0] = rest[0][done:]
            _to_disk(self._file.fileno())
        self._kept[new] = True

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def records(path: Path, rows: int, size: int) -> Iterator[tuple[np.ndarray, bytes]]:
    """The intact records: numbers of rows [k] in 0 ... rows - 1, and their content, ``size`` bytes a row.

    Raises:
      JaxpflError: for an intact record of another row, which is not of these states.
    """
    if not path.exists():
        return
    with opened(path) as file:
        left = os.fstat(file.fileno()).st_size
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            kept, length, check = _HEAD.unpack(head)
            left -= _HEAD.size + length
            if left < 0 or length != (8 + size) * kept or zlib.crc32(body := file.read(length)) != check:
                return
            numbers = np.frombuffer(body[: 8 * kept], "<i8")
            for other in numbers[(numbers < 0) | (numbers >= rows)]:
                raise JaxpflError(f"{path} is damaged: it keeps row {other}, expected 0 to {rows - 1}")
            yield numbers, body[8 * kept :]
