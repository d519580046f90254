"""Reader for the IDX format of MNIST and similar sets, and for folders of IDX files.

A file has a big-endian header, followed by raw numbers. The header consists of two zero bytes, a type code (0x08:
unsigned byte), the number of dimensions, and one 32-bit size for each dimension. Reference:
http://yann.lecun.com/exdb/mnist (section "FILE FORMATS").
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeAlias, cast

import numpy as np

from jaxpfl.data.labels import number_classes, unlike_numbers
from jaxpfl.data.sources.base import Entry, Source, entry, pixels, where_to_put_it
from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.files import check_fits, opened

_MOST_INFLATED = 1032  # largest ratio of inflated to compressed bytes in deflate


def read_idx(path: str | Path, ndim: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes. Gzip compression is detected from the content, not from the name.

    Args:
      path: file to read.
      ndim: number of dimensions that the file must have: 3 for images, 1 for labels.

    Returns:
      The numbers, as a uint8 array with the shape in the header.

    Raises:
      JaxpflError: if the file is missing; if its compression is damaged; if its magic number, element type or number of
        dimensions is wrong; or if it has too few or too many bytes. The message names the file and the problem.
    """
    path = Path(path)
    with _inflated(path) as (file, most):
        shape = _shape(path, file.read(4 + 4 * ndim), ndim)
        expected = math.prod(shape)
        check_fits(path, min(expected, most))
        content = file.read(expected + 1) if expected <= most else b""
    if len(content) != expected:
        problem = "too long" if len(content) > expected else "truncated"
        raise JaxpflError(f"{path} is {problem}: the shape {shape} in its header requires {expected} bytes of data")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def read_idx_pair(images: str | Path, labels: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Read images [N, H, W] and their labels [N], both uint8.

    Raises:
      JaxpflError: as in `read_idx`; or if there are no images, or the numbers of images and labels differ.
    """
    shape, (count,) = _shape_of(Path(images), 3), _shape_of(Path(labels), 1)
    if shape[0] != count:
        raise JaxpflError(f"{images} contains {shape[0]} images but {labels} contains {count} labels")
    if 0 in shape:
        raise JaxpflError(f"{images} has no pixels: its shape is {shape}")
    return read_idx(images, 3), read_idx(labels, 1)


@contextmanager
def _inflated(path: Path) -> Iterator[tuple[IO[bytes], int]]:
    """Yield a file that inflates compressed content on reading, and an upper bound on its inflated bytes."""
    try:
        with opened(path) as raw:
            size = os.fstat(raw.fileno()).st_size
            zipped = raw.peek(2)[:2] == b"\x1f\x8b"
            yield (cast("IO[bytes]", gzip.GzipFile(fileobj=raw)), _MOST_INFLATED * size) if zipped else (raw, size)
    except EOFError as error:
        raise JaxpflError(f"{path} is truncated: its gzip stream of {path.stat().st_size} bytes ends early") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise JaxpflError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise JaxpflError(f"cannot read {path}: {error.strerror or error}") from error


def _shape_of(path: Path, ndim: int) -> tuple[int, ...]:
    with _inflated(path) as (file, _):
        return _shape(path, file.read(4 + 4 * ndim), ndim)


def _shape(path: Path, header: bytes, ndim: int) -> tuple[int, ...]:
    """Check a header and return the array shape in it."""
    expected_magic = bytes((0, 0, 0x08, ndim))
    magic = header[:4]
    if len(magic) < 4 or magic[:2] != b"\0\0":
        raise JaxpflError(
            f"{path} is not an IDX file: its magic number is {_hex(magic)}, expected {_hex(expected_magic)}"
        )
    if magic[2] != 0x08:
        raise JaxpflError(f"{path} has elements of type 0x{magic[2]:02x}: only unsigned bytes (0x08) are supported")
    if magic[3] != ndim:
        raise JaxpflError(f"{path} has {magic[3]} dimensions, expected {ndim}: are images and labels swapped?")
    if len(header) < 4 + 4 * ndim:
        raise JaxpflError(f"{path} is truncated: its header has {len(header)} bytes, expected {4 + 4 * ndim}")
    return tuple(int(size) for size in np.frombuffer(header, dtype=">u4", offset=4))


def _hex(magic: bytes) -> str:
    return f"0x{magic.hex()}" if magic else "(empty file)"


IDX_SETS = {
    "mnist": "MNIST, handwritten digits",
    "fashion-mnist": "Fashion-MNIST, articles of clothing",
    "kmnist": "Kuzushiji-MNIST, cursive Japanese characters",
}
"""Sets known by name; each set is in the folder of the same name in the data directory."""

_TRAIN, _TEST = ("train",), ("t10k", "test")
_Pair: TypeAlias = tuple[Path, Path]


def load_idx_set(name: str, root: Path) -> Source:
    """Load one of `IDX_SETS`; files of a test set are required."""
    return _load(name, _folders(name, root), IDX_SETS[name], needs_test=True)


def load_idx_folder(name: str, folder: Path) -> Source:
    """Load the IDX files of any folder; a test set is optional."""
    return _load(name, [folder], f"IDX files in {folder}", needs_test=False)


def describe_idx_set(name: str, root: Path) -> str:
    """Describe one of `IDX_SETS`, after locating its files without reading them."""
    return f"{IDX_SETS[name]}: {_locate(name, _folders(name, root), True)[0][0].parent}"


def idx_folder_entries(root: Path) -> list[Entry]:
    """Return the lines of ``jaxpfl data list`` for folders of IDX files in the data directory other than `IDX_SETS`."""
    folders = sorted(root.iterdir()) if root.is_dir() else []
    others = [folder for folder in folders if folder.name not in IDX_SETS and folder.is_dir()]
    entries = [
        entry(folder.name, lambda name, root: f"IDX files: {_locate(name, [root / name], False)[0][0].parent}", root)
        for folder in others
    ]
    return [found for found in entries if found.present]


def has_idx_files(folder: Path) -> bool:
    """Return True if the folder has training images in an IDX file."""
    return _find(folder, _TRAIN, "images") is not None


def _load(name: str, folders: list[Path], description: str, needs_test: bool) -> Source:
    files = dict(zip(("train", "test"), _locate(name, folders, needs_test), strict=False))
    x, labels = {}, {}
    for part, (images, own) in files.items():
        x[part], labels[part] = read_idx_pair(images, own)
    check_fits(files["train"][0], 4 * sum(images.size for images in x.values()))
    x, (y, names) = {part: pixels(images) for part, images in x.items()}, number_classes(labels)
    return Source(
        name, x["train"], y["train"], x.get("test"), y.get("test"), len(names), description, inputs="pixels",
        class_names=unlike_numbers(names),
    )  # fmt: skip


def _folders(name: str, root: Path) -> list[Path]:
    return [root / name, root] if name == "mnist" else [root / name]


def _names(part: str, kind: str) -> list[str]:
    dims = {"images": 3, "labels": 1}[kind]
    return [f"{part}-{kind}{dot}idx{dims}-ubyte{gz}" for dot in "-." for gz in ("", ".gz")]


def _find(folder: Path, parts: tuple[str, ...], kind: str) -> Path | None:
    """Return the file of one kind ("images" or "labels") in a folder, or None if there is none.

    An uncompressed file is preferred. A name may have a prefix before one of ``parts``, as in EMNIST; files with
    different prefixes are an error.
    """
    names = [file for part in parts for file in _names(part, kind)]
    for file in names:
        if (folder / file).is_file():
            return folder / file
    if not folder.is_dir():
        return None
    prefixed = sorted(file for file in folder.iterdir() if file.name.endswith(tuple(f"-{n}" for n in names)))
    if len({file.name.removesuffix(".gz") for file in prefixed}) > 1:
        found = ", ".join(file.name for file in prefixed)
        raise JaxpflError(f"{folder} has files of several data sets ({found}): put each in its own folder")
    return prefixed[0] if prefixed else None


def _locate(name: str, folders: list[Path], needs_test: bool) -> list[_Pair]:
    """Return the (images, labels) files of the training set and of the test set, or raise an error with advice."""
    # Use the first folder with training images; if there is none, the error names all folders.
    holder = next((folder for folder in folders if _find(folder, _TRAIN, "images")), None)
    tried = [holder] if holder else folders
    has_test = needs_test or any(_find(tried[0], _TEST, kind) for kind in ("images", "labels"))
    return [_pair(name, tried, parts) for parts in ((_TRAIN, _TEST) if has_test else (_TRAIN,))]


def _pair(name: str, folders: list[Path], parts: tuple[str, ...]) -> _Pair:
    images, labels = (_find(folders[0], parts, kind) for kind in ("images", "labels"))
    if images is not None and labels is not None:
        return images, labels
    lacking = [_names(parts[0], k)[0] for k, f in (("images", images), ("labels", labels)) if f is None]
    tried = " nor in ".join(map(str, folders))
    raise JaxpflError(f"data set {name!r}: no file {' and '.join(lacking)} (or .gz) in {tried}: {where_to_put_it()}")
