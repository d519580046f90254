"""Files of LEAF: users one at a time, or all of a folder in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from jaxpfl.data.sources.base import check_finite, one_line, where_to_put_it
from jaxpfl.data.sources.json_members import Text, open_text
from jaxpfl.support import strict_json
from jaxpfl.support.errors import JaxpflError, shown
from jaxpfl.support.files import check_fits

LARGEST = 2**31 - 1
_MEMORY = 8  # times its length that JSON takes as Python's own numbers and lists

User: TypeAlias = tuple[str, Any, Any]
"""A user's name, inputs and labels, as in the files (numeric inputs already as an array)."""


def locate(name: str, folder: Path) -> tuple[Path, Path | None]:
    """Folders of the training and of the test files."""
    for base in (folder, folder / "data"):
        if _files(base / "train"):
            return base / "train", base / "test" if _files(base / "test") else None
    for base in (folder, folder / "all_data", folder / "data" / "all_data"):
        if _files(base):
            return base, None
    raise JaxpflError(f"data set {name!r}: no LEAF files (*.json) in {folder / 'train'}: {where_to_put_it()}")


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix == ".json") if folder.is_dir() else []


class Part:
    """The users of a folder's files, which are read anew at each iteration, one user at a time."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __iter__(self) -> Iterator[User]:
        """Users in the order of the files.

        Raises:
          JaxpflError: for a damaged file, and a user that is in two.
        """
        origin: dict[str, Path] = {}
        for file in _files(self.folder):
            for user, x, y in _users_of(file):
                if user in origin:
                    raise JaxpflError(
                        f"user {shown(user)} is in {origin[user]} and in {file}: files of an earlier preparation?"
                    )
                origin[user] = file
                yield user, x, y


def read_part(folder: Path) -> list[User]:
    """Read all users of a folder's files, sorted by name, so that the order and division of files do not matter.

    Raises:
      JaxpflError: as `Part`, and for files that memory does not hold.
    """
    for file in _files(folder):
        check_fits(file, _MEMORY * file.stat().st_size)
    return sorted(Part(folder), key=lambda user: user[0])


def _users_of(file: Path) -> Iterator[User]:
    listed, found, has_data = None, set[str](), False
    try:
        with open_text(file) as opened:
            text = Text(opened)
            for name in text.members() if text.next() == "{" else _nothing(strict_json.parse(text.value())):
                if name == "user_data" and text.next() == "{":
                    has_data = True
                    for user in text.members():
                        own = strict_json.parse(text.value())
                        found.add(user)
                        yield user, *_read_user(own, f"{file}: user {shown(user)}")
                    continue
                value = strict_json.parse(text.value())
                listed = value if name == "users" else listed
            if text.next():
                raise ValueError("there is more behind its end")
    except OSError as error:
        raise JaxpflError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise JaxpflError(f"{file}: no JSON, or truncated: {one_line(error)}") from error
    if not has_data:
        raise JaxpflError(f"{file}: no 'user_data' in it: not a LEAF file")
    if not isinstance(listed, list):
        return
    names = dict.fromkeys(map(str, listed))
    for user in names:
        if user not in found:
            raise JaxpflError(f"{file}: user {shown(user)} is listed but has no data")
    for user in sorted(found - names.keys()):
        raise JaxpflError(
            f"{file}: user {shown(user)} has data but is not listed in 'users': add it there, or delete it"
        )


def _nothing(value: Any) -> tuple[str, ...]:
    """No members: the file is no object."""
    del value
    return ()


def _read_user(own: Any, whose: str) -> tuple[Any, Any]:
    x, y = (own.get("x"), own.get("y")) if isinstance(own, dict) else (None, None)
    if isinstance(y, dict) and all(isinstance(values, list) for values in y.values()):
        # one dictionary of lists for all of a user's examples
        y = [dict(zip(y, values, strict=False)) for values in zip(*y.values(), strict=False)]
    if not isinstance(x, list) or not isinstance(y, list):
        raise JaxpflError(f"{whose}: needs lists 'x' and 'y'")
    if len(x) != len(y):
        raise JaxpflError(f"{whose}: {len(x)} inputs but {len(y)} labels")
    if x and isinstance(x[0], list) and x[0] and isinstance(x[0][0], int | float) and not isinstance(y[0], dict):
        return _array(x, whose), y  # at once: as Python numbers they take ten times the memory
    return x, y


def _array(x: list, whose: str) -> np.ndarray:
    """Convert to an array: int32, or float64."""
    try:
        array = np.asarray(x)
        integers = np.issubdtype(array.dtype, np.integer)
        if integers and array.size and not (array.min() >= -LARGEST - 1 and array.max() <= LARGEST):
            raise ValueError(f"integers of more than 32 bits, {array.min()} to {array.max()}")
        array = array.astype(np.int32 if integers else np.float64, casting="same_kind")
    except (ValueError, TypeError, OverflowError) as error:
        raise JaxpflError(f"{whose}: inputs must be numbers, as many in each: {one_line(error)}") from None
    if array.size == 0:
        raise JaxpflError(f"{whose}: inputs must be numbers, got shape {array.shape}")
    with np.errstate(over="ignore"):  # values that overflow float32 become infinite, and are refused
        check_finite(array if integers else array.astype(np.float32), whose)
    return array
