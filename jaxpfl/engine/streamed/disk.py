"""Clients' states in memory-mapped files.

The files of a stored run can be restored to its last checkpoint after the process was killed. The folder contains:

- ``leaf-I.npy``, one array [S, m, ...] for each leaf, which NumPy can read. There is no index, because a row's position
  follows from its number;
- ``store.json``, which describes these arrays and is written after the initial states;
- ``undo-ROUND`` (`Journal`), for each of the last two checkpoints;
- ``pending.json``, while a checkpoint is written.

A checkpoint flushes only the pages that were written since the last checkpoint, so its cost does not grow with the size
of the files. Without a run's folder, the files are temporary: they have no names, vanish with the process, and cannot
be restored.
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
    """An array [S, m, ...] in a file. Rows (one client's state in one run) are read and written with system calls, not
    through the memory map.

    A memory map uses pages of up to 2 MiB. Each page that is touched counts in the process's resident size, and the
    system writes it to the disk as a whole. A round that wrote 100 rows of a CNN's states (18 MB) through the map
    touched 565 MB.

    Attributes:
      array: memory map of the array, which shows the values that `put` has written.
    """

    def __init__(self, path: Path, file: IO[bytes], array: np.ndarray, start: int = 0):
        self._path, self._file, self.array, self._start = path, file, array, start
        self._row = array.shape[2:]
        self.row_bytes = int(np.prod(self._row)) * array.dtype.itemsize

    @classmethod
    def temporary(cls, folder: Path, shape: tuple[int, ...], dtype: np.dtype) -> Self:
        """Make a file without a name, which vanishes when the process ends, even if the process is killed.

        Raises:
          UnwritableError: if the disk has too little room.
        """
        size = int(np.prod(shape)) * dtype.itemsize
        with writing(folder):
            file = tempfile.TemporaryFile(prefix="jaxpfl-", dir=folder, buffering=0)  # noqa: SIM115, it stays open
            if not size:  # an empty file cannot be mapped
                return cls(folder, file, np.empty(shape, dtype))
            host_memory.reserve(file, size)
            return cls(folder, file, np.memmap(file, dtype, "r+", shape=shape))

    @classmethod
    def existing(cls, path: Path, shape: tuple[int, ...], dtype: np.dtype) -> Self:
        """Open a ``.npy`` file.

        Raises:
          UnwritableError: if the file cannot be opened.
          JaxpflError: if the file is damaged, or contains another array.
        """
        with writing(path):
            found = read_npy(path, mode="r+")
            file = open(path, "r+b", buffering=0)  # noqa: SIM115, it stays open
        if found.shape != shape or found.dtype.itemsize != dtype.itemsize:
            raise JaxpflError(f"{path} is damaged: it contains {found.shape} of {found.dtype}")
        # A .npy file stores only NumPy's own dtypes, so bfloat16 is read as bytes and viewed.
        return cls(path, file, found.view(dtype), path.stat().st_size - found.nbytes)

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Copy rows to a new array [k, ...].

        Args:
          numbers: numbers of the rows, [k]. The state of client j in run s is row number s m + j, with m clients.

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
        """Write values [k, ...] to the rows with these numbers, [k].

        Raises:
          UnwritableError: if writing fails, for example because the disk is full.
        """
        rows = np.ascontiguousarray(rows, self.array.dtype).reshape(len(numbers), *self._row)
        with writing(self._path):
            for part, place in self._parts(numbers, rows):
                while part:
                    done = os.pwrite(self._file.fileno(), part, place)
                    part, place = part[done:], place + done

    def flush(self) -> None:
        """Flush the written rows to the disk."""
        with writing(self._path):
            os.fsync(self._file.fileno())

    def _parts(self, numbers: np.ndarray, rows: np.ndarray) -> Iterator[tuple[memoryview, int]]:
        """Divide rows into sequences with consecutive numbers; yield each one's memory and its position in the file."""
        if not rows.size:
            return
        whole = memory(rows)
        ends = np.append(np.flatnonzero(np.diff(numbers) != 1) + 1, len(numbers))
        first = 0
        for end, number in zip(ends.tolist(), numbers[np.append(0, ends[:-1])].tolist(), strict=True):
            yield whole[first * self.row_bytes : end * self.row_bytes], self._start + number * self.row_bytes
            first = end


_HEAD = struct.Struct("<IQI")  # number of rows, bytes of the body, checksum of the body
_PIECES = 1024
"""Largest number of buffers in one write: IOV_MAX of Linux and macOS."""
_to_disk = getattr(os, "fdatasync", os.fsync)  # macOS has fsync only


class Journal:
    """Undo journal of one checkpoint: what the changed rows contained when the checkpoint was written.

    A run that was killed restores these rows and continues from the checkpoint.

    Before a row is written for the first time after a checkpoint, its old content is appended to the journal with a
    checksum, and the journal is flushed to the disk. An incomplete record therefore belongs to rows that were not
    written yet, and can be ignored.

    Attributes:
      path: file of the journal.
    """

    def __init__(self, path: Path, rows: int, size: int):
        """Open a journal for rows 0 ... rows - 1 of ``size`` bytes each. An existing journal is continued.

        Raises:
          UnwritableError: if writing fails, for example because the disk is full.
          JaxpflError: if the existing journal has records of rows outside this range; see `records`.
        """
        self.path = path
        self._kept = np.zeros(rows, bool)
        whole = 0
        for numbers, content in records(path, rows, size):
            self._kept[numbers] = True
            whole += _HEAD.size + numbers.nbytes + len(content)
        with writing(path):
            # No buffering: after an error, the contents of a buffer would be written at some later time.
            self._file = open(path, "ab", buffering=0, opener=no_link)  # noqa: SIM115, it stays open
            self._file.truncate(whole)  # remove an incomplete record

    def keep(self, numbers: np.ndarray, content: Callable[[np.ndarray], list[np.ndarray]]) -> None:
        """Append the contents of the rows that are not yet in the journal.

        Args:
          numbers: numbers of rows, distinct, [k] int64.
          content: function ``numbers -> arrays`` that reads the rows, with one array [k, ...] for each leaf.

        Raises:
          UnwritableError: if writing fails, for example because the disk is full.
        """
        new = numbers[~self._kept[numbers]]
        if not len(new):
            return
        # No copy is made: a round's rows may be many megabytes, and copying would use cores that the round needs.
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
    """Yield the intact records of a journal: numbers of rows [k], and their contents, ``size`` bytes for each row.

    Reading stops at the first record that is incomplete or has a wrong checksum.

    Args:
      path: file of the journal, which need not exist.
      rows: number of rows; row numbers must be in 0 ... rows - 1.
      size: bytes of a row.

    Raises:
      JaxpflError: if an intact record has a row number outside 0 ... rows - 1, because it belongs to other states.
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
                raise JaxpflError(f"{path} is damaged: it names row {other}, expected 0 to {rows - 1}")
            yield numbers, body[8 * kept :]


_STORE, _PENDING, _KEPT = "store.json", "pending.json", 2


class Disk:
    """States of S runs of m clients in a folder.

    Args:
      folder: folder of the files.
      shapes: shapes of the states, leaves [S, m, ...].
      keys: string for each run's key, [S].
      temporary: whether the files have no names, so that they vanish with the process.

    Attributes:
      keys: string for each run's key, [S], which identifies the run.
      is_new: whether the files do not yet contain the initial states.
    """

    def __init__(self, folder: Path, shapes: PyTree, keys: list[str], *, temporary: bool = False):
        """Make the files, or open existing files of the same runs.

        Raises:
          JaxpflError: if the folder contains states of other runs or other shapes.
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
            raise JaxpflError(f"{folder} contains the clients' states of other runs: delete it to start anew")
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
                shutil.rmtree(self._folder)  # incomplete files of a process that was killed
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
                f"the clients' states need {readable(need)} in {self._folder}, but only {readable(free)} is free"
            )

    def complete(self) -> None:
        """Record that the initial states were written completely."""
        if self._temporary:
            return
        self._flush()
        # The journal must exist before store.json, whose presence means that round 0 can be restored.
        self._journal = Journal(self._undo(0), self._rows, self._size)
        files.write_json(self._folder / _STORE, self._said)
        self.is_new = False

    @property
    def tree(self) -> PyTree:
        """States of all clients, as memory-mapped leaves [S, m, ...]."""
        return jax.tree.unflatten(self._structure, [file.array for file in self._files])

    def take(self, run: int, of: np.ndarray) -> PyTree:
        """Copy the states of the run's k clients with numbers ``of``, leaves [k, ...]. A number beyond the last client
        gives the last client's state.

        Raises:
          JaxpflError: if a file has become shorter.
        """
        numbers = self._numbers(run, np.minimum(of, self._clients - 1))
        return jax.tree.unflatten(self._structure, [file.take(numbers) for file in self._files])

    def start(self, run: int, of: np.ndarray, values: PyTree) -> None:
        """Write the initial states of the run's clients with numbers ``of``; to be called before `complete`.

        Raises:
          UnwritableError: if writing fails, for example because the disk is full.
        """
        assert self.is_new
        self._write(self._numbers(run, of), jax.tree.leaves(values))

    def put(self, run: int, of: np.ndarray, values: PyTree) -> None:
        """Write the states of the run's clients with numbers ``of``, after their old contents were put in the journal.

        Raises:
          UnwritableError: if writing fails, for example because the disk is full.
        """
        if not self._rows:  # the method's clients have no state
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
        """Row numbers, counted over all runs, of one run's clients with numbers ``of``."""
        return run * self._clients + of.astype(np.int64)

    def prepare(self, round: int) -> None:
        """Flush the rows to the disk, and record the round; to be called before the round's checkpoint is written."""
        self._flush()
        files.write_json(self._folder / _PENDING, {"round": round})

    def commit(self, round: int) -> None:
        """Begin the journal of a round, to be called after the round's checkpoint was written.

        From now on, a run that was killed returns to this round.
        """
        if self._journal is not None:
            self._journal.close()
        self._journal = Journal(self._undo(round), self._rows, self._size)
        self._remove(_PENDING)
        for old in self._rounds()[_KEPT:]:
            self._undo(old).unlink()

    def recover(self, round: int) -> None:
        """Restore the rows to a round's checkpoint.

        Raises:
          JaxpflError: if the files have no journal of that round, are damaged or are temporary.
        """
        if self._temporary:
            raise JaxpflError(f"the clients' states were in temporary files, which no longer contain round {round}")
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        pending = self._folder / _PENDING
        if round not in self._rounds() and pending.exists() and files.read_json(pending) == {"round": round}:
            self.commit(round)  # the process was killed after the checkpoint was written and before `commit`
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
        # The journal is emptied, not deleted: its presence means that this round can be restored.
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
        """Rounds that have a journal, latest round first."""
        names = (path.name.removeprefix("undo-") for path in self._folder.glob("undo-*"))
        return sorted((int(name) for name in names if name.isascii() and name.isdigit()), reverse=True)

    def _undo(self, round: int) -> Path:
        return self._folder / f"undo-{round}"

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            (self._folder / name).unlink()
