"""LEAF's JSON files (Caldas et al. 2018, "LEAF: A Benchmark for Federated Settings"): data sets with users.

A folder holds ``train`` and ``test`` (or ``data/train`` and ``data/test``, as in LEAF's own repository), each with one
or several files ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}``. A folder
without ``test``, such as ``all_data``, has no official test set. The kind of inputs is detected from the first one:

- numbers (FEMNIST, synthetic): float32; 784 of them become an image [28, 28, 1];
- a string of characters and the next one (Shakespeare): tokens of `jaxpfl.data.sources.leaf_text`;
- sequences of tokens (Reddit): see `jaxpfl.data.sources.leaf_text.windows`.

Only ``train`` and ``test`` are read, not the ``val`` of Reddit: use ``validation_share`` to hold examples out.
``num_samples`` is not read: LEAF's own Shakespeare test files state it wrongly (its ``split_data.py`` counts the 79
examples that overlap the training text, and leaves them out).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpfl import strict_json
from jaxpfl.data.sources import leaf_text
from jaxpfl.data.sources.base import (
    Entry,
    Inputs,
    Source,
    check_finite,
    check_fits,
    entry,
    no_classes,
    one_line,
    where_to_put_it,
)
from jaxpfl.errors import JaxpflError, shown

LEAF_SETS = {
    "femnist": ("images", 62, "FEMNIST, handwritten characters by their writers, 62 classes (LEAF)"),
    "shakespeare": ("text", 80, "Shakespeare, the next of 80 characters, by speaking role (LEAF)"),
    "reddit": ("sequences", None, "Reddit, the next word of comments, by author (LEAF)"),
}
"""Sets known by name: their kind of inputs, number of classes, and a line for display."""

_MEMORY = 8  # times its length that JSON takes as Python's own numbers and lists
_LARGEST = 2**31 - 1

_Users = dict[str, tuple[Any, Any]]
"""Each user's inputs and labels, as in the files (numeric inputs already as an array)."""


class _Encoded(NamedTuple):
    x: np.ndarray
    y: np.ndarray
    users: np.ndarray


def load_leaf(name: str, folder: Path) -> Source:
    """Load a data set in LEAF's format.

    Args:
      name: one of `LEAF_SETS`, or any other name, for any of the three kinds of inputs.
      folder: see the module's docstring.

    Raises:
      JaxpflError: no such files, no JSON, a user without data or with data twice, inputs and labels that do not
        fit each other or other users', inputs of no known kind.
    """
    expected, classes, description = LEAF_SETS.get(name, (None, None, f"LEAF files in {folder}"))
    train_folder, test_folder = locate(name, folder)
    raw = {part: read_part(f) for part, f in (("train", train_folder), ("test", test_folder)) if f is not None}
    kind = kind_of(raw["train"], train_folder)
    if expected not in (None, kind):
        raise JaxpflError(f"{train_folder}: holds {kind}, but {name!r} is {expected}")
    encode = _numbers
    if kind == "text":
        encode, classes = leaf_text.encode_characters, len(leaf_text.ALL_LETTERS)
    elif kind == "sequences":
        vocabulary = leaf_text.vocabulary_of(folder, [x for x, _ in raw["train"].values()])
        length = leaf_text.longest_sequence([x for users in raw.values() for x, _ in users.values()])
        leaf_text.check_windows([x for users in raw.values() for x, _ in users.values()], length, folder)
        encode, classes = partial(leaf_text.windows, vocabulary=vocabulary, length=length), vocabulary.size
    names = sorted({user for users in raw.values() for user, (_, y) in users.items() if len(y)})
    encoded = {part: _concatenate(users, encode, names, train_folder.parent / part) for part, users in raw.items()}
    return _source(name, encoded, names, classes, description, train_folder)


def leaf_entries(root: Path) -> list[Entry]:
    """Lines of ``jaxpfl data list`` for `LEAF_SETS`. Looks for files; reads none."""

    def describe(name: str) -> str:
        return f"{LEAF_SETS[name][2]}: {locate(name, root / name)[0].parent}"

    return [entry(name, partial(describe, name)) for name in LEAF_SETS]


def _source(
    name: str, encoded: dict[str, _Encoded], names: list[str], classes: int | None, description: str, folder: Path
) -> Source:
    train, test = encoded["train"], encoded.get("test")
    largest = max(int(part.y.max(initial=0)) for part in encoded.values())
    if classes is not None and largest >= classes:
        raise JaxpflError(f"{folder}: label {largest}, but the data set has {classes} classes")
    if test is not None and test.x.shape[1:] != train.x.shape[1:]:
        raise JaxpflError(f"{folder}: test inputs are {test.x.shape[1:]} but training inputs {train.x.shape[1:]}")
    inputs: Inputs = "tokens" if np.issubdtype(train.x.dtype, np.integer) else "features"
    if test is not None and test.x.dtype != train.x.dtype:
        raise JaxpflError(f"{folder}: test inputs are {test.x.dtype} but training inputs {train.x.dtype}")
    if inputs == "features" and train.x.shape[1:] == (784,):
        inputs = "pixels"
        train = train._replace(x=train.x.reshape(-1, 28, 28, 1))
        test = None if test is None else test._replace(x=test.x.reshape(-1, 28, 28, 1))
    return Source(
        name,
        train.x,
        train.y,
        None if test is None else test.x,
        None if test is None else test.y,
        largest + 1 if classes is None else classes,
        f"{description}; {len(names)} users",
        users_train=train.users,
        users_test=None if test is None else test.users,
        user_names=np.array(names),
        inputs=inputs,
    )


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


