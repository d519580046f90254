"""Output paths of commands, checked before minutes of work rather than after."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxpfl.support.errors import JaxpflError


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
        return "a file to write, and this is a folder"
    if path.exists() and not path.is_file():  # a device, which moving a file over it would replace
        return "a file to write, and this is something else"
    return _parents(path)


def _folder(path: Path) -> str | None:
    if path.exists() and not path.is_dir():
        return "a folder, and this is a file"
    return _parents(path / "file")


def _parents(path: Path) -> str | None:
    above = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not above.is_dir():
        return f"in a folder, and {above} is none"
    if not os.access(above, os.W_OK | os.X_OK):
        return f"in a folder that can be written to, and {above} cannot"
    return None


NEW_FILE = Place("FILE", _file)
"""A file to be written, replacing an existing one."""
NEW_FOLDER = Place("FOLDER", _folder)
"""A folder, created if missing."""


def claim_file(path: Path | None, flag: str, command: str, ours: Callable[[Path], bool] | None = None) -> None:
    """Refuse an existing file, unless an earlier call of the same command wrote it.

    Args:
      path: the file; None where none was asked for.
      flag: that names it.
      command: as it is called.
      ours: tells whether the command wrote a file; of a picture, its signature unless given.

    Raises:
      JaxpflError: for a folder, and for what something else wrote.
    """
    if path is None or not path.exists():
        return
    from jaxpfl.support.presentation import signature

    if path.is_dir():
        raise JaxpflError(f"{flag} {path} is a folder: name a file")
    if not (signature(path) == command if ours is None else ours(path)):
        raise JaxpflError(f"{flag} {path} exists, and is not what {command} wrote before: choose another {flag}")
