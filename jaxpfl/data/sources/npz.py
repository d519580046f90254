"""Data sets in NumPy archives, ``npz:FILE``, and a reader for single arrays in ``.npy`` files.

An archive has the arrays ``x_train`` and ``y_train``. The labels ``y_train`` are one of:

- classes [N];
- floats [N] or [N, d], for a regression;
- integers 0 and 1 [N, d], if an example can have several labels;
- tokens [N, T], one for each position of the input tokens, where -1 means no label.

An archive may also have ``x_test`` and ``y_test``, and ``users_train`` and ``users_test`` (or ``writer_...``) with the
user of each example.

Bytes [N, H, W] or [N, H, W, channels] are pixels. Integers [N, T] are tokens if ``tokens`` is set, if the array
``vocabulary`` gives the number of tokens, or if the task is next-token. All other inputs are features. Classes are
numbered in the order of their labels, unless inputs are tokens.

No code in a file is executed, and arrays of Python objects are refused. An array is inflated only after its header has
been read and the available memory has been checked.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal, NamedTuple

import numpy as np

from jaxpfl.data.labels import (
    are_classes,
    check_finite,
    checked_labels,
    digit_loss,
    narrowed,
    number_classes,
    task_for,
    unlike_numbers,
)
from jaxpfl.data.sources.base import Inputs, Source, no_classes, number_users, one_line, pixels
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, printable
from jaxpfl.support.files import check_fits, opened

_VOCABULARY = "vocabulary"
_USERS = ("users", "writer")
_LARGEST = 2**31 - 1
_ENDING = ".npy"
_BYTES = 2**22
"""Number of bytes that are inflated together."""


def read_headers(path: Path) -> dict[str, Header]:
    """Read the headers of all arrays in an archive.

    Raises:
      JaxpflError: if the file is missing, is not an archive, is damaged, contains Python objects, or has more or less
        data than its headers say.
    """
    found = {}
    with _archive(path) as archive:
        for info in archive.infolist():
            if info.filename.endswith(_ENDING):
                with archive.open(info) as member:
                    header = header_of(member, info.filename, info.file_size)
                found[info.filename.removesuffix(_ENDING)] = header
    return found


def read_npz(
    path: Path, names: Collection[str] | None = None, *, in_files: bool = False, more: int = 0
) -> dict[str, np.ndarray]:
    """Read arrays from an archive.

    Args:
      path: archive to read.
      names: names of the arrays to read; by default, all. Names that are not in the archive are ignored.
      in_files: whether to inflate the arrays into temporary memory-mapped files, block by block.
      more: number of bytes that must fit into memory (with ``in_files``, on the disk) in addition to the arrays.

    Raises:
      JaxpflError: as in `read_headers`, and if the arrays do not fit into memory or on the disk.
    """
    headers = read_headers(path)
    wanted = [name for name in headers if names is None or name in names]
    check_room = host_memory.check_room if in_files else check_fits
    check_room(path, more + sum(headers[name].nbytes for name in wanted))
    arrays = {}
    with _archive(path) as archive:
        for name in wanted:
            with archive.open(f"{name}{_ENDING}") as member:
                arrays[name] = _inflated(member) if in_files else np.lib.format.read_array(member, allow_pickle=False)
    return arrays


def npz_keys(path: Path) -> list[str]:
    """Return the names of an archive's arrays without reading them; [] if the file is not an archive."""
    try:
        with _archive(path) as archive:
            return [name.removesuffix(_ENDING) for name in archive.namelist()]
    except JaxpflError:
        return []


