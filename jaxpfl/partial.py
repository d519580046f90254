"""Atomic writing of files and folders: written to a hidden place beside the target, then moved."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_UNFINISHED: set[Path] = set()


@contextmanager
def partial(path: Path) -> Iterator[Path]:
    """A temporary place for a file or a folder, renamed to ``path`` only if the block ends without an error."""
    with scratch(path) as place:
        yield place
        os.replace(place, path)
        _sync(path.parent)


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """A hidden place beside ``path`` for a file or a folder, removed when the block ends.

    Leftovers of a killed process are removed first.
    """
    place = path.with_name(f".{path.name}.partial")
    _UNFINISHED.add(place)
    try:
        _remove(place)
        yield place
    finally:
        _remove(place)
        _UNFINISHED.discard(place)


def discard() -> None:
    """Remove everything that is being written, for a process that is about to exit at once."""
    for place in tuple(_UNFINISHED):
        _remove(place)


def _remove(place: Path) -> None:
    with suppress(OSError):  # where there is none, or could be none
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink()


def _sync(folder: Path) -> None:
    """Flush a folder's entries to disk where the file system supports it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
