"""Atomic writing of files and folders: written to a hidden place beside the target, then moved."""

from __future__ import annotations

import os
import shutil
import time
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
    place = _hidden(path)
    _UNFINISHED.add(place)
    try:
        _remove(place)
        yield place
    finally:
        _remove(place)
        _UNFINISHED.discard(place)


def discard_late(path: Path, quiet: float = 0.5, most: float = 10.0) -> None:
    """Remove what threads of a library still write into the hidden place of ``path`` after it has raised an error.

    They make anew the folders that they find missing, so that one removal is not enough.

    Args:
      path: the target of a `partial` that ended by an error.
      quiet: seconds for which nothing may appear.
      most: seconds after which this gives up; the next `partial` of the path removes what is there.
    """
    place = _hidden(path)
    start = seen = time.monotonic()
    while (now := time.monotonic()) < min(seen + quiet, start + most):
        if place.exists():
            _remove(place)
            seen = now
        time.sleep(quiet / 20)


def discard() -> None:
    """Remove everything that is being written, for a process that is about to exit at once."""
    for place in tuple(_UNFINISHED):
        _remove(place)


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


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
