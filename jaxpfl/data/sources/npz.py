"""NumPy archives: ``npz:FILE``, and MNIST's digits by writer.

An archive holds ``x_train`` and ``y_train``, and may hold ``x_test`` and ``y_test``, ``users_train`` and ``users_test``
(or ``writer_...``: who made each example). Bytes [N, H, W] or [N, H, W, channels] are pixels, other integers are
tokens, floats are taken as they are. Nothing in a file is ever executed, arrays of Python objects are refused, and
nothing is inflated before its header is read and the memory for it is there.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpfl.data.sources.base import (
    Inputs,
    Source,
    check_finite,
    check_fits,
    no_classes,
    number_users,
    one_line,
    pixels,
)
from jaxpfl.errors import JaxpflError, printable

_USERS = ("users", "writer")
_LARGEST = 2**31 - 1
_ENDING = ".npy"


class Header(NamedTuple):
    """Shape and dtype of an archive's array, known before it is read."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def holds_integers(self) -> bool:
        return self.dtype.kind in "iu"


def read_headers(path: Path) -> dict[str, Header]:
    """The headers of all arrays of an archive.

    Raises:
      JaxpflError: no such file, no archive, a damaged one, one that holds Python objects or more or less than its
        headers say.
    """
    found = {}
    with _archive(path) as archive:
        for info in archive.infolist():
            if info.filename.endswith(_ENDING):
                found[info.filename.removesuffix(_ENDING)] = _header(path, archive, info)
    return found


