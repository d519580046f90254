"""Clients' states in memory-mapped files, which go back to the last checkpoint after a kill, or vanish with it.

The folder of a run holds ``leaf-I.npy``, [S, m, ...] each (a row is found without an index, NumPy reads them, and no
library is needed); ``store.json``, written last, which says what they are; ``undo-ROUND`` (`undo`) for each of the last
two checkpoints; and ``pending.json`` while a checkpoint is written. A checkpoint flushes the pages that are dirty, and
so costs what was written since the last one, not what there is. Without a run's folder the files have no names, and
nothing goes back.
"""

from __future__ import annotations

import itertools
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl.core import trees
from jaxpfl.core.types import PyTree
from jaxpfl.engine.streamed.row_file import RowFile
from jaxpfl.engine.streamed.undo import Journal, records
from jaxpfl.support import files, host_memory
from jaxpfl.support.errors import JaxpflError, OutOfMemoryError, writing
from jaxpfl.support.host_memory import readable

_STORE, _PENDING, _KEPT = "store.json", "pending.json", 2


class Disk:
    """States of S runs of m clients in a folder.

    Args:
      folder: the files' folder.
      shapes: of the states, leaves [S, m, ...].
      keys: text of each run's key, [S].
      temporary: whether the files have no names, so that nothing of them outlives the process.

    Attributes:
      keys: text of each run's key, [S], by which a run is found.
    """

    def __init__(self, folder: Path, shapes: PyTree, keys: list[str], *, temporary: bool = False):
        """Make the files, or open those of the same runs.

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

    def made(self) -> None:
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
        """Numbers of a run's rows among those of all runs."""
        return run * self._clients + of.astype(np.int64)

    def prepare(self, round: int) -> None:
        """Before the checkpoint of a round is written: flush the rows, and say that they are of this round."""
        if self._temporary:
            return
        self._flush()
        files.write_json(self._folder / _PENDING, {"round": round})

    def commit(self, round: int) -> None:
        """After it: from now on a kill leads back to this round."""
        if self._temporary:
            return
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
            raise JaxpflError(f"the clients' states were in temporary files, and none are left of round {round}")
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
