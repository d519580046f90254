"""Data sets by name, for `load` and ``jaxpfl data list``.

`load` downloads nothing (see `download`). The data directory is ``data_dir`` if given, else ``$JAXPFL_DATA_DIR`` if
set, else ``./data``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from jaxpfl.data.sources import cifar, idx, leaf, libsvm, natural, npz, planted, tables, tensorflow_sets, text
from jaxpfl.data.sources.base import Entry, Source, data_directory, data_folder, entry, one_line, standardized
from jaxpfl.data.sources.tables import TableOptions
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, unknown_name

_DIGITS = "scikit-learn's embedded handwritten digits, 1797 images of 8 x 8, 10 classes"
_PLANTED = "synthetic clients in clusters with logistic regressions; also planted:clients=50,clusters=5,..."


def load(
    name: str,
    data_dir: str | None = None,
    *,
    standardize: bool = True,
    in_files: bool = False,
    task: str | None = None,
    table: TableOptions | None = None,
    window: int | None = None,
    tokens: bool = False,
) -> Source:
    """Load a data set by name.

    Args:
      name: one of

        - ``digits``;
        - ``mnist``, ``fashion-mnist``, ``kmnist``, another folder of IDX files in the data directory, or
          ``idx:FOLDER``;
        - ``mnist-writers``: MNIST with the writer of each digit;
        - ``cifar10``, ``cifar100``;
        - ``femnist``, ``shakespeare``, ``reddit``, or ``leaf:FOLDER``: JSON files in LEAF's format;
        - ``a9a`` or ``libsvm:PATH``;
        - ``school``: exam scores of pupils of 139 schools, a regression (`natural`);
        - ``npz:FILE``: your own arrays;
        - ``csv:FILE``: your own table, with columns for the label and the client (see ``table``);
        - ``text:FOLDER``: your own text, one file or subfolder per client (`text`);
        - ``planted``, or ``planted:NAME=VALUE,...``: clients drawn in clusters (`planted.PlantedSettings`);
        - ``tfds:NAME``: a prepared image set of tensorflow-datasets.

        Paths are absolute, or relative to the current folder or the data directory (see `base.data_folder`).
      data_dir: data directory, as in `data_directory`.
      standardize: whether to subtract the mean of all training pixels and divide by their standard deviation, for each
        channel separately (for MNIST, 0.1307 and 0.3081). Both statistics are considered public, as is customary. If
        false, pixels are in [0, 1]. Inputs other than pixels are not changed.
      in_files: whether to keep the inputs in temporary memory-mapped files. An .npz archive is then read block by
        block, so that it may be larger than memory; other sets are read into memory first. Results of `federate` and
        `set_apart` are then in files too. The values do not change.
      task: task for the labels of ``libsvm:``, ``npz:`` and ``csv:``, a name in `jaxpfl.models.TASKS`; by default,
        inferred from the labels' values. For ``next-token``, LEAF's text gets a label at each position instead of one
        label after each window.
      table: columns of labels and clients in ``csv:``, and the treatment of rows with missing values.
      window: length in bytes of the windows of ``text:``; by default, 64.
      tokens: whether to treat integer inputs [N, T] of ``npz:`` and ``leaf:`` as tokens instead of numbers.

    Raises:
      JaxpflError: if the name is unknown (the message suggests the nearest name); if a file is missing (the message
        says where to put it); or if a file is damaged (the message gives the found and the expected content).

    Examples:
      >>> source = load("digits")
      >>> source.x_train.shape, source.num_classes
      ((1797, 8, 8, 1), 10)
    """
    try:
        source = _load(name, data_folder(name, data_dir), _How(in_files, task, table, window, tokens))
        source = _file_source(source) if in_files else source
        return standardized(source) if standardize else source
    except (MemoryError, RecursionError, OSError) as error:  # the file is too large or too deeply nested
        raise JaxpflError(f"cannot read data set {name!r}: {one_line(error)}") from error


class _How(NamedTuple):
    in_files: bool
    task: str | None
    table: TableOptions | None
    window: int | None
    tokens: bool


def _load(name: str, root: Path, how: _How) -> Source:
    prefix, _, argument = name.partition(":")
    if how.window is not None and prefix != "text":
        raise JaxpflError(f"window applies to text:FOLDER, not to {name}")
    if how.tokens and prefix not in ("npz", "leaf"):
        raise JaxpflError(f"tokens applies to npz:FILE and leaf:FOLDER, not to {name}")
    if how.table is not None and how.table.changed and prefix != "csv":
        raise JaxpflError(f"{how.table.changed} applies to csv:FILE, not to {name}")
    if name in _NAMED:
        return _NAMED[name][0](name, name, root, how)
    if argument and prefix in _PREFIXED:
        return _PREFIXED[prefix][1](name, argument, root, how)
    if name and Path(name).name == name and idx.has_idx_files(root / name):
        return idx.load_idx_folder(name, root / name)
    if prefix == "federation":
        raise JaxpflError(f"{name!r} is a saved federation, which is already split: use open_federation")
    raise unknown_name("data set", name, source_names())


def _file_source(source: Source) -> Source:
    """Return the source with its inputs in temporary files."""

    def file_array(x: np.ndarray) -> np.ndarray:
        if host_memory.is_mapped(x):
            return x
        file = host_memory.Growing(in_file=True)
        file.append(x)
        return file.whole()

    return source._replace(
        x_train=jax.tree.map(file_array, source.x_train), x_test=jax.tree.map(file_array, source.x_test)
    )


def source_names() -> list[str]:
    """Return the names known to `load`, without the folders of IDX files in the data directory."""
    return [*_NAMED, *(f"{prefix}:{argument}" for prefix, (argument, _) in _PREFIXED.items())]


def available(data_dir: str | None = None) -> list[Entry]:
    """Return all data sets known to `load`, and whether their files are present; no data are loaded."""
    root = data_directory(data_dir)
    entries = [entry(name, describe, root) for name, (_, describe) in _NAMED.items()]
    try:
        entries += idx.idx_folder_entries(root)
    except OSError as error:
        entries.append(Entry("idx:FOLDER", False, str(error)))
    return [*entries, tensorflow_sets.tfds_entry()]


def _load_digits(name: str, argument: str, root: Path, how: _How) -> Source:
    # Read scikit-learn's file without importing scikit-learn, because the import takes as long as training.
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise JaxpflError("the data set 'digits' requires the package scikit-learn: pip install scikit-learn")
    table = np.loadtxt(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    x = (table[:, :-1] / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    return Source("digits", x, table[:, -1].astype(np.int32), None, None, 10, _DIGITS, inputs="pixels")


def _load_planted(name: str, argument: str, root: Path, how: _How) -> Source:
    return planted.draw_planted(planted.parse(name)).source._replace(name=name)


def _load_table(name: str, argument: str, root: Path, how: _How) -> Source:
    place = _place(argument, root)
    if not place.exists():
        raise JaxpflError(f"cannot read {place}: no such file; a relative path is also tried in the current folder")
    return tables.load_table(name, place, how.table or TableOptions(), task=how.task)


def _load_npz(name: str, argument: str, root: Path, how: _How) -> Source:
    return npz.load_npz(name, _place(argument, root), task=how.task, tokens=how.tokens, in_files=how.in_files)


def _load_leaf(name: str, argument: str, root: Path, how: _How) -> Source:
    return leaf.load_leaf(name, _place(argument, root), every=how.task == "next-token", tokens=how.tokens)


def _load_libsvm(name: str, argument: str, root: Path, how: _How) -> Source:
    return libsvm.load_libsvm(name, argument, root, task=how.task)


def _place(argument: str, root: Path) -> Path:
    return root / Path(argument).expanduser()


_Load: TypeAlias = Callable[[str, str, Path, _How], Source]
_IDX: _Load = lambda name, argument, root, how: idx.load_idx_set(name, root)  # noqa: E731
_CIFAR: _Load = lambda name, argument, root, how: cifar.load_cifar(name, root)  # noqa: E731
_WRITERS: _Load = lambda name, argument, root, how: natural.load_writers(root, in_files=how.in_files)  # noqa: E731
_SCHOOL: _Load = lambda name, argument, root, how: natural.load_school(root)  # noqa: E731

_NAMED: dict[str, tuple[_Load, Callable[[str, Path], str]]] = {
    "digits": (_load_digits, lambda name, root: _DIGITS),
    **dict.fromkeys(idx.IDX_SETS, (_IDX, idx.describe_idx_set)),
    natural.WRITERS: (_WRITERS, natural.describe_writers),
    **dict.fromkeys(cifar.CIFAR_SETS, (_CIFAR, cifar.describe_cifar)),
    **dict.fromkeys(leaf.LEAF_SETS, (_load_leaf, leaf.describe_leaf)),
    **dict.fromkeys(libsvm.LIBSVM_SETS, (_load_libsvm, libsvm.describe_libsvm)),
    natural.SCHOOL: (_SCHOOL, natural.describe_school),
    "planted": (_load_planted, lambda name, root: _PLANTED),
}
"""Data sets with a fixed name. Each set has a loader as in `_PREFIXED`, which gets the name as its argument, and a
function (name, data directory) -> description."""

_PREFIXED: dict[str, tuple[str, _Load]] = {
    "csv": ("FILE", _load_table),
    "text": ("FOLDER", lambda name, argument, root, how: text.load_text(name, _place(argument, root), how.window)),
    "idx": ("FOLDER", lambda name, argument, root, how: idx.load_idx_folder(name, _place(argument, root))),
    "leaf": ("FOLDER", _load_leaf),
    "libsvm": ("PATH", _load_libsvm),
    "npz": ("FILE", _load_npz),
    "planted": ("SETTINGS", _load_planted),
    "tfds": ("NAME", lambda name, argument, root, how: tensorflow_sets.load_tfds(argument, root)),
}
"""Data sets ``PREFIX:ARGUMENT``: kind of argument, and loader (name, argument, data directory, options) -> source."""
