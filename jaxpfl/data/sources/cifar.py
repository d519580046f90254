"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), read from the official archives or from an .npz file.

The loader searches the data directory, and its folders ``cifar10`` and ``cifar-10`` (``cifar100`` and ``cifar-100``),
for

- the Python version, ``cifar-10-batches-py`` or ``cifar-100-python``, read by `read_pickle`;
- the binary version, ``cifar-10-batches-bin`` or ``cifar-100-binary``;
- ``cifar10.npz`` (or any .npz in those folders) with ``x_train``, ``y_train``, ``x_test``, ``y_test``; for CIFAR-100
  also ``coarse_train``.

CIFAR-100 is loaded with its 100 fine classes; the 20 coarse classes become its superclasses.
Formats: https://www.cs.toronto.edu/~kriz/cifar.html
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.data.sources.base import Source, pixels, where_to_put_it
from jaxpfl.data.sources.npz import load_npz, npz_keys, read_npz
from jaxpfl.data.sources.pickles import read_pickle
from jaxpfl.support.errors import JaxpflError, printable
from jaxpfl.support.files import check_fits, contents

_SIDE = 32
_BYTES = 3 * _SIDE * _SIDE


class _Set(NamedTuple):
    classes: int
    python: str
    binary: str
    train: tuple[str, ...]
    test: str
    labels: tuple[str, ...]  # keys in the Python version; a binary record has its label bytes in the same order
    description: str

    @property
    def archive(self) -> str:
        """Beginning of the archive's name, which is also the name of a folder."""
        return f"cifar-{self.classes}"


CIFAR_SETS = {
    "cifar10": _Set(
        classes=10,
        python="cifar-10-batches-py",
        binary="cifar-10-batches-bin",
        train=tuple(f"data_batch_{i}" for i in range(1, 6)),
        test="test_batch",
        labels=("labels",),
        description="CIFAR-10, color images of 32 x 32, 10 classes",
    ),
    "cifar100": _Set(
        classes=100,
        python="cifar-100-python",
        binary="cifar-100-binary",
        train=("train",),
        test="test",
        labels=("coarse_labels", "fine_labels"),
        description="CIFAR-100, color images of 32 x 32, 100 classes in 20 superclasses",
    ),
}


def load_cifar(name: str, root: Path) -> Source:
    """Load one of `CIFAR_SETS`.

    Raises:
      JaxpflError: if there are no files (the message says where to put them, or how to unpack an archive), or if a
        batch is missing or damaged.
    """
    kind, place = _locate(name, root)
    if kind == "npz":
        return _load_npz(name, place)
    read, suffix = (_read_python, "") if kind == "python" else (_read_binary, ".bin")
    known = CIFAR_SETS[name]
    batches = [_batch(read, known, place / f"{file}{suffix}") for file in (*known.train, known.test)]
    sizes = [len(images) for images, _ in batches[:-1]]
    if len(set(sizes)) > 1:
        raise JaxpflError(f"{place}: training batches have {sizes} images: one of them is truncated")
    # Memory is needed for all images as bytes, concatenated, as floats, and standardized.
    check_fits(place, 6 * sum(images.nbytes for images, _ in batches))
    images = np.concatenate([images for images, _ in batches[:-1]])
    labels = [np.concatenate(column) for column in zip(*(labels for _, labels in batches[:-1]), strict=True)]
    test_images, test_labels = batches[-1]
    x, y, x_test, y_test = pixels(images), labels[-1], pixels(test_images), test_labels[-1]
    source = Source(name, x, y, x_test, y_test, known.classes, known.description, inputs="pixels")
    if len(labels) == 1:
        return source
    return source._replace(superclasses=_superclasses(place, labels[0], labels[1], known.classes))


def describe_cifar(name: str, root: Path) -> str:
    """Describe one of `CIFAR_SETS`, after locating its files without reading them."""
    return f"{CIFAR_SETS[name].description}: {_locate(name, root)[1]}"


