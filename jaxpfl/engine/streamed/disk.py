"""Clients' states in memory-mapped files, which go back to the last checkpoint after a kill, or vanish with it.

The folder of a run holds ``leaf-I.npy``, [S, m, ...] each (a row is found without an index, NumPy reads them, and no
library is needed); ``store.json``, written last, which says what they are; ``undo-ROUND`` (`Journal`) for each of the
last two checkpoints; and ``pending.json`` while a checkpoint is written. A checkpoint flushes the pages that are dirty,
and so costs what was written since the last one, not what there is. Without a run's folder the files have no names, and
nothing goes back.
"""

from __future__ import annotations

import itertools
import os
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

import jax
import numpy as np

from jaxpfl.core import trees
from jaxpfl.core.types import PyTree
from jaxpfl.data.sources.npz import read_npy
from jaxpfl.engine.streamed.rows import memory
from jaxpfl.support import files, host_memory
from jaxpfl.support.errors import JaxpflError, OutOfMemoryError, writing
from jaxpfl.support.files import no_link, opened
from jaxpfl.support.host_memory import readable


class RowFile:
    """An array [S, m, ...] in a file, whose rows are read and written by calls.

    Through the map, the system holds pages of up to 2 MiB; the process's resident size counts each that is touched, and
    the system writes it out as a whole. 100 rows of the CNN's states, 18 MB a round, became 565 MB.

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
        """Copy the rows [k, ...] with these numbers, [k], in 0 ... S m - 1 over all runs.

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


_HEAD = struct.Struct("<IQI")  # rows, bytes of the body, its checksum
_PIECES = 1024
"""Buffers of one write, at most: IOV_MAX of Linux and macOS."""
_to_disk = getattr(os, "fdatasync", os.fsync)  # macOS has the second only


