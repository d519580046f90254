"""Where examples come from: scikit-learn's embedded digits, and folders of IDX files (MNIST and its kin).

Nothing is ever downloaded. A data directory is the argument, else ``JAXPFL_DATA_DIR``, else ``./data``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from jaxpfl.data.idx import read_idx_pair
from jaxpfl.errors import JaxpflError, unknown_name

DATA_DIR_VARIABLE = "JAXPFL_DATA_DIR"

_IDX_PREFIX = "idx:"
_IDX_SETS = {
    "mnist": "MNIST, handwritten digits",
    "fashion-mnist": "Fashion-MNIST, articles of clothing",
    "kmnist": "Kuzushiji-MNIST, cursive Japanese characters",
}
_DIGITS = "scikit-learn's embedded handwritten digits, 1797 images of 8 x 8, 10 classes"
_TRAIN, _TEST = ("train",), ("t10k", "test")
_Pair: TypeAlias = tuple[Path, Path]


class Source(NamedTuple):
    """A data set before it is split among clients.

    Attributes:
      name: what it was loaded as.
      x_train: [N, ...] float32; images are [N, H, W, channels].
      y_train: [N] int32, in 0 .. num_classes - 1.
      x_test, y_test: the official test set, or None where there is none (each client's examples are split
        then).
      num_classes: the number of classes (the largest label + 1).
      description: one line for people.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray | None
    y_test: np.ndarray | None
    num_classes: int
    description: str


class Entry(NamedTuple):
    """One line of ``jaxpfl data list``: a data set, whether it can be loaded now, and what it is or what it
    lacks."""

    name: str
    present: bool
    note: str


def data_directory(data_dir: str | None = None) -> Path:
    """The folder that holds the data sets: the argument, else the variable JAXPFL_DATA_DIR, else
    ``./data``."""
    return Path(data_dir or os.environ.get(DATA_DIR_VARIABLE) or "data").expanduser()


def load(name: str, data_dir: str | None = None, *, standardize: bool = True) -> Source:
    """Loads a data set.

    Args:
      name: ``digits``; ``mnist`` or another folder of IDX files in the data directory; or ``idx:FOLDER``, a
        folder relative to the data directory or absolute.
      data_dir: see `data_directory`.
      standardize: subtract the mean of all training pixels and divide by their standard deviation (0.1307
        and 0.3081 for MNIST), as is customary; they count as public. Otherwise pixels lie in [0, 1].

    Raises:
      JaxpflError: an unknown name (the nearest known one is suggested), a missing file (what to put where),
        or a damaged one (what was found and what is expected).
    """
    source = _load(name, data_dir)
    return _standardized(source) if standardize else source


def _load(name: str, data_dir: str | None) -> Source:
    if name == "digits":
        return _load_digits()
    root = data_directory(data_dir)
    if name.startswith(_IDX_PREFIX):
        folder = root / Path(name.removeprefix(_IDX_PREFIX)).expanduser()
        return _load_idx(name, [folder], f"IDX files in {folder}", needs_test=False)
    if name in _IDX_SETS:
        return _load_idx(name, _folders(name, root), _IDX_SETS[name], needs_test=True)
    if name and Path(name).name == name and _find(root / name, _TRAIN, "images"):
        return _load_idx(name, [root / name], f"IDX files in {root / name}", needs_test=False)
    raise unknown_name("data set", name, known_sources())


def known_sources() -> list[str]:
    """The names that `load` knows; a folder of IDX files in the data directory is known by its own name
    too."""
    return ["digits", *_IDX_SETS, f"{_IDX_PREFIX}FOLDER"]


def available(data_dir: str | None = None) -> list[Entry]:
    """What `load` would find, in the order in which people want it. Looks for files; reads none."""
    root = data_directory(data_dir)
    entries = [Entry("digits", True, _DIGITS)]
    for name, description in _IDX_SETS.items():
        entries.append(_entry(name, _folders(name, root), description, needs_test=True))
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        if folder.name not in _IDX_SETS and folder.is_dir():
            entry = _entry(folder.name, [folder], "IDX files", needs_test=False)
            entries += [entry] if entry.present else []
    return entries


def check_finite(x: np.ndarray, whose: str) -> None:
    """Raises `JaxpflError` naming the first example of x [N, ...] that holds a NaN or an infinity.

    >>> check_finite(np.array([[0.0], [np.nan]]), "client 3")
    Traceback (most recent call last):
    jaxpfl.errors.JaxpflError: client 3: example 1 holds a NaN or infinite value
    """
    if not np.issubdtype(x.dtype, np.inexact) or np.isfinite(x).all():
        return
    first = int(np.argmin(np.isfinite(x).reshape(len(x), -1).all(axis=1)))
    raise JaxpflError(f"{whose}: example {first} holds a NaN or infinite value")


