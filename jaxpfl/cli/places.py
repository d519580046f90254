"""Paths that a command is to write to: refused before it works for minutes, not after."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """What a path must be.

    Attributes:
      metavar: what ``--help`` calls it.
      trouble: ``path -> text``, what is wrong with it; None where nothing is.
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
"""A file that is written, in place of one that is there."""
NEW_FOLDER = Place("FOLDER", _folder)
"""A folder that is made where it is missing."""