def load_npz(
    name: str,
    path: Path,
    description: str | None = None,
    num_classes: int | None = None,
    *,
    task: str | None = None,
    tokens: bool = False,
    in_files: bool = False,
) -> Source:
    """Load a data set from an archive, in the form that the module's docstring describes.

    Args:
      name: name of the data set.
      path: archive to read.
      description: one line for display.
      num_classes: number of classes. If given, the labels must already be 0 to num_classes - 1; otherwise the classes
        are inferred from the labels.
      task: task of the labels; by default, inferred from their values.
      tokens: whether to treat integer inputs as tokens.
      in_files: whether to keep the inputs in temporary memory-mapped files; the archive is then inflated block by
        block.

    Raises:
      JaxpflError: as in `read_npz`; or if an array is missing; if shapes do not match; if no task is given and the
        labels are floats with integer values; if tokens do not fit in 32 bits; or if a number is not finite.
    """
    headers = read_headers(path)
    description = description or f"arrays in {path}"
    for key in ("x_train", "y_train"):
        if key not in headers:
            raise JaxpflError(
                f"{path} has no array {key!r} (it contains {printable(', '.join(sorted(headers))) or 'nothing'})"
            )
    if ("x_test" in headers) != ("y_test" in headers):
        raise JaxpflError(f"{path} must have both x_test and y_test, or neither")
    parts = ["train", "test"] if "x_test" in headers else ["train"]
    for part in parts:
        _check_part(path, part, headers)
    first, last = (headers[f"x_{part}"] for part in (parts[0], parts[-1]))
    if first.shape[1:] != last.shape[1:] or first.dtype != last.dtype:
        raise JaxpflError(
            f"{path}: inputs have shape {last.shape[1:]} and type {last.dtype} in x_test, but {first.shape[1:]} "
            f"and {first.dtype} in x_train"
        )
    users_key = _check_users(path, headers, parts)
    kinds = ("x", "y") if users_key is None else ("x", "y", users_key)
    keys = [f"{kind}_{part}" for kind in kinds for part in parts]
    keys += [_VOCABULARY] if _VOCABULARY in headers else []
    arrays = read_npz(path, keys, in_files=in_files, more=4 * sum(math.prod(headers[f"x_{p}"].shape) for p in parts))
    labels = {part: arrays[f"y_{part}"] for part in parts}
    inputs: Inputs = "pixels" if first.dtype == np.uint8 and len(first.shape) in (3, 4) else "features"
    if _are_tokens(path, first, arrays, tokens, task):
        inputs = "tokens"
    if task != "multilabel" and not (inputs == "tokens" and _is_by_position(arrays["y_train"], first)):
        # A single column of labels [N, 1] is one label per example.
        labels = {part: y[:, 0] if y.shape[1:] == (1,) else y for part, y in labels.items()}
    names_of_classes = None
    if task == "regression":
        labels = {part: y.astype(np.float64) if y.dtype.kind != "f" else y for part, y in labels.items()}
    elif num_classes is None and inputs != "tokens" and all(y.ndim == 1 for y in labels.values()):
        labels, names_of_classes = _number_labels(path, labels, task)
    labels = {part: checked_labels(y, f"{path}, y_{part}") for part, y in labels.items()}
    wide = inputs == "features" and digit_loss(arrays["x_train"]) is not None
    x = {part: _convert(arrays[f"x_{part}"], inputs, path, f"x_{part}", wide) for part in parts}
    if are_classes(labels["train"]):
        largest = max(int(labels[part].max()) for part in parts)
        if num_classes is not None and largest >= num_classes:
            raise JaxpflError(f"{path}: label {largest} is too large: the data set has {num_classes} classes")
        outputs = largest + 1 if num_classes is None else num_classes
    else:
        outputs = labels["train"].shape[1] if labels["train"].ndim > 1 else 1
    found = task_for(labels["train"])
    if inputs == "tokens" and _is_by_position(labels["train"], first) and task in (None, "next-token"):
        found, largest = "next-token", max(int(a.max()) for own in (labels, x) for a in own.values())
        outputs = _check_vocabulary(path, arrays[_VOCABULARY], largest) if _VOCABULARY in arrays else largest + 1
    source = Source(name, x["train"], labels["train"], x.get("test"), labels.get("test"), outputs, description)
    source = source._replace(inputs=inputs, task=task or found, class_names=names_of_classes)
    if users_key is None:
        return source
    train, test, names = number_users(arrays[f"{users_key}_train"], arrays.get(f"{users_key}_test"))
    return source._replace(users_train=train, users_test=test, user_names=names)