def _load_digits() -> Source:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise JaxpflError("the data set 'digits' comes with scikit-learn: pip install scikit-learn") from error
    flat, labels = load_digits(return_X_y=True)
    x = (np.asarray(flat) / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    check_finite(x, "digits")
    return Source("digits", x, np.asarray(labels).astype(np.int32), None, None, 10, _DIGITS)


def _entry(name: str, folders: list[Path], description: str, needs_test: bool) -> Entry:
    try:
        (images, _), _ = _locate(name, folders, needs_test)
    except JaxpflError as error:
        return Entry(name, False, str(error))
    return Entry(name, True, f"{description}: {images.parent}")


def _load_idx(name: str, folders: list[Path], description: str, needs_test: bool) -> Source:
    train, test = _locate(name, folders, needs_test)
    x_train, y_train = read_idx_pair(*train)
    x_test = y_test = None
    if test is not None:
        x_test, y_test = read_idx_pair(*test)
        if x_test.shape[1:] != x_train.shape[1:]:
            raise JaxpflError(f"{test[0]}: test images are {x_test.shape[1:]} but training images {x_train.shape[1:]}")
    largest = max(int(y.max()) for y in (y_train, y_test) if y is not None)
    return Source(
        name,
        _pixels(x_train),
        y_train.astype(np.int32),
        None if x_test is None else _pixels(x_test),
        None if y_test is None else y_test.astype(np.int32),
        largest + 1,
        description,
    )


def _pixels(images: np.ndarray) -> np.ndarray:
    """Bytes [N, H, W] to float32 [N, H, W, 1] in [0, 1], without a float64 copy of everything."""
    return np.divide(images[..., None], np.float32(255), dtype=np.float32)


def _standardized(source: Source) -> Source:
    mean, deviation = (np.float32(f(source.x_train, dtype=np.float64)) for f in (np.mean, np.std))
    scale = deviation if deviation > 0 else np.float32(1)
    x_test = None if source.x_test is None else (source.x_test - mean) / scale
    return source._replace(x_train=(source.x_train - mean) / scale, x_test=x_test)


def _folders(name: str, root: Path) -> list[Path]:
    return [root / name, root] if name == "mnist" else [root / name]


def _names(part: str, kind: str) -> list[str]:
    dims = {"images": 3, "labels": 1}[kind]
    return [f"{part}-{kind}{dot}idx{dims}-ubyte{gz}" for dot in "-." for gz in ("", ".gz")]


def _find(folder: Path, parts: tuple[str, ...], kind: str) -> Path | None:
    """The file of one part, unzipped before zipped; EMNIST's names have a prefix, which must not be
    ambiguous."""
    names = [file for part in parts for file in _names(part, kind)]
    for file in names:
        if (folder / file).is_file():
            return folder / file
    if not folder.is_dir():
        return None
    prefixed = sorted(file for file in folder.iterdir() if file.name.endswith(tuple(f"-{n}" for n in names)))
    if len({file.name.removesuffix(".gz") for file in prefixed}) > 1:
        found = ", ".join(file.name for file in prefixed)
        raise JaxpflError(f"{folder}: several sets in one folder ({found}): put each in a folder of its own")
    return prefixed[0] if prefixed else None


def _locate(name: str, folders: list[Path], needs_test: bool) -> tuple[_Pair, _Pair | None]:
    """The training and the test files, (images, labels) each, or an error that says what to put where."""
    # The first folder that holds training images is meant; where none does, any of them may be filled.
    holder = next((folder for folder in folders if _find(folder, _TRAIN, "images")), None)
    tried = [holder] if holder else folders
    train = _pair(name, tried, _TRAIN)
    has_test = any(_find(tried[0], _TEST, kind) for kind in ("images", "labels"))
    return train, _pair(name, tried, _TEST) if needs_test or has_test else None


def _pair(name: str, folders: list[Path], parts: tuple[str, ...]) -> _Pair:
    images, labels = (_find(folders[0], parts, kind) for kind in ("images", "labels"))
    if images is not None and labels is not None:
        return images, labels
    lacking = [_names(parts[0], k)[0] for k, f in (("images", images), ("labels", labels)) if f is None]
    tried = " nor in ".join(map(str, folders))
    raise JaxpflError(
        f"data set {name!r}: no file {' and '.join(lacking)} (or .gz) in {tried}: "
        f"put it there, or say where the data lie with {DATA_DIR_VARIABLE} or --data-dir"
    )
