"""Folders of IDX files: MNIST, similar sets, and the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from jaxpfl.data.labels import class_names, renumbered, unlike_numbers
from jaxpfl.data.sources.base import CANNOT_READ, Entry, Source, entry, pixels, where_to_put_it
from jaxpfl.data.sources.idx import read_idx_pair
from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.files import check_fits

IDX_SETS = {
    "mnist": "MNIST, handwritten digits",
    "fashion-mnist": "Fashion-MNIST, articles of clothing",
    "kmnist": "Kuzushiji-MNIST, cursive Japanese characters",
}
"""Sets known by name, each in the folder of its name in the data directory."""

_TRAIN, _TEST = ("train",), ("t10k", "test")
_Pair: TypeAlias = tuple[Path, Path]


def load_idx_set(name: str, root: Path) -> Source:
    """Load one of `IDX_SETS`, with its test set."""
    return _load(name, _folders(name, root), IDX_SETS[name], needs_test=True)


def load_idx_folder(name: str, folder: Path) -> Source:
    """Load the IDX files of any folder; the test set is optional."""
    return _load(name, [folder], f"IDX files in {folder}", needs_test=False)


def idx_set_entry(name: str, root: Path) -> Entry:
    """The line of ``jaxpfl data list`` for one of `IDX_SETS`. Looks for files; reads none."""
    return _entry(name, _folders(name, root), IDX_SETS[name], needs_test=True)


def idx_folder_entries(root: Path) -> list[Entry]:
    """Lines of ``jaxpfl data list`` for other folders of the data directory with IDX files."""
    folders = sorted(root.iterdir()) if root.is_dir() else []
    others = [folder for folder in folders if folder.name not in IDX_SETS and folder.is_dir()]
    entries = [_entry(folder.name, [folder], "IDX files", needs_test=False) for folder in others]
    return [found for found in entries if found.present or found.note.startswith(CANNOT_READ)]


def has_idx_files(folder: Path) -> bool:
    """True if the folder holds training images in IDX files."""
    return _find(folder, _TRAIN, "images") is not None


def _entry(name: str, folders: list[Path], description: str, needs_test: bool) -> Entry:
    return entry(name, lambda: f"{description}: {_locate(name, folders, needs_test)[0][0].parent}")


def _load(name: str, folders: list[Path], description: str, needs_test: bool) -> Source:
    train, test = _locate(name, folders, needs_test)
    x_train, y_train = read_idx_pair(*train)
    x_test = y_test = None
    if test is not None:
        x_test, y_test = read_idx_pair(*test)
        if x_test.shape[1:] != x_train.shape[1:]:
            raise JaxpflError(f"{test[0]}: test images are {x_test.shape[1:]} but training images {x_train.shape[1:]}")
    check_fits(train[0], 4 * (x_train.size + (0 if x_test is None else x_test.size)))
    names = class_names(*(y for y in (y_train, y_test) if y is not None))
    return Source(
        name,
        pixels(x_train),
        renumbered(y_train, names, train[1]),
        None if x_test is None else pixels(x_test),
        None if y_test is None or test is None else renumbered(y_test, names, test[1]),
        len(names),
        description,
        inputs="pixels",
        class_names=unlike_numbers(names),
    )


def _folders(name: str, root: Path) -> list[Path]:
    return [root / name, root] if name == "mnist" else [root / name]


def _names(part: str, kind: str) -> list[str]:
    dims = {"images": 3, "labels": 1}[kind]
    return [f"{part}-{kind}{dot}idx{dims}-ubyte{gz}" for dot in "-." for gz in ("", ".gz")]


def _find(folder: Path, parts: tuple[str, ...], kind: str) -> Path | None:
    """The file of one part, preferably unzipped; EMNIST's names have a prefix, which must not be ambiguous."""
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
    """The training and the test files, (images, labels) each, or an error with advice on missing ones."""
    # The first folder with training images is meant; if there is none, the error names all of them.
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
    raise JaxpflError(f"data set {name!r}: no file {' and '.join(lacking)} (or .gz) in {tried}: {where_to_put_it()}")