def _number_labels(
    path: Path, labels: dict[str, np.ndarray], task: str | None
) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Convert the N labels of each part, [N], to class numbers; also return the names of the classes.

    The names of the classes are their values in the archive, or None if these equal the class numbers. Labels that are
    not classes are returned unchanged, with None.
    """
    real = [part for part, y in labels.items() if y.dtype.kind == "f"]
    whole = all(
        (np.isfinite(part) & (part == np.round(part))).all() for y in labels.values() for part in host_memory.iterate(y)
    )
    if (task is None and real and not whole) or task not in (None, "classification", "binary", "ranking"):
        return labels, None
    if not whole:
        raise JaxpflError(f"{path}: the task {task!r} requires whole numbers as labels, but y_{real[0]} has others")
    if task is None and real:
        raise JaxpflError(
            f"{path}: y_{real[0]} contains whole numbers as {labels[real[0]].dtype}: set the task (--task regression, "
            "or --task classification if they are classes)"
        )
    numbers, names = number_classes(labels)
    if task in ("binary", "ranking") and len(names) != 2:
        raise JaxpflError(f"{path}: the task {task!r} requires two classes, but the labels have {len(names)}")
    if task is None and len(names) > 2 and names[0] < 0:
        raise JaxpflError(
            f"{path}: y_train must be integers >= 0, got {names[0]}: for a regression, use --task regression"
        )
    return numbers, unlike_numbers(names)


def _are_tokens(path: Path, x: Header, arrays: dict[str, np.ndarray], tokens: bool, task: str | None) -> bool:
    """Return True if inputs are integers [N, T] that the caller, the archive or the task declares to be tokens."""
    y = arrays["y_train"]
    if not (x.holds_integers and len(x.shape) == 2):
        if tokens or _VOCABULARY in arrays:
            raise JaxpflError(f"{path}: tokens must be integers [N, T], but x_train is {x.dtype} {list(x.shape)}")
        return False
    if tokens or _VOCABULARY in arrays or task == "next-token":
        return True
    if task is None and _is_by_position(y, x):
        raise JaxpflError(
            f"{path}: y_train contains whole numbers at each position of x_train: set the task (--task next-token if "
            "they are tokens, else --task multilabel or --task regression)"
        )
    return False


def _check_vocabulary(path: Path, size: np.ndarray, largest: int) -> int:
    """Return the declared number of tokens, which must exceed the largest token."""
    if size.shape or size.dtype.kind not in "iu" or size <= largest:
        raise JaxpflError(f"{path}: {_VOCABULARY} must be an integer above the largest token, {largest}")
    return int(size)


def _is_by_position(y: np.ndarray, x: Header) -> bool:
    """Return True if y has an integer label for each position of the inputs x [N, T]."""
    return np.issubdtype(y.dtype, np.integer) and y.shape == x.shape


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive for a ``with`` block, and convert any error in the block to a `JaxpflError` of one line.

    zipfile, its codecs and NumPy's parser raise many types of errors for damaged files.
    """
    try:
        with opened(path) as file:
            if file.read(6) == b"\x93NUMPY":
                raise JaxpflError(f"{path} is a single array, not an .npz archive")
            with zipfile.ZipFile(file) as archive:
                yield archive
    except JaxpflError:  # errors of this package, such as for a full disk, keep their messages
        raise
    except OSError as error:
        raise JaxpflError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:
        raise JaxpflError(f"{path} is damaged or is not an .npz archive of plain arrays: {one_line(error)}") from error


def _inflated(member: IO[bytes]) -> np.ndarray:
    """Inflate an array into a temporary file. The caller has checked the array's header."""
    first = np.lib.format.read_magic(member) == (1, 0)
    read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = read(member)
    content = host_memory.Growing(in_file=True)
    while part := member.read(_BYTES):
        content.append(np.frombuffer(part, np.uint8))
    if not math.prod(shape):
        return np.empty(shape, dtype)
    array = content.whole().view(dtype)
    return array.reshape(shape[::-1]).T if by_columns else array.reshape(shape)


