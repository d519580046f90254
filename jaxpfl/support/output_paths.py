"""Output paths: checks before a command starts its work, and atomic writes through a temporary path."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_UNFINISHED: set[Path] = set()


@contextmanager
def partial(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder, which is renamed to ``path`` if the block ends without an error.

    Raises:
      FileNotFoundError: if the parent folder was moved, removed or replaced during the block. A new folder of the same
        name would lack the files written earlier.
    """
    folder, descriptor = path.parent, None
    with suppress(OSError):  # the folder does not exist yet, or the system cannot open folders
        descriptor = os.open(folder, os.O_RDONLY)  # kept open, so that no other folder gets its inode number
    try:
        with scratch(path) as place:
            yield place
            if descriptor is not None and not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                raise FileNotFoundError(errno.ENOENT, "its folder was moved or removed meanwhile", str(folder))
            os.replace(place, path)
            with suppress(OSError):  # some file systems cannot flush the entries of a folder to the disk
                descriptor = os.open(folder, os.O_RDONLY) if descriptor is None else descriptor
                os.fsync(descriptor)
    finally:
        if descriptor is not None:
            os.close(descriptor)


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """Yield a hidden path beside ``path`` for a file or folder, which is removed when the block ends.

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
    """Remove files that threads of a library still write into the temporary path after the library's call has failed.

    The threads recreate missing folders, so one removal is not enough.

    Args:
      path: target of a `partial` block that ended with an error.
      quiet: seconds without new files after which the function returns.
      most: seconds after which the function gives up; the next `partial` for the path removes the rest.
    """
    place = _hidden(path)
    start = seen = time.monotonic()
    while (now := time.monotonic()) < min(seen + quiet, start + most):
        if place.exists():
            _remove(place)
            seen = now
        time.sleep(quiet / 20)


def discard() -> None:
    """Remove the temporary files and folders of all `partial` and `scratch` blocks that have not ended.

    This is called before a process exits without running the ends of these blocks.
    """
    for place in tuple(_UNFINISHED):
        _remove(place)


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _remove(place: Path) -> None:
    with suppress(OSError):  # the path does not exist, or cannot be removed
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink()


@dataclass(frozen=True)
class Place:
    """Requirement on an output path.

    Attributes:
      metavar: name of the path in ``--help``.
      trouble: function ``path -> str | None`` that returns the reason why a path is unsuitable, or None if it is
        suitable.
    """

    metavar: str
    trouble: Callable[[Path], str | None]


def _file(path: Path) -> str | None:
    if path.is_dir() or not path.name:
        return "a file to write, got a folder"
    if path.exists() and not path.is_file():  # for example a device: the rename would replace it
        return "a file to write, got something else"
    return _parents(path)


def _folder(path: Path) -> str | None:
    if path.exists() and not path.is_dir():
        return "a folder, got a file"
    return _parents(path / "file")


def _parents(path: Path) -> str | None:
    above = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not above.is_dir():
        return f"in a folder, and {above} is not a folder"
    if not os.access(above, os.W_OK | os.X_OK):
        return f"in a writable folder, and {above} is not writable"
    return None


NEW_FILE = Place("FILE", _file)
"""Requirement on a file that is written or replaced."""
NEW_FOLDER = Place("FOLDER", _folder)
"""Requirement on a folder that is created if it is missing."""
