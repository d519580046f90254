"""NumPy archives: ``npz:FILE``, and the digits of MNIST by their writers.

An archive holds ``x_train`` and ``y_train``, and may hold ``x_test`` and ``y_test``, ``users_train`` and ``users_test``
(or ``writer_...``: who made each example). Bytes [N, H, W] or [N, H, W, channels] are pixels, other integers are
tokens, floats are taken as they are. Nothing in a file is ever executed: arrays of Python objects are refused.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from jaxpfl.data.source import Inputs, Source, check_finite, no_classes, number_users, one_line, pixels
from jaxpfl.errors import JaxpflError

_USERS = ("users", "writer")


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an archive.

    Raises:
      JaxpflError: no such file, no archive, a damaged one, or one that holds Python objects.
    """
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise JaxpflError(f"{path}: a single array, not an .npz archive")
        with archive:
            members = {name: archive[name] for name in archive.files}
        return {name: member for name, member in members.items() if isinstance(member, np.ndarray)}
    except FileNotFoundError:
        raise JaxpflError(f"{path}: no such file") from None
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise JaxpflError(f"{path}: damaged, or no .npz archive of plain arrays: {one_line(error)}") from error


def npz_keys(path: Path) -> list[str]:
    """The names of an archive's arrays, without reading them; none where it is no archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except (OSError, zipfile.BadZipFile):
        return []


def load_npz(name: str, path: Path, description: str | None = None, num_classes: int | None = None) -> Source:
    """A data set from an archive (see the module's docstring).

    Args:
      name: what it is loaded as.
      path: the file.
      description: one line for people.
      num_classes: the number of classes; the largest label + 1 unless given.

    Raises:
      JaxpflError: as `read_npz`; a missing array, arrays whose shapes do not fit, labels that are no integers
        >= 0, NaN.
    """
    arrays = read_npz(path)
    for key in ("x_train", "y_train"):
        if key not in arrays:
            raise JaxpflError(f"{path}: no array {key!r} (it holds {', '.join(sorted(arrays)) or 'nothing'})")
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise JaxpflError(f"{path}: x_test and y_test must both be there, or neither")
    parts = ["train", "test"] if "x_test" in arrays else ["train"]
    for part in parts:
        _check_part(path, part, arrays)
    x = {part: arrays[f"x_{part}"] for part in parts}
    if x["train"].shape[1:] != x[parts[-1]].shape[1:] or x["train"].dtype != x[parts[-1]].dtype:
        raise JaxpflError(
            f"{path}: x_test is {x['test'].shape[1:]} of {x['test'].dtype}, "
            f"x_train {x['train'].shape[1:]} of {x['train'].dtype}"
        )
    inputs = _kind(x["train"])
    converted = {part: _convert(array, inputs, f"{path}, x_{part}") for part, array in x.items()}
    largest = max(int(arrays[f"y_{part}"].max()) for part in parts)
    if num_classes is not None and largest >= num_classes:
        raise JaxpflError(f"{path}: label {largest}, but the data set has {num_classes} classes")
    users = _users(path, arrays, parts)
    train, test, names = number_users(users["train"], users.get("test")) if users else (None, None, None)
    return Source(
        name,
        converted["train"],
        arrays["y_train"].astype(np.int32),
        converted.get("test"),
        arrays["y_test"].astype(np.int32) if "test" in parts else None,
        largest + 1 if num_classes is None else num_classes,
        description or f"arrays in {path}",
        users_train=train,
        users_test=test,
        user_names=names,
        inputs=inputs,
    )


def _check_part(path: Path, part: str, arrays: dict[str, np.ndarray]) -> None:
    x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
    if x.ndim < 2 or y.shape != (len(x),) or len(x) == 0 or not np.issubdtype(x.dtype, np.number):
        raise JaxpflError(
            f"{path}: x_{part} must be numbers [N, ...] and y_{part} [N], got {x.shape} of {x.dtype} and {y.shape}"
        )
    if not np.issubdtype(y.dtype, np.integer):
        raise no_classes(f"{path}: y_{part}", y.dtype)
    if y.min() < 0:
        raise JaxpflError(f"{path}: y_{part} must be integers >= 0")


def _kind(x: np.ndarray) -> Inputs:
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        return "pixels"
    return "tokens" if np.issubdtype(x.dtype, np.integer) else "features"


def _convert(x: np.ndarray, inputs: Inputs, whose: str) -> np.ndarray:
    if inputs == "pixels":
        return pixels(x)
    x = x.astype(np.int32 if inputs == "tokens" else np.float32)
    check_finite(x, whose)
    return x


def _users(path: Path, arrays: dict[str, np.ndarray], parts: list[str]) -> dict[str, np.ndarray]:
    """The users of every part, or nothing where the archive does not tell."""
    key = next((key for key in _USERS if f"{key}_train" in arrays), None)
    if key is None:
        return {}
    users = {}
    for part in parts:
        own = arrays.get(f"{key}_{part}")
        if own is None or own.shape != arrays[f"y_{part}"].shape:
            raise JaxpflError(f"{path}: {key}_{part} must name a user for each of {len(arrays[f'y_{part}'])} examples")
        users[part] = own
    return users