class Journal:
    """Undo journal of one checkpoint: what rows held there, so that a killed run goes back to it.

    A row's old content is appended, with a checksum and flushed to the disk, before the row is first written after a
    checkpoint. A record that is torn belongs to rows that were not yet written.

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


_STORE, _PENDING, _KEPT = "store.json", "pending.json", 2


class Disk:
    """States of S runs of m clients in a folder.

    Args:
      folder: the files' folder.
      shapes: shapes of the states, leaves [S, m, ...].
      keys: text of each run's key, [S].
      temporary: whether the files have no names, so that nothing of them outlives the process.

    Attributes:
      keys: text of each run's key, [S], by which a run is found.
    """

    def __init__(self, folder: Path, shapes: PyTree, keys: list[str], *, temporary: bool = False):
        """Make the files, or open the files of the same runs.

        Raises:
          JaxpflError: if the folder holds other states.
          OutOfMemoryError: if the disk has too little room.
        """
        self._folder, self.keys, self._temporary = folder, keys, temporary
        leaves, structure = jax.tree.flatten(shapes)
        said = {"keys": keys, "leaves": [[list(a.shape), np.dtype(a.dtype).str] for a in leaves]}
        self.is_new = temporary or not (folder / _STORE).exists()
        if temporary:
            with writing(folder):
                self._check_room(leaves)
        elif self.is_new:
            self._make(leaves)
        elif files.read_json(folder / _STORE) != said:
            raise JaxpflError(f"{folder} holds the clients' states of other runs: delete it to start anew")
        forms = [(tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves]
        if temporary:
            self._files = [RowFile.temporary(folder, *form) for form in forms]
        else:
            self._files = [RowFile.existing(folder / f"leaf-{i}.npy", *form) for i, form in enumerate(forms)]
        self._structure = structure
        self._said = said
        self._rows = int(np.prod(leaves[0].shape[:2])) if leaves else 0
        self._clients = leaves[0].shape[1] if leaves else 0
        self._size = sum(file.row_bytes for file in self._files)
        self._journal: Journal | None = None

    def _make(self, leaves: list[Any]) -> None:
        with writing(self._folder):
            if self._folder.exists():
                shutil.rmtree(self._folder)  # what a kill left of its making
            self._folder.mkdir(parents=True)
            try:
                self._check_room(leaves)
            except OutOfMemoryError:
                self._folder.rmdir()
                raise
            for i, leaf in enumerate(leaves):
                path = self._folder / f"leaf-{i}.npy"
                np.lib.format.open_memmap(path, "w+", leaf.dtype, leaf.shape)
                with open(path, "r+b") as file:
                    host_memory.reserve(file, path.stat().st_size)

    def _check_room(self, leaves: list[Any]) -> None:
        need, free = trees.num_bytes(leaves), shutil.disk_usage(self._folder).free
        if need > free:
            raise OutOfMemoryError(
                f"the clients' states need {readable(need)} in {self._folder}, {readable(free)} are free there"
            )

    def complete(self) -> None:
        """Say that the first states are written."""
        if self._temporary:
            return
        self._flush()
        self._journal = Journal(self._undo(0), self._rows, self._size)  # before it says that the states are there
        files.write_json(self._folder / _STORE, self._said)
        self.is_new = False

    @property
    def tree(self) -> PyTree:
        """The leaves, memory-mapped, [S, m, ...]."""
        return jax.tree.unflatten(self._structure, [file.array for file in self._files])

    def take(self, run: int, of: np.ndarray) -> PyTree:
        """Copies of some rows of a run, leaves [k, ...]; rows beyond the last client give the last one's.

        Raises:
          JaxpflError: if a file has become shorter.
        """
        numbers = self._numbers(run, np.minimum(of, self._clients - 1))
        return jax.tree.unflatten(self._structure, [file.take(numbers) for file in self._files])

    def start(self, run: int, of: np.ndarray, values: PyTree) -> None:
        """Write first states of some rows of a run, before `made`.

        Raises:
          UnwritableError: as on a full disk.
        """
        assert self.is_new
        self._write(self._numbers(run, of), jax.tree.leaves(values))

    def put(self, run: int, of: np.ndarray, values: PyTree) -> None:
        """Write rows of a run, and keep what they held for the way back.

        Raises:
          UnwritableError: as on a full disk.
        """
        if not self._rows:  # clients without a state
            return
        numbers = self._numbers(run, of)
        if not self._temporary:
            assert self._journal is not None
            self._journal.keep(numbers, lambda new: [file.take(new) for file in self._files])
        self._write(numbers, jax.tree.leaves(values))

    def _write(self, numbers: np.ndarray, values: list[np.ndarray]) -> None:
        for file, rows in zip(self._files, values, strict=True):
            file.put(numbers, rows)

    def _numbers(self, run: int, of: np.ndarray) -> np.ndarray:
        """Numbers of one run's rows among all runs' rows."""
        return run * self._clients + of.astype(np.int64)

    def prepare(self, round: int) -> None:
        """Before the checkpoint of a round is written: flush the rows, and say that they are of this round."""
        self._flush()
        files.write_json(self._folder / _PENDING, {"round": round})

    def commit(self, round: int) -> None:
        """After it: from now on a kill leads back to this round."""
        if self._journal is not None:
            self._journal.close()
        self._journal = Journal(self._undo(round), self._rows, self._size)
        self._remove(_PENDING)
        for old in self._rounds()[_KEPT:]:
            self._undo(old).unlink()

    def recover(self, round: int) -> None:
        """Go back to the checkpoint of a round, whatever was written since.

        Raises:
          JaxpflError: if the files know nothing of that round, are damaged or are temporary.
        """
        if self._temporary:
            raise JaxpflError(f"the clients' states were in temporary files, and those of round {round} are gone")
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        pending = self._folder / _PENDING
        if round not in self._rounds() and pending.exists() and files.read_json(pending) == {"round": round}:
            self.commit(round)  # the kill came between
            return
        if round not in self._rounds():
            raise JaxpflError(
                f"the clients' states in {self._folder} cannot go back to round {round}: delete this folder and the "
                "checkpoints to start anew"
            )
        for later in [known for known in self._rounds() if known >= round]:
            for numbers, content in records(self._undo(later), self._rows, self._size):
                self._write_back(numbers, content)
        self._flush()
        for later in [known for known in self._rounds() if known > round]:
            self._undo(later).unlink()
        self._remove(_PENDING)
        # Emptied, never absent: after a kill it says that this round can be gone back to.
        with writing(self._undo(round)):
            os.truncate(self._undo(round), 0)
        self._journal = Journal(self._undo(round), self._rows, self._size)

    def _write_back(self, numbers: np.ndarray, content: bytes) -> None:
        ends = len(numbers) * np.cumsum([0, *(file.row_bytes for file in self._files)])
        parts = [content[a:b] for a, b in itertools.pairwise(ends)]
        self._write(numbers, [np.frombuffer(part, f.array.dtype) for part, f in zip(parts, self._files, strict=True)])

    def _flush(self) -> None:
        for file in self._files:
            file.flush()

    def _rounds(self) -> list[int]:
        """Rounds that have a journal, latest first."""
        names = (path.name.removeprefix("undo-") for path in self._folder.glob("undo-*"))
        return sorted((int(name) for name in names if name.isascii() and name.isdigit()), reverse=True)

    def _undo(self, round: int) -> Path:
        return self._folder / f"undo-{round}"

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            (self._folder / name).unlink()
