"""Files and folders that are whole or not there: written at a hidden place beside their own, then moved into it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_UNFINISHED: set[Path] = set()


@contextmanager
def partial(path: Path) -> Iterator[Path]:
    """A place to write a file or a folder to, which gets its name only when the block ends without an error."""
    with scratch(path) as place:
        yield place
        os.replace(place, path)
        _sync(path.parent)


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """A hidden place beside a path, for a file or a folder that is gone when the block ends.

    What a kill left there is removed first.
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
    """Removes whatever is being written, for a process that is about to end at once."""
    for place in tuple(_UNFINISHED):
        _remove(place)


def _remove(place: Path) -> None:
    with suppress(OSError):  # where there is none, or could be none
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink()


def _sync(folder: Path) -> None:
    """Has the folder's names on disk, where its file system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