def read_part(folder: Path) -> _Users:
    """Read all users of a folder's files, sorted by name, so that the order and division of files do not matter."""
    users: _Users = {}
    origin: dict[str, Path] = {}
    for file in _files(folder):
        for user, data in _read_file(file).items():
            if user in users:
                raise JaxpflError(
                    f"user {shown(user)} is in {origin[user]} and in {file}: files of an earlier preparation?"
                )
            users[user], origin[user] = data, file
    if not any(len(y) for _, y in users.values()):
        raise JaxpflError(f"{folder}: no user has an example")
    return dict(sorted(users.items()))


def _read_file(file: Path) -> _Users:
    try:
        check_fits(file, _MEMORY * file.stat().st_size)
        content = strict_json.parse(file.read_bytes())
    except OSError as error:
        raise JaxpflError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise JaxpflError(f"{file}: no JSON, or truncated: {one_line(error)}") from error
    if not isinstance(content, dict) or not isinstance(content.get("user_data"), dict):
        raise JaxpflError(f"{file}: no 'user_data' in it: not a LEAF file")
    data = content["user_data"]
    listed = content.get("users")
    for user in listed if isinstance(listed, list) else ():
        if str(user) not in data:
            raise JaxpflError(f"{file}: user {shown(user)} is listed but has no data")
    return {user: _read_user(own, f"{file}: user {shown(user)}") for user, own in data.items()}


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
    """Convert to an array: integers (tokens) stay integers, other numbers become float32."""
    try:
        array = np.asarray(x)
        integers = np.issubdtype(array.dtype, np.integer)
        if integers and array.size and not (array.min() >= -_LARGEST - 1 and array.max() <= _LARGEST):
            raise ValueError(f"integers of more than 32 bits, {array.min()} to {array.max()}")
        with np.errstate(over="ignore"):  # values that overflow float32 become infinite, and are refused
            array = array.astype(np.int32 if integers else np.float32, casting="same_kind")
    except (ValueError, TypeError, OverflowError) as error:
        raise JaxpflError(f"{whose}: inputs must be numbers, as many in each: {one_line(error)}") from None
    if array.size == 0:
        raise JaxpflError(f"{whose}: inputs must be numbers, got shape {array.shape}")
    check_finite(array, whose)
    return array


def kind_of(users: _Users, folder: Path) -> str:
    """Detect the kind of inputs from the first user with examples: "images", "text" or "sequences".

    In "images" x is an array [n, ...]; in "text" x are strings and y the character that follows each; in "sequences" x
    are lists of tokens and y has ``target_tokens``.

    Args:
      users: name -> (x, y) of n examples each.
      folder: for messages.

    Raises:
      JaxpflError: for any other kind.
    """
    x, y = next((x[0], y[0]) for x, y in users.values() if len(y))
    if isinstance(x, np.ndarray):
        return "images"
    if isinstance(x, str) and isinstance(y, str) and len(y) == 1:
        return "text"
    if isinstance(x, list) and isinstance(y, dict) and "target_tokens" in y:
        return "sequences"
    raise JaxpflError(
        f"{folder}: inputs such as {str(x)[:30]!r} are neither numbers, nor characters with the next one, "
        "nor token sequences with 'target_tokens'"
    )


def _numbers(x: Any, y: Any, whose: str) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(x, np.ndarray):
        raise JaxpflError(f"{whose}: inputs must be numbers, as the other users' are")
    if any(isinstance(label, float) for label in y):
        raise no_classes(f"{whose}: labels", np.dtype(float))
    if not all(type(label) is int and 0 <= label <= _LARGEST for label in y):
        raise JaxpflError(f"{whose}: labels must be integers >= 0, at most {_LARGEST}")
    return x, np.array(y, np.int32)


def _concatenate(users: _Users, encode: Any, names: list[str], folder: Path) -> _Encoded:
    """Concatenate all users' examples in one array, ignoring users without any."""
    parts: list[tuple[str, np.ndarray, np.ndarray]] = []
    for user, (x, y) in users.items():
        if len(y):
            parts.append((user, *encode(x, y, whose=f"{folder}: user {shown(user)}")))
    first = parts[0][1]
    for user, x, _ in parts:
        if x.shape[1:] != first.shape[1:] or x.dtype != first.dtype:
            raise JaxpflError(
                f"{folder}: user {shown(user)}: one input is {x.shape[1:]} of {x.dtype}, "
                f"others are {first.shape[1:]} of {first.dtype}"
            )
    place = {name: i for i, name in enumerate(names)}
    counts = [len(y) for _, _, y in parts]
    return _Encoded(
        np.concatenate([x for _, x, _ in parts]),
        np.concatenate([y for _, _, y in parts]),
        np.repeat(np.array([place[user] for user, _, _ in parts], np.int32), counts),
    )
