"""Output paths: checked before the work, and written atomically beside their target, then moved into it."""

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
    """A temporary place for a file or a folder, renamed to ``path`` only if the block ends without an error.

    Raises:
      FileNotFoundError: if the folder that holds it was moved or removed during the block, which may have gone on in
        another of its name, without what was written before.
    """
    with _same(path.parent) as check, scratch(path) as place:
        yield place
        check()
        os.replace(place, path)
        _sync(path.parent)


@contextmanager
def _same(folder: Path) -> Iterator[Callable[[], None]]:
    """A function that raises if a folder that exists at the beginning is no longer the one under its name."""
    descriptor = None
    with suppress(OSError):  # it does not exist yet, or the system does not open folders
        descriptor = os.open(folder, os.O_RDONLY)  # kept open, so that no other folder gets its number

    def check() -> None:
        if descriptor is not None and not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            raise FileNotFoundError(errno.ENOENT, "its folder was moved or removed meanwhile", str(folder))

    try:
        yield check
    finally:
        if descriptor is not None:
            os.close(descriptor)


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
    """Remove what a library's threads still write into the hidden place of ``path`` after the library has failed.

    They recreate missing folders, so one removal is not enough.

    Args:
      path: target of a `partial` block that ended with an error.
      quiet: seconds without new files after which this returns.
      most: seconds after which this gives up; the next `partial` for the path removes the rest.
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
    with suppress(OSError):  # it does not exist, or cannot
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


@dataclass(frozen=True)
class Place:
    """Requirement on an output path.

    Attributes:
      metavar: its name in ``--help``.
      trouble: ``path -> text``, the reason why the path is unsuitable; None if it is fine.
    """

    metavar: str
    trouble: Callable[[Path], str | None]


def _file(path: Path) -> str | None:
    if path.is_dir() or not path.name:
        return "a file to write, got a folder"
    if path.exists() and not path.is_file():  # a device, which moving a file over it would replace
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
"""A file to be written, replacing an existing one."""
NEW_FOLDER = Place("FOLDER", _folder)
"""A folder, created if missing."""