def _locate(name: str, root: Path) -> tuple[str, Path]:
    """Return the format and the path of the files: ("python" or "binary", folder) or ("npz", file)."""
    known = CIFAR_SETS[name]
    places = [root / name, root / known.archive, root]
    for place in places:
        for kind, folder, file in (
            ("python", known.python, known.train[0]),
            ("binary", known.binary, f"{known.train[0]}.bin"),
        ):
            for holder in (place / folder, place):
                # A file that is just called "train" in the data directory may belong to another data set.
                if (holder / file).is_file() and (holder != root or name == "cifar10"):
                    return kind, holder
        if (place / f"{name}.npz").is_file():
            return "npz", place / f"{name}.npz"
    for file in (file for place in places[:-1] for file in sorted(place.glob("*.npz"))):
        if "x_train" in npz_keys(file):
            return "npz", file
    for archive in (file for place in places for file in sorted(place.glob(f"{known.archive}-*.tar.gz"))):
        raise JaxpflError(f"data set {name!r} is still packed: run tar -xzf {archive} -C {root}")
    raise JaxpflError(
        f"data set {name!r} is not in {', '.join(map(str, places))}: it is a folder {known.python}, a folder "
        f"{known.binary}, or a file {name}.npz with y_train, y_test, x_train and x_test (uint8 [N, {_SIDE}, {_SIDE}, "
        f"3]); {where_to_put_it()}"
    )


def _batch(read: Callable[[_Set, Path], Any], known: _Set, path: Path) -> tuple[np.ndarray, list[np.ndarray]]:
    """Read images [N, 32, 32, 3] uint8, and columns of labels, each [N] int32; the last column is the class."""
    flat, columns = read(known, path)
    if any(len(column) != len(flat) for column in columns):
        raise JaxpflError(f"{path}: {len(flat)} images but {', '.join(str(len(c)) for c in columns)} labels")
    if len(flat) == 0:
        raise JaxpflError(f"{path} has no images")
    labels = columns[-1]
    if labels.min() < 0 or labels.max() >= known.classes:
        raise JaxpflError(f"{path}: labels are {labels.min()} to {labels.max()}, expected 0 to {known.classes - 1}")
    return np.ascontiguousarray(flat.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)), columns


def _read_python(known: _Set, path: Path) -> tuple[np.ndarray, list[np.ndarray]]:
    batch = read_pickle(path)
    if not isinstance(batch, dict):
        raise JaxpflError(f"{path} is not a CIFAR batch: it contains a {type(batch).__name__}, expected a dictionary")
    batch = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    if missing := [key for key in ("data", *known.labels) if key not in batch]:
        raise JaxpflError(f"{path} has no {missing[0]!r} (it contains {printable(', '.join(map(str, batch)))})")
    data = batch["data"]
    if not (isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 2 and data.shape[1] == _BYTES):
        raise JaxpflError(f"{path}: its data must be uint8 [N, {_BYTES}], got {getattr(data, 'shape', type(data))}")
    return data, [_labels(batch[key], path) for key in known.labels]


def _labels(column: Any, path: Path) -> np.ndarray:
    """Convert a list or array of integers to [N] int32."""
    if isinstance(column, np.ndarray) and column.ndim == 1:
        column = column.tolist()
    if isinstance(column, list) and all(type(label) is int and 0 <= label < 256 for label in column):
        return np.array(column, np.int32)
    raise JaxpflError(f"{path}: its labels must be a list of integers from 0 to 255")


def _read_binary(known: _Set, path: Path) -> tuple[np.ndarray, list[np.ndarray]]:
    content = np.frombuffer(contents(path), np.uint8)
    record = len(known.labels) + _BYTES
    if len(content) % record:
        raise JaxpflError(f"{path} is truncated: {len(content)} bytes are not a multiple of the record length {record}")
    rows = content.reshape(-1, record)
    return rows[:, len(known.labels) :], [rows[:, i].astype(np.int32) for i in range(len(known.labels))]


def _load_npz(name: str, path: Path) -> Source:
    known = CIFAR_SETS[name]
    source = load_npz(name, path, f"{known.description}: {path}", known.classes)
    if source.x_train.shape[1:] != (_SIDE, _SIDE, 3) or source.inputs != "pixels":
        raise JaxpflError(f"{path}: images must be uint8 [N, {_SIDE}, {_SIDE}, 3], got {source.x_train.shape}")
    if "coarse_train" not in npz_keys(path):
        return source
    coarse = read_npz(path, ["coarse_train"])["coarse_train"]
    if coarse.shape != source.y_train.shape or not np.issubdtype(coarse.dtype, np.integer):
        raise JaxpflError(f"{path}: coarse_train must be {len(source.y_train)} integers, one for each label")
    return source._replace(superclasses=_superclasses(path, coarse, source.y_train, known.classes))


def _superclasses(place: Path, coarse: np.ndarray, fine: np.ndarray, num_classes: int) -> np.ndarray:
    """Return the superclass of each class, [num_classes] int32."""
    table = np.zeros(num_classes, np.int32)
    table[fine] = coarse
    if (table[fine] != coarse).any():
        wrong = int(fine[table[fine] != coarse][0])
        raise JaxpflError(f"{place}: class {wrong} has examples of more than one superclass")
    return table
