"""`Source`, a data set before it is split among clients, and functions that all readers share.

N is the number of training examples, T the number of test examples, U the number of users, and H x W the size of an
image.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np

from jaxpfl.data.sources.table_columns import TableColumns
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, printable, warn

DATA_DIR_VARIABLE = "JAXPFL_DATA_DIR"
_PATHS = ("csv", "federation", "idx", "leaf", "libsvm", "npz", "text")
"""Prefixes of the names of data sets that are followed by a path."""
_ENTRIES = 2**20
"""Number of array entries that are processed together."""

Inputs: TypeAlias = Literal["pixels", "features", "tokens"]
"""Kind of inputs: pixels, which `load` standardizes; features, that is, any other numbers; or tokens, that is, token
ids."""


class Source(NamedTuple):
    """A data set before it is split among clients.

    Attributes:
      name: name under which the data set was loaded.
      x_train: training inputs, [N, ...]: float32 (float64 if float32 loses digits), int32 tokens, or a dictionary (or
        NamedTuple) of such arrays; images are [N, H, W, channels]. Arrays may be memory-mapped.
      y_train: training labels, [N] int32 in 0 .. num_classes - 1, or float32; [N, d] if an example has several labels.
      x_test, y_test: official test set, or None if there is none (each client's examples are then split).
      num_classes: number of classes (the largest label + 1), or d if labels are not classes.
      description: one line for display.
      users_train, users_test: user who produced each example, [N] int32 in 0 .. U - 1 (a writer, a speaker, an
        account), or None if unknown. Training and test users share one numbering.
      user_names: names or numbers of the users in the data set, [U], or None.
      superclasses: superclass of each class, [num_classes] int32, or None.
      inputs: kind of inputs, as defined in `Inputs`.
      scales: mean and standard deviation by which each channel of pixels was standardized, or None.
      task: task of the labels, a name in `jaxpfl.models.TASKS`.
      class_names: labels of the classes in the data set (numbers or strings), [num_classes], or None if they are 0 ..
        num_classes - 1.
      ordered: whether a user's examples are in the order of a text or of time. If so, the user's last examples are held
        out for testing.
      persons: person of each training example, [N] int32, or None. All of a person's examples at a client go to the
        same split (train, validation or test), and example-level privacy protects them together.
      columns: columns of the table from which the features come, or None if the data set is not a table.
    """

    name: str
    x_train: Any
    y_train: np.ndarray
    x_test: Any | None
    y_test: np.ndarray | None
    num_classes: int
    description: str
    users_train: np.ndarray | None = None
    users_test: np.ndarray | None = None
    user_names: np.ndarray | None = None
    superclasses: np.ndarray | None = None
    inputs: Inputs = "features"
    scales: list[tuple[np.float32, np.float32]] | None = None
    task: str = "classification"
    ordered: bool = False
    class_names: np.ndarray | None = None
    persons: np.ndarray | None = None
    columns: TableColumns | None = None


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Preparation:
    """Record of how a federation was made from a data set, so that new inputs can be prepared in the same way.

    Attributes:
      inputs, scales, class_names, columns: as in `Source`; ``columns`` includes the replacements for missing values.
      raw_dtype: dtype of the inputs before they were scaled; None if an input is not a single array.
      persons: whether the person of each example is known (`Source.persons`).
      scaling: scaling of the inputs, a `jaxpfl.data.Scaling`; None if the inputs were not standardized after loading.
    """

    inputs: Inputs
    scales: list[tuple[np.float32, np.float32]] | None
    class_names: np.ndarray | None
    columns: TableColumns | None
    raw_dtype: str | None
    persons: bool
    scaling: Any = None

    @classmethod
    def of(cls, source: Source, columns: TableColumns | None) -> Preparation:
        """Return the preparation of a source's examples; ``columns`` states how missing values are replaced."""
        dtype = getattr(source.x_train, "dtype", None)
        persons = source.persons is not None
        return cls(source.inputs, source.scales, source.class_names, columns, dtype and str(dtype), persons)

    def to_json(self) -> dict[str, Any]:
        """Return the record as a mapping of JSON values."""
        return {
            "inputs": self.inputs,
            "scales": self.scales and [[float(a), float(b)] for a, b in self.scales],
            "class_names": None if self.class_names is None else self.class_names.tolist(),
            "columns": self.columns and self.columns.to_json(),
            "raw_dtype": self.raw_dtype,
            "persons": self.persons,
            "scaling": self.scaling and [[a.tolist() for a in jax.tree.leaves(part)] for part in self.scaling],
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Preparation) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((self.inputs, self.raw_dtype))


class Entry(NamedTuple):
    """A line of ``jaxpfl data list``: a data set, whether it can be loaded, and its description or what is missing."""

    name: str
    present: bool
    note: str


def entry(name: str, describe: Callable[[str, Path], str], root: Path) -> Entry:
    """Return a data set's entry in the list: what ``describe`` returns, or why the files cannot be found."""
    try:
        return Entry(name, True, describe(name, root))
    except (JaxpflError, OSError) as error:
        return Entry(name, False, str(error))


def data_directory(data_dir: str | None = None) -> Path:
    """Return the folder of the data sets: ``data_dir`` if given, else ``$JAXPFL_DATA_DIR`` if set, else ``./data``."""
    return Path(data_dir or os.environ.get(DATA_DIR_VARIABLE) or "data").expanduser()


def data_folder(name: str, data_dir: str | None = None) -> Path:
    """Return the folder to which the path in a data set's name is relative.

    For ``csv:PATH``, ``npz:PATH`` and the like, this is the first of three folders in which the path exists: the given
    folder, the current folder, and the folder of the data sets. If the path exists in both the current folder and the
    folder of the data sets, a warning is issued.
    """
    prefix, _, argument = name.partition(":")
    path, usual = Path(argument).expanduser(), data_directory()
    if prefix not in _PATHS or not argument or path.is_absolute():
        return data_directory(data_dir)
    folders = [*([Path(data_dir).expanduser()] if data_dir else []), Path(), usual]
    found = next((folder for folder in folders if os.path.exists(folder / path)), data_directory(data_dir))
    if not data_dir and found == Path() and os.path.exists(usual / path) and not os.path.samefile(usual / path, path):
        warn(f"{name} is read from the current folder: to read {usual / path}, use --data-dir {usual}")
    return Path() if found.absolute() == Path.cwd() else found


def where_to_put_it() -> str:
    """Return advice for the end of an error message about a missing file."""
    return f"put it there, or set ${DATA_DIR_VARIABLE} or --data-dir to the folder with the data"


def are_unseen(source: Source) -> np.ndarray:
    """Mask [T] of the test examples whose users have no training examples.

    Raises:
      JaxpflError: if the source has no users, or no test examples.
    """
    if source.users_train is None or source.users_test is None:
        raise JaxpflError(f"data set {source.name!r} has no users, or no test set, so it has no unseen users")
    return ~np.isin(source.users_test, source.users_train)


def unseen(source: Source) -> Source:
    """Return the test users who have no training examples as a separate data set, for clients unseen in training.

    Raises:
      JaxpflError: if every test user has training examples.
    """
    apart = are_unseen(source)
    if not apart.any():
        raise JaxpflError(f"data set {source.name!r}: all its test users have training examples, so none is unseen")
    others = _tested_on(source, apart)
    return others._replace(
        name=f"{source.name}, unseen users",
        x_train=others.x_test,
        y_train=others.y_test,
        users_train=others.users_test,
        x_test=None,
        y_test=None,
        users_test=None,
        persons=None,
    )


def seen(source: Source) -> Source:
    """Return the source without the test users who have no training examples; `unseen` returns those users."""
    apart = are_unseen(source)
    return source._replace(x_test=None, y_test=None, users_test=None) if apart.all() else _tested_on(source, ~apart)


def _tested_on(source: Source, mask: np.ndarray) -> Source:
    """Return the source with only the test examples in the mask."""
    assert source.y_test is not None
    assert source.users_test is not None
    if mask.all():
        return source
    places = np.flatnonzero(mask)
    x_test = jax.tree.map(lambda leaf: host_memory.gathered(leaf, places), source.x_test)
    y_test = host_memory.gathered(source.y_test, places)
    return source._replace(x_test=x_test, y_test=y_test, users_test=source.users_test[places])


def pooled(source: Source) -> Source:
    """Merge training and test examples into one set, so that each client's examples can be split anew."""
    if source.y_test is None:
        return source
    users = None
    if source.users_train is not None and source.users_test is not None:
        users = np.concatenate([source.users_train, source.users_test])
    return source._replace(
        name=f"{source.name}, pooled",
        x_train=jax.tree.map(_joined, source.x_train, source.x_test),
        y_train=np.concatenate([source.y_train, source.y_test]),
        users_train=users,
        x_test=None,
        y_test=None,
        users_test=None,
    )


def _joined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Concatenate two arrays; if the first is a memory-mapped file, the result is one too."""
    if not host_memory.is_mapped(a):
        return np.concatenate([a, b])
    joined = host_memory.Growing(in_file=True)
    for part in (*host_memory.iterate(a), *host_memory.iterate(b)):
        joined.append(part.astype(a.dtype, copy=False))
    return joined.whole()


def standardized(source: Source) -> Source:
    """Subtract the mean of all training pixels and divide by their standard deviation, separately for each channel.

    Inputs other than pixels are returned unchanged.
    """
    if source.inputs != "pixels":
        return source
    scales = pixel_scale(source.x_train)
    means, deviations = map(np.array, zip(*scales, strict=True))

    def scaled(images: np.ndarray) -> np.ndarray:
        return host_memory.converted(images, images.dtype, lambda part: (part - means) / deviations)

    x_test = None if source.x_test is None else scaled(source.x_test)
    return source._replace(x_train=scaled(source.x_train), x_test=x_test, scales=scales)


def pixel_scale(images: np.ndarray) -> list[tuple[np.float32, np.float32]]:
    """Mean and standard deviation (1 if 0) of each channel of images [N, H, W, channels]."""
    found = []
    for channel in range(images.shape[-1]):
        of = images[..., channel]
        mean = (
            sum(np.ascontiguousarray(part).sum(dtype=np.float64) for part in host_memory.iterate(of, _ENTRIES))
            / of.size
        )
        squares = (np.square(np.ascontiguousarray(part) - mean).sum() for part in host_memory.iterate(of, _ENTRIES))
        deviation = np.float32(np.sqrt(sum(squares) / of.size))
        found.append((np.float32(mean), deviation if deviation > 0 else np.float32(1)))
    return found


def pixels(images: np.ndarray) -> np.ndarray:
    """Convert bytes [N, H, W] or [N, H, W, channels] to float32 [N, H, W, channels] in [0, 1].

    No float64 copy is made.
    """
    images = images[..., None] if images.ndim == 3 else images
    return np.divide(images, np.float32(255), dtype=np.float32)


def warn_of_empty(place: Path, names: Collection[str]) -> None:
    """Warn about clients without examples, which every reader leaves out."""
    if names:
        warn(
            f"{place}: skipped {len(names)} client{'s' * (len(names) > 1)} without examples "
            f"({printable(', '.join(sorted(names)), 300)})"
        )


def number_users(train: np.ndarray, test: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Number the users of training [N] and test [T] examples 0 .. U - 1 in the order of names, and return the names."""
    names, numbers = np.unique(train if test is None else np.concatenate([train, test]), return_inverse=True)
    numbers = numbers.astype(np.int32)
    return numbers[: len(train)], None if test is None else numbers[len(train) :], names


def no_classes(whose: str, dtype: Any) -> JaxpflError:
    """Return the error for labels whose dtype is not an integer type, so that they cannot be classes."""
    return JaxpflError(f"{whose} must be integers >= 0, got {dtype}")


def one_line(error: BaseException) -> str:
    """Shorten a library's error message to one line of about 200 characters, to quote it in a `JaxpflError`."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]} ..."