def read_npz(path: Path, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Read arrays of an archive.

    Args:
      path: the file.
      names: of the arrays, all unless given; missing ones are left out.

    Raises:
      JaxpflError: as `read_headers`, and for arrays that do not fit into memory.
    """
    headers = read_headers(path)
    wanted = [name for name in headers if names is None or name in names]
    check_fits(path, sum(headers[name].nbytes for name in wanted))
    with _archive(path) as archive:
        return {name: _array(path, archive, name) for name in wanted}


def npz_keys(path: Path) -> list[str]:
    """Names of an archive's arrays, without reading them; none if it is no archive."""
    try:
        with _archive(path) as archive:
            return [name.removesuffix(_ENDING) for name in archive.namelist()]
    except JaxpflError:
        return []


def load_npz(name: str, path: Path, description: str | None = None, num_classes: int | None = None) -> Source:
    """Load a data set from an archive (see the module's docstring).

    Args:
      name: under which it is loaded.
      path: the file.
      description: one line for display.
      num_classes: the number of classes; the largest label + 1 unless given.

    Raises:
      JaxpflError: as `read_npz`; a missing array, arrays whose shapes do not fit, labels or tokens that are no integers
        in 0 .. 2^31 - 1, NaN.
    """
    headers = read_headers(path)
    for key in ("x_train", "y_train"):
        if key not in headers:
            raise JaxpflError(
                f"{path}: no array {key!r} (it holds {printable(', '.join(sorted(headers))) or 'nothing'})"
            )
    if ("x_test" in headers) != ("y_test" in headers):
        raise JaxpflError(f"{path}: x_test and y_test must both be there, or neither")
    parts = ["train", "test"] if "x_test" in headers else ["train"]
    for part in parts:
        _check_part(path, part, headers)
    first, last = (headers[f"x_{part}"] for part in (parts[0], parts[-1]))
    if first.shape[1:] != last.shape[1:] or first.dtype != last.dtype:
        raise JaxpflError(
            f"{path}: x_test is {last.shape[1:]} of {last.dtype}, x_train {first.shape[1:]} of {first.dtype}"
        )
    users_key = _check_users(path, headers, parts)
    kinds = ("x", "y") if users_key is None else ("x", "y", users_key)
    keys = [f"{kind}_{part}" for kind in kinds for part in parts]
    # Besides the arrays that are read, inputs are converted to 32 bits.
    needed = sum(headers[key].nbytes for key in keys) + 4 * sum(math.prod(headers[f"x_{p}"].shape) for p in parts)
    check_fits(path, needed)
    arrays = read_npz(path, keys)
    for part in parts:
        _check_integers(path, f"y_{part}", arrays[f"y_{part}"])
    inputs = _kind(first)
    converted = {part: _convert(arrays[f"x_{part}"], inputs, path, f"x_{part}") for part in parts}
    largest = max(int(arrays[f"y_{part}"].max()) for part in parts)
    if num_classes is not None and largest >= num_classes:
        raise JaxpflError(f"{path}: label {largest}, but the data set has {num_classes} classes")
    train = test = names = None
    if users_key is not None:
        train, test, names = number_users(arrays[f"{users_key}_train"], arrays.get(f"{users_key}_test"))
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


def _archive(path: Path) -> zipfile.ZipFile:
    try:
        with path.open("rb") as file:
            single = file.read(6) == b"\x93NUMPY"
        if single:
            raise JaxpflError(f"{path}: a single array, not an .npz archive")
        return zipfile.ZipFile(path)
    except JaxpflError:
        raise
    except FileNotFoundError:
        raise JaxpflError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise JaxpflError(f"{path}: a folder, not an .npz archive") from None
    except OSError as error:  # a name too long, no right to read
        raise JaxpflError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # a damaged directory: zipfile and struct raise many kinds
        raise _damaged(path, error) from error


def _header(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Header:
    """Read the header of one member, whose array must fill the rest of it."""
    try:
        with archive.open(info) as member:
            version = np.lib.format.read_magic(member)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            if version not in read:
                raise ValueError(f"{info.filename} has format {version}, of structured arrays")
            shape, _, dtype = read[version](member)
            header = Header(shape, dtype)
            if dtype.hasobject:
                raise ValueError(f"{info.filename} holds Python objects")
            if member.tell() + header.nbytes != info.file_size or min(shape, default=0) < 0:
                raise ValueError(
                    f"{info.filename} has {info.file_size - member.tell()} bytes, {header.nbytes} of its shape {shape}"
                )
            return header
    except Exception as error:  # a damaged member: zipfile, its codecs and NumPy's parser raise nearly anything
        raise _damaged(path, error) from error


def _array(path: Path, archive: zipfile.ZipFile, name: str) -> np.ndarray:
    try:
        with archive.open(f"{name}{_ENDING}") as member:
            return np.lib.format.read_array(member, allow_pickle=False)
    except Exception as error:  # as for the header
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> JaxpflError:
    return JaxpflError(f"{path}: damaged, or no .npz archive of plain arrays: {one_line(error)}")


def _check_part(path: Path, part: str, headers: dict[str, Header]) -> None:
    x, y = headers[f"x_{part}"], headers[f"y_{part}"]
    if len(x.shape) < 2 or y.shape != x.shape[:1] or 0 in x.shape or x.dtype.kind not in "iuf":
        raise JaxpflError(
            f"{path}: x_{part} must be numbers [N, ...] and y_{part} [N], got {x.shape} of {x.dtype} and {y.shape}"
        )
    if not y.holds_integers:
        raise no_classes(f"{path}: y_{part}", y.dtype)


def _check_users(path: Path, headers: dict[str, Header], parts: list[str]) -> str | None:
    """Prefix of the users' arrays, checked; None if the archive has none."""
    key = next((key for key in _USERS if f"{key}_train" in headers), None)
    for part in parts if key is not None else ():
        own, labels = headers.get(f"{key}_{part}"), headers[f"y_{part}"]
        if own is None or own.shape != labels.shape or own.dtype.kind not in "biuSU":
            raise JaxpflError(
                f"{path}: {key}_{part} must name a user for each of {labels.shape[0]} examples, by numbers or text"
            )
    return key


def _check_integers(path: Path, key: str, values: np.ndarray, least: int = 0) -> None:
    """Refuse integers below ``least``, or beyond 32 bits."""
    low, high = int(values.min()), int(values.max())
    if low < least or high > _LARGEST:
        wrong = low if low < least else high
        raise JaxpflError(f"{path}: {key} must be integers >= {least} and at most {_LARGEST}, got {wrong}")


def _kind(x: Header) -> Inputs:
    if x.dtype == np.uint8 and len(x.shape) in (3, 4):
        return "pixels"
    return "tokens" if x.holds_integers else "features"


def _convert(x: np.ndarray, inputs: Inputs, path: Path, key: str) -> np.ndarray:
    if inputs == "pixels":
        return pixels(x)
    if inputs == "tokens":
        _check_integers(path, key, x, -_LARGEST - 1)
        return x.astype(np.int32)
    with np.errstate(over="ignore"):  # values that overflow float32 become infinite, and are refused
        x = x.astype(np.float32)
    check_finite(x, f"{path}, {key}")
    return x
