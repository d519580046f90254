"""LEAF's JSON files (Caldas et al. 2018, "LEAF: A Benchmark for Federated Settings"): data sets with users.

A folder holds ``train`` and ``test`` (or ``data/train`` and ``data/test``, as in LEAF's own repository), each with one
or several files ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}``. A folder
without ``test``, such as ``all_data``, has no official test set. The kind of inputs is detected from the first one:

- numbers (FEMNIST, synthetic): float32 (float64 where that loses digits); 784 of them become an image [28, 28, 1];
- a string of characters and the next one (Shakespeare): tokens of `jaxpfl.data.sources.leaf_text`;
- sequences of tokens (Reddit): see `jaxpfl.data.sources.leaf_text.windows`.

Only ``train`` and ``test`` are read, not the ``val`` of Reddit: use ``validation_share`` to hold examples out.
``num_samples`` is not read: LEAF's own Shakespeare test files state it wrongly (its ``split_data.py`` counts the 79
examples that overlap the training text, and leaves them out).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.data.labels import class_names, renumbered, unlike_numbers
from jaxpfl.data.precision import lost_digits, narrowed
from jaxpfl.data.sources import leaf_text
from jaxpfl.data.sources.base import Entry, Inputs, Source, entry, no_classes, warn_of_empty
from jaxpfl.data.sources.leaf_files import LARGEST, Part, User, locate, read_part
from jaxpfl.support import mapped
from jaxpfl.support.errors import JaxpflError, shown

_IMAGE = (784,)
LEAF_SETS = {
    "femnist": ("images", 62, "FEMNIST, handwritten characters by their writers, 62 classes (LEAF)"),
    "shakespeare": ("text", 80, "Shakespeare, the next of 80 characters, by speaking role (LEAF)"),
    "reddit": ("sequences", None, "Reddit, the next word of comments, by author (LEAF)"),
}
"""Sets known by name: their kind of inputs, number of classes, and a line for display."""


class Survey(NamedTuple):
    """Facts about a part's users that must be known before the first one is converted.

    Attributes:
      names: names of the users with examples.
      empty: names of the users without.
      kind: "images", "text" or "sequences": see `kind_of`.
      tally: of the tokens, if the inputs are lists.
    """

    names: set[str]
    empty: set[str]
    kind: str
    tally: leaf_text.Tally


class _Encoded(NamedTuple):
    x: np.ndarray
    y: np.ndarray
    users: np.ndarray


def load_leaf(name: str, folder: Path, *, in_files: bool = False, every: bool = False, tokens: bool = False) -> Source:
    """Load a data set in LEAF's format.

    Args:
      name: one of `LEAF_SETS`, or any other name, for any of the three kinds of inputs.
      folder: see the module's docstring.
      every: of text and sequences, labels at each position (the task next-token) in place of one after each window.
      in_files: keep inputs and labels in temporary memory-mapped files; LEAF's files are then read twice, one user at
        a time, and the numbers are the same.
      tokens: inputs of whole numbers are tokens.

    Raises:
      JaxpflError: no such files, no JSON, a user without data or with data twice, inputs and labels that do not
        fit each other or other users', inputs of no known kind.
    """
    expected, classes, description = LEAF_SETS.get(name, (None, None, f"LEAF files in {folder}"))
    train_folder, test_folder = locate(name, folder)
    folders = {part: f for part, f in (("train", train_folder), ("test", test_folder)) if f is not None}
    users: dict[str, Iterable[User]] = {part: Part(f) if in_files else read_part(f) for part, f in folders.items()}
    surveys = {part: survey(users[part], folders[part]) for part in users}
    kind = surveys["train"].kind
    if expected not in (None, kind):
        raise JaxpflError(f"{train_folder}: holds {kind}, but {name!r} is {expected}")
    if every and kind == "images":
        raise JaxpflError(f"{train_folder}: holds {kind}, and the task next-token is of text or sequences")
    encode = partial(_numbers, tokens=tokens)
    if kind == "text":
        encode = leaf_text.encode_runs if every else leaf_text.encode_characters
        classes = len(leaf_text.ALL_LETTERS)
    elif kind == "sequences":
        tallies = [found.tally for found in surveys.values()]
        vocabulary, length = leaf_text.vocabulary_of(folder, tallies[0]), max(tally.longest for tally in tallies)
        if not in_files:
            rows = sum(tally.sequences if every else tally.places for tally in tallies)
            leaf_text.check_windows(rows, length, folder)
        encode = partial(leaf_text.windows, vocabulary=vocabulary, length=length, every=every)
        classes = vocabulary.size
    names = sorted(set().union(*(found.names for found in surveys.values())))
    encoded = {part: _concatenate(users[part], encode, names, train_folder.parent / part, in_files) for part in users}
    holders = np.unique(np.concatenate([part.users for part in encoded.values()]))
    everyone = set(names).union(*(found.empty for found in surveys.values()))
    warn_of_empty(folder, everyone.difference(names[i] for i in holders))
    source = _source(name, encoded, names, classes, description, train_folder)
    return source._replace(task="next-token") if every else source


def leaf_entries(root: Path) -> list[Entry]:
    """Lines of ``jaxpfl data list`` for `LEAF_SETS`. Looks for files; reads none."""

    def describe(name: str) -> str:
        return f"{LEAF_SETS[name][2]}: {locate(name, root / name)[0].parent}"

    return [entry(name, partial(describe, name)) for name in LEAF_SETS]


def _source(
    name: str, encoded: dict[str, _Encoded], names: list[str], classes: int | None, description: str, folder: Path
) -> Source:
    train, test = encoded["train"], encoded.get("test")
    inputs: Inputs = "tokens" if np.issubdtype(train.x.dtype, np.integer) else "features"
    largest, own = max(int(part.y.max(initial=0)) for part in encoded.values()), None
    if classes is None and inputs != "tokens":
        own = class_names(*(part.y for part in encoded.values()))
        largest = len(own) - 1
    if own is not None and own[-1] > largest:
        train = train._replace(y=renumbered(train.y, own, folder))
        test = None if test is None else test._replace(y=renumbered(test.y, own, folder))
    if classes is not None and largest >= classes:
        raise JaxpflError(f"{folder}: label {largest}, but the data set has {classes} classes")
    if test is not None and test.x.shape[1:] != train.x.shape[1:]:
        raise JaxpflError(f"{folder}: test inputs are {test.x.shape[1:]} but training inputs {train.x.shape[1:]}")
    if test is not None and test.x.dtype != train.x.dtype:
        raise JaxpflError(f"{folder}: test inputs are {test.x.dtype} but training inputs {train.x.dtype}")
    if inputs == "features" and train.x.shape[1:] != _IMAGE:
        wide = lost_digits(train.x) is not None
        train = train._replace(x=narrowed(train.x, wide=wide))
        test = None if test is None else test._replace(x=narrowed(test.x, wide=wide))
    elif inputs == "features":
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
        class_names=None if own is None else unlike_numbers(own),
    )


def survey(users: Iterable[User], folder: Path) -> Survey:
    """Look at all users of a part once.

    Args:
      users: of the part.
      folder: for messages.

    Raises:
      JaxpflError: if no user has an example, or the inputs of the first one by name are of no known kind.
    """
    names, empty, tally, first = set[str](), set[str](), leaf_text.Tally(), None
    for user, x, y in users:
        (names if len(y) else empty).add(user)
        if len(y):
            if first is None or user < first[0]:
                first = user, x[0], y[0], isinstance(x, np.ndarray)
            if isinstance(x, list):
                tally.add(x)
    if first is None:
        raise JaxpflError(f"{folder}: no user has an example")
    return Survey(names, empty, kind_of(*first[1:], folder), tally)


def kind_of(x: Any, y: Any, is_array: bool, folder: Path) -> str:
    """Detect the kind of inputs from one example: "images", "text" or "sequences".

    In "images" a user's inputs are an array [n, ...]; in "text" x is a string and y the character that follows it; in
    "sequences" x is a list of tokens and y has ``target_tokens``.

    Args:
      x, y: the example.
      is_array: whether its user's inputs are an array.
      folder: for messages.

    Raises:
      JaxpflError: for any other kind.
    """
    if is_array:
        return "images"
    if isinstance(x, str) and isinstance(y, str) and len(y) == 1:
        return "text"
    if isinstance(x, list) and isinstance(y, dict) and "target_tokens" in y:
        return "sequences"
    raise JaxpflError(
        f"{folder}: inputs such as {str(x)[:30]!r} are neither numbers, nor characters with the next one, "
        "nor token sequences with 'target_tokens'"
    )


def _numbers(x: Any, y: Any, whose: str, *, tokens: bool) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(x, np.ndarray):
        raise JaxpflError(f"{whose}: inputs must be numbers, as the other users' are")
    if any(isinstance(label, float) for label in y):
        raise no_classes(f"{whose}: labels", np.dtype(float))
    if not all(type(label) is int and 0 <= label <= LARGEST for label in y):
        raise JaxpflError(f"{whose}: labels must be integers >= 0, at most {LARGEST}")
    if tokens and not np.issubdtype(x.dtype, np.integer):
        raise JaxpflError(f"{whose}: tokens are whole numbers, got {x.dtype}")
    kept = x.dtype if tokens else np.float32 if x.shape[1:] == _IMAGE else np.float64  # until all users are known
    return x.astype(kept, copy=False), np.array(y, np.int32)


def _concatenate(users: Iterable[User], encode: Any, names: list[str], folder: Path, in_files: bool) -> _Encoded:
    """All users' examples in the order of their names, ignoring users without any."""
    x, y = mapped.Growing(in_files), mapped.Growing(in_files)
    counts: dict[str, int] = {}
    usual: Any = None
    unlike: dict[str, Any] = {}
    for user, own_x, own_y in users:
        if len(own_y):
            own_x, own_y = encode(own_x, own_y, whose=f"{folder}: user {shown(user)}")
            counts[user], found = len(own_y), (own_x.shape[1:], own_x.dtype)
            usual = usual or found
            if found == usual:
                x.append(own_x)
                y.append(own_y)
            else:
                unlike[user] = found
    if unlike:
        first, *others = sorted(counts)
        expected = unlike.get(first, usual)
        user = next(other for other in others if unlike.get(other, usual) != expected)
        (shape, dtype), (wanted, kind) = unlike.get(user, usual), expected
        raise JaxpflError(
            f"{folder}: user {shown(user)}: one input is {shape} of {dtype}, others are {wanted} of {kind}"
        )
    place = {name: i for i, name in enumerate(names)}
    own, size = np.array([place[user] for user in counts], np.int32), np.array(list(counts.values()))
    order = np.argsort(own)
    encoded = _Encoded(x.whole(), y.whole(), np.repeat(own[order], size[order]))
    if (order == np.arange(len(order))).all():
        return encoded
    starts = (np.cumsum(size) - size)[order]
    places = np.arange(len(encoded.y)) + np.repeat(starts - (np.cumsum(size[order]) - size[order]), size[order])
    return encoded._replace(x=mapped.gathered(encoded.x, places), y=mapped.gathered(encoded.y, places))