def _check_part(path: Path, part: str, headers: dict[str, Header]) -> None:
    x, y = headers[f"x_{part}"], headers[f"y_{part}"]
    if len(x.shape) < 2 or y.shape[:1] != x.shape[:1] or len(y.shape) > 2 or 0 in x.shape or x.dtype.kind not in "iuf":
        raise JaxpflError(
            f"{path}: x_{part} must be numbers [N, ...] and y_{part} must be [N] or [N, d], "
            f"got {x.shape} of {x.dtype} and {y.shape}"
        )
    if not y.holds_integers and y.dtype.kind != "f":
        raise no_classes(f"{path}: y_{part}", y.dtype)


def _check_users(path: Path, headers: dict[str, Header], parts: list[str]) -> str | None:
    """Check the arrays of users; return the prefix of their names ("users" or "writer"), or None if there are none."""
    key = next((key for key in _USERS if f"{key}_train" in headers), None)
    for part in parts if key is not None else ():
        own, labels = headers.get(f"{key}_{part}"), headers[f"y_{part}"]
        if own is None or own.shape != labels.shape[:1] or own.dtype.kind not in "biuSU":
            raise JaxpflError(
                f"{path}: {key}_{part} must have a user (integer or string) for each of {labels.shape[0]} examples"
            )
    return key


def _convert(x: np.ndarray, inputs: Inputs, path: Path, key: str, wide: bool) -> np.ndarray:
    if inputs == "features":
        check_finite(x, f"{path}, {key}")
        return narrowed(x, wide=wide)
    if inputs == "tokens":
        ends = [(int(part.min()), int(part.max())) for part in host_memory.iterate(x)]
        low, high = min(low for low, _ in ends), max(high for _, high in ends)
        if low < -_LARGEST - 1 or high > _LARGEST:
            raise JaxpflError(f"{path}: tokens in {key} must fit in 32 bits, got {low} to {high}")
    shape = (*x.shape, 1) if inputs == "pixels" and x.ndim == 3 else x.shape
    dtype = np.int32 if inputs == "tokens" else np.float32
    return host_memory.converted(x, dtype, pixels if inputs == "pixels" else lambda part: part, shape)


class Header(NamedTuple):
    """Shape and dtype of an array in an archive, known before the array is read."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def holds_integers(self) -> bool:
        return self.dtype.kind in "iu"


def header_of(member: IO[bytes], name: str, size: int) -> Header:
    """Read the header of an array in npy format; check that the header and the data together have ``size`` bytes.

    Raises:
      Exception: if the header is damaged; the exception may have any type.
    """
    version = np.lib.format.read_magic(member)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in read:
        raise ValueError(f"{name} has the unsupported format {version} of structured arrays")
    shape, _, dtype = read[version](member)
    header = Header(shape, dtype)
    if dtype.hasobject:
        raise ValueError(f"{name} contains Python objects")
    if member.tell() + header.nbytes != size or min(shape, default=0) < 0:
        raise ValueError(f"{name} has {size - member.tell()} bytes, but its shape {shape} requires {header.nbytes}")
    return header


def read_npy(path: Path, *, mode: Literal["r", "r+"] | None = None) -> np.ndarray:
    """Read the array in a ``.npy`` file, after checking that the header matches the file's size.

    Args:
      path: file to read.
      mode: mode in which to memory-map the array instead of reading it; an empty array is always read.

    Raises:
      OSError: if the file is missing or cannot be read.
      JaxpflError: if the file is damaged.
    """
    with opened(path) as file:
        try:
            header = header_of(file, path.name, os.fstat(file.fileno()).st_size)
            if mode is None or not header.nbytes:
                file.seek(0)
                return np.lib.format.read_array(file, allow_pickle=False)
        except Exception as error:  # NumPy's parser of headers raises many types of errors
            raise JaxpflError(f"{path} is damaged: {one_line(error)}") from error
    return np.load(path, mmap_mode=mode, allow_pickle=False)
