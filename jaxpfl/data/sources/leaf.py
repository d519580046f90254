"""LEAF's JSON files (Caldas et al. 2018, "LEAF: A Benchmark for Federated Settings"): data sets with users.

A folder contains ``train`` and ``test`` (or ``data/train`` and ``data/test``, as in LEAF's repository), each with
one or more files ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}``. A folder
without ``test``, such as ``all_data``, has no official test set. All files are read into memory. The kind of inputs is
detected from the first example:

- "images": numbers (FEMNIST, synthetic) become float32, or float64 if float32 loses digits; 784 numbers become an image
  [28, 28, 1];
- "text": strings of characters and their next characters (Shakespeare) become tokens, as defined by `ALL_LETTERS`;
- "sequences": sequences of tokens (Reddit) are converted as described in `windows`.

For classification, each example has one label; in LEAF's Shakespeare, the label is the token that follows a window of
context. For next-token prediction, an example has a label at each position, and -1 means no label.

Only ``train`` and ``test`` are read. Reddit's folder ``val`` is not; to hold out validation examples, use
``validation_share``. ``num_samples`` is not read, because it is wrong in LEAF's own Shakespeare test files: LEAF's
``split_data.py`` leaves out the 79 examples that overlap the training text, but counts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxpfl.core.types import NO_LABEL
from jaxpfl.data.labels import check_finite, digit_loss, narrowed, number_classes, unlike_numbers
from jaxpfl.data.sources.base import Source, no_classes, one_line, warn_of_empty, where_to_put_it
from jaxpfl.data.sources.pickles import read_pickle
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, shown
from jaxpfl.support.files import check_fits, contents

LEAF_SETS = {
    "femnist": ("images", 62, "FEMNIST, handwritten characters by their writers, 62 classes (LEAF)"),
    "shakespeare": ("text", 80, "Shakespeare, the next of 80 characters, by speaking role (LEAF)"),
    "reddit": ("sequences", None, "Reddit, the next word of comments, by author (LEAF)"),
}
"""Sets known by name, each with the kind of inputs, the number of classes, and one line for display."""

ALL_LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's alphabet of 80 characters; a character's token is its index."""

PAD, UNKNOWN = 0, 1
"""Tokens for padding and for words outside the vocabulary, as in LEAF."""

MOST_WORDS = 10_000
"""Size of LEAF's vocabulary, including `PAD` and `UNKNOWN`."""

_VOCABULARY_FILE = "reddit_vocab.pck"
_IMAGE = (784,)
_ASCII = 128
_LARGEST = 2**31 - 1
_MEMORY = 8  # memory of parsed JSON (Python numbers and lists), relative to the file's length

Users: TypeAlias = dict[str, tuple[Any, list]]
"""Inputs and labels of each user, by name, as in the files; numeric inputs are arrays."""


class Tally(NamedTuple):
    """Counts over users' sequences of tokens.

    Attributes:
      tokens: number of occurrences of each word or token.
      longest: length of the longest sequence (LEAF pads all sequences to 10).
      sequences: number of sequences.
      places: total number of tokens (positions) in all sequences.
    """

    tokens: Counter[str | int]
    longest: int
    sequences: int
    places: int


class Vocabulary(NamedTuple):
    """Words and their tokens; ``words`` is None if the files already contain tokens."""

    words: dict[str, int] | None
    size: int

    def tokens(self, sequence: list, whose: str) -> np.ndarray:
        """Convert a sequence of words or tokens to tokens, [n] int32.

        Raises:
          JaxpflError: if a token in the files is not an integer in 0 .. size - 1.
        """
        if self.words is None:
            if any(not isinstance(token, int) or not 0 <= token < self.size for token in sequence):
                raise JaxpflError(f"{whose}: tokens must be integers from 0 to {self.size - 1}")
            return np.array(sequence, np.int32)
        known = [self.words.get(word, UNKNOWN) if isinstance(word, str) else UNKNOWN for word in sequence]
        return np.array(known, np.int32)


class _Encoded(NamedTuple):
    x: np.ndarray
    y: np.ndarray
    users: np.ndarray


def load_leaf(name: str, folder: Path, *, every: bool = False, tokens: bool = False) -> Source:
    """Load a data set in LEAF's format.

    Args:
      name: name of the data set. For a name in `LEAF_SETS`, the inputs must be of the known kind; for other names, all
        three kinds are allowed.
      folder: folder of the files, as described in the module's docstring.
      every: whether each position of text and sequences gets a label (for next-token prediction). Otherwise only the
        end of each window gets one.
      tokens: whether to treat integer inputs as tokens.

    Raises:
      JaxpflError: if files are missing or not JSON; if a user has no data, or data in two files; if inputs do not match
        their labels or other users' inputs; or if inputs are of an unknown kind.
    """
    expected, classes, description = LEAF_SETS.get(name, (None, None, f"LEAF files in {folder}"))
    train_folder, test_folder = locate(name, folder)
    users = {"train": read_users(train_folder)} | ({} if test_folder is None else {"test": read_users(test_folder)})
    kind = kind_of(users["train"], train_folder)
    if expected not in (None, kind):
        raise JaxpflError(f"{train_folder} contains {kind}, but {name!r} requires {expected}")
    if every and kind == "images":
        raise JaxpflError(f"{train_folder} contains {kind}, but the task 'next-token' requires text or sequences")
    encode: Callable[..., Any] = partial(_numbers, tokens=tokens)
    if kind == "text":
        encode, classes = partial(encode_text, every=every), len(ALL_LETTERS)
    elif kind == "sequences":
        tallies = [tally(own) for own in users.values()]
        vocabulary, length = vocabulary_of(folder, tallies[0]), max(found.longest for found in tallies)
        check_windows(sum(found.sequences if every else found.places for found in tallies), length, folder)
        encode, classes = partial(windows, vocabulary=vocabulary, length=length, every=every), vocabulary.size
    names = sorted({user for own in users.values() for user, (_, y) in own.items() if y})
    parts: dict[str, _Encoded] = {}
    for part, own in users.items():
        parts[part] = _concatenate(own, encode, names, train_folder.parent / part, parts.get("train"))
    holders = {names[i] for part in parts.values() for i in np.unique(part.users)}
    warn_of_empty(folder, set().union(*users.values()) - holders)
    parts, classes, own = _number_labels(parts, classes, train_folder)
    train = parts["train"]
    are_tokens, are_images = np.issubdtype(train.x.dtype, np.integer), train.x.shape[1:] == _IMAGE
    if are_images and not are_tokens:
        parts = {part: own_part._replace(x=own_part.x.reshape(-1, 28, 28, 1)) for part, own_part in parts.items()}
    elif not are_tokens:
        wide = digit_loss(train.x) is not None
        parts = {part: own_part._replace(x=narrowed(own_part.x, wide=wide)) for part, own_part in parts.items()}
    x, y, who = ({part: getattr(found, field) for part, found in parts.items()} for field in _Encoded._fields)
    description = f"{description}; {len(names)} users"
    source = Source(name, x["train"], y["train"], x.get("test"), y.get("test"), classes, description, class_names=own)
    source = source._replace(task="next-token" if every else "classification", user_names=np.array(names))
    inputs = "tokens" if are_tokens else "pixels" if are_images else "features"
    return source._replace(inputs=inputs, users_train=who["train"], users_test=who.get("test"))


def describe_leaf(name: str, root: Path) -> str:
    """Describe one of `LEAF_SETS`, after locating its files without reading them."""
    return f"{LEAF_SETS[name][2]}: {locate(name, root / name)[0].parent}"


def locate(name: str, folder: Path) -> tuple[Path, Path | None]:
    """Return the folder of the training files, and the folder of the test files or None if there are none."""
    for base in (folder, folder / "data"):
        if _files(base / "train"):
            return base / "train", base / "test" if _files(base / "test") else None
    for base in (folder, folder / "all_data", folder / "data" / "all_data"):
        if _files(base):
            return base, None
    raise JaxpflError(f"data set {name!r} has no LEAF file (*.json) in {folder / 'train'}: {where_to_put_it()}")


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix == ".json") if folder.is_dir() else []


def read_users(folder: Path) -> Users:
    """Read the users in a folder's files, sorted by name.

    The result does not depend on the order of the users, or on their division into files.

    Raises:
      JaxpflError: if a file is damaged; if the files do not fit into memory; if a user is in two files; or if no user
        has an example.
    """
    check_fits(folder, _MEMORY * sum(file.stat().st_size for file in _files(folder)))
    origin: dict[str, Path] = {}
    users: Users = {}
    for file in _files(folder):
        for user, own in _read(file).items():
            if user in origin:
                raise JaxpflError(
                    f"user {shown(user)} is in {origin[user]} and in {file}: delete the files of earlier preprocessing"
                )
            origin[user], users[user] = file, _read_user(own, f"{file}: user {shown(user)}")
    if not any(y for _, y in users.values()):
        raise JaxpflError(f"{folder}: none of the users has any examples")
    return dict(sorted(users.items()))


def _read(file: Path) -> dict[str, Any]:
    """Return the data of a file's users, by name."""
    try:
        content = files.parse_json(contents(file))
    except (ValueError, RecursionError) as error:
        raise JaxpflError(f"{file} is truncated or not valid JSON: {one_line(error)}") from error
    data = content.get("user_data") if isinstance(content, dict) else None
    if not isinstance(data, dict):
        raise JaxpflError(f"{file} is not a LEAF file: it has no 'user_data'")
    listed = content.get("users")
    names = set(map(str, listed)) if isinstance(listed, list) else data.keys()
    for user in sorted(names - data.keys()):
        raise JaxpflError(f"{file}: user {shown(user)} is listed but has no data")
    for user in sorted(data.keys() - names):
        raise JaxpflError(
            f"{file}: user {shown(user)} has data but is not listed in 'users': add it there, or delete it"
        )
    return data


def _read_user(own: Any, whose: str) -> tuple[Any, Any]:
    x, y = (own.get("x"), own.get("y")) if isinstance(own, dict) else (None, None)
    if isinstance(y, dict) and all(isinstance(values, list) for values in y.values()):
        # Convert a dictionary of lists, for all of a user's examples, to a list with a dictionary for each example.
        y = [dict(zip(y, values, strict=False)) for values in zip(*y.values(), strict=False)]
    if not isinstance(x, list) or not isinstance(y, list):
        raise JaxpflError(f"{whose} must have lists 'x' and 'y'")
    if len(x) != len(y):
        raise JaxpflError(f"{whose}: {len(x)} inputs but {len(y)} labels")
    if x and isinstance(x[0], list) and x[0] and isinstance(x[0][0], int | float) and not isinstance(y[0], dict):
        return _array(x, whose), y  # converted at once, because Python numbers take ten times the memory
    return x, y


def _array(x: list, whose: str) -> np.ndarray:
    """Convert inputs to an array of int32 or float64."""
    try:
        array = np.asarray(x)
        integers = np.issubdtype(array.dtype, np.integer)
        if integers and array.size and not (array.min() >= -_LARGEST - 1 and array.max() <= _LARGEST):
            raise ValueError(f"integers from {array.min()} to {array.max()} do not fit in 32 bits")
        array = array.astype(np.int32 if integers else np.float64, casting="same_kind")
    except (ValueError, TypeError, OverflowError) as error:
        raise JaxpflError(f"{whose}: inputs must be numbers, in lists of equal length ({one_line(error)})") from None
    if array.size == 0:
        raise JaxpflError(f"{whose}: inputs must contain at least one number, got shape {array.shape}")
    check_finite(array, whose)
    return array


def kind_of(users: Users, folder: Path) -> str:
    """Return the kind of the first example: "images" (numbers), "text" or "sequences".

    Raises:
      JaxpflError: if the example is of another kind.
    """
    x, label = next((x, y[0]) for x, y in users.values() if y)
    if isinstance(x, np.ndarray):
        return "images"
    if isinstance(x[0], str) and isinstance(label, str) and len(label) == 1:
        return "text"
    if isinstance(x[0], list) and isinstance(label, dict) and "target_tokens" in label:
        return "sequences"
    raise JaxpflError(
        f"{folder}: inputs such as {str(x[0])[:30]!r} are neither numbers, nor text labeled with its next character, "
        "nor token sequences with 'target_tokens'"
    )


def _concatenate(
    users: Users, encode: Callable[..., Any], names: list[str], folder: Path, usual: _Encoded | None
) -> _Encoded:
    """Encode the examples of all users and concatenate them in the order of ``names``.

    Args:
      users: examples of each user by name.
      encode: function that encodes the inputs and labels of one user.
      names: names of the users; a user's index in this list is stored with each of the user's examples.
      folder: folder of the files, for error messages.
      usual: encoded examples whose shape and dtype all inputs must have; by default, the first user's examples.

    Raises:
      JaxpflError: if a user's inputs have another shape or dtype.
    """
    parts: list[_Encoded] = []
    for number, name in enumerate(names):
        own_x, own_y = users.get(name, ([], []))
        if not own_y:
            continue
        x, y = encode(own_x, own_y, whose=f"{folder}: user {shown(name)}")
        parts.append(_Encoded(x, y, np.full(len(y), number, np.int32)))
        usual = usual or parts[0]
        if (x.shape[1:], x.dtype) != (usual.x.shape[1:], usual.x.dtype):
            raise JaxpflError(
                f"{folder}: user {shown(name)}: one input has shape {x.shape[1:]} and type {x.dtype}, "
                f"but others have {usual.x.shape[1:]} and {usual.x.dtype}"
            )
    return _Encoded(*map(np.concatenate, zip(*parts, strict=True)))


def _number_labels(
    parts: dict[str, _Encoded], classes: int | None, folder: Path
) -> tuple[dict[str, _Encoded], int, np.ndarray | None]:
    """Convert the labels of the training and test parts to 0 .. classes - 1.

    Also return the number of classes and the original label of each class. The latter is None if labels are tokens or
    were already numbered.
    """
    largest = max(int(part.y.max(initial=0)) for part in parts.values())
    if classes is not None and largest >= classes:
        raise JaxpflError(f"{folder}: label {largest} is too large: the data set has {classes} classes")
    if classes is not None or np.issubdtype(parts["train"].x.dtype, np.integer):
        return parts, classes or largest + 1, None
    y, own = number_classes({name: part.y for name, part in parts.items()})
    return {name: part._replace(y=y[name]) for name, part in parts.items()}, len(own), unlike_numbers(own)


def _numbers(x: Any, y: Any, whose: str, *, tokens: bool) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(x, np.ndarray):
        raise JaxpflError(f"{whose}: inputs must be numbers, like those of the other users")
    if any(isinstance(label, float) for label in y):
        raise no_classes(f"{whose}: labels", np.dtype(float))
    if not all(type(label) is int and 0 <= label <= _LARGEST for label in y):
        raise JaxpflError(f"{whose}: labels must be integers from 0 to {_LARGEST}")
    if tokens and not np.issubdtype(x.dtype, np.integer):
        raise JaxpflError(f"{whose}: tokens must be integers, got {x.dtype}")
    kept = x.dtype if tokens else np.float32 if x.shape[1:] == _IMAGE else np.float64  # `load_leaf` narrows float64
    return x.astype(kept, copy=False), np.array(y, np.int32)


def encode_text(x: list, y: list, whose: str, *, every: bool) -> tuple[np.ndarray, np.ndarray]:
    """Encode strings of one length, and the character after each string, as tokens of `ALL_LETTERS`.

    LEAF writes one string of length L for each position of a speech, so that consecutive strings overlap in L - 1
    characters. If ``every`` is true, each position of a string has a label, so only every L-th string of a speech and
    its last string are kept. The last string has labels only at positions that no earlier string covers, so that no
    character is predicted twice.

    Returns:
      Inputs [n, L] int32 (L = 80 in LEAF) and labels [n] int32; with ``every``, labels [n, L] int32, -1 for no label.

    Raises:
      JaxpflError: if inputs are not strings of the same length, or a character is not in LEAF's alphabet.
    """
    if any(not isinstance(text, str) for text in x) or any(not isinstance(c, str) or len(c) != 1 for c in y):
        raise JaxpflError(f"{whose}: inputs must be strings and labels must be single characters")
    lengths = {len(text) for text in x}
    if len(lengths) > 1 or lengths == {0}:
        raise JaxpflError(f"{whose}: inputs must be equally long, got {min(lengths)} to {max(lengths)} characters")
    inputs, following = _codes("".join(x), whose).reshape(len(x), -1), _codes("".join(y), whose)
    if not every:
        return inputs, following
    labels = np.concatenate([inputs[:, 1:], following[:, None]], axis=1)
    length = inputs.shape[1]
    starts = np.flatnonzero(np.append(True, (labels[:-1] != inputs[1:]).any(axis=1)))
    kept: list[int] = []
    fresh: list[int] = []  # for each kept string, the number of labeled positions, which are at its end
    for start, end in zip(starts, np.append(starts[1:], len(inputs)), strict=True):
        whole = range(start, end, length)
        kept += whole
        fresh += [length] * len(whole)
        if (rest := end - 1 - whole[-1]) > 0:
            kept.append(end - 1)
            fresh.append(rest)
    counted = np.arange(length) >= length - np.array(fresh)[:, None]
    return inputs[kept], np.where(counted, labels[kept], NO_LABEL).astype(np.int32)


def tally(users: Users) -> Tally:
    """Count the tokens in users' sequences; the counts are zero for other kinds of inputs."""
    comments = (comment for x, _ in users.values() if isinstance(x, list) for comment in x)
    sequences = [sequence for comment in comments for sequence in _sequences(comment)]
    tokens = Counter(token for sequence in sequences for token in sequence if isinstance(token, str | int))
    lengths = [len(sequence) for sequence in sequences]
    return Tally(tokens, max(lengths, default=0), len(lengths), sum(lengths))


def vocabulary_of(folder: Path, training: Tally) -> Vocabulary:
    """Read the vocabulary of a folder from LEAF's file, or compute it from the training words if there is no file.

    The file is ``vocab/reddit_vocab.pck`` or ``reddit_vocab.pck``. A computed vocabulary has the most frequent words,
    as in LEAF's ``build_vocab.py``; equally frequent words are in alphabetical order.

    Args:
      folder: folder of the data set.
      training: counts over the users' training inputs.
    """
    for file in (folder / "vocab" / _VOCABULARY_FILE, folder / _VOCABULARY_FILE):
        if file.is_file():
            return _read_vocabulary(file)
    counts = training.tokens
    numbers = [token for token in counts if isinstance(token, int)]
    if len(numbers) == len(counts):
        largest = max(numbers, default=0)
        if largest >= _LARGEST:
            raise JaxpflError(f"{folder}: tokens must be integers from 0 to {_LARGEST - 1}, got {str(largest)[:20]}")
        return Vocabulary(None, largest + 1)
    words = {word: count for word, count in counts.items() if isinstance(word, str) and word != "<PAD>"}
    frequent = sorted(words, key=lambda word: (-words[word], word))[: MOST_WORDS - 2]
    table = {"<PAD>": PAD, "<UNK>": UNKNOWN}
    table |= {word: i for i, word in enumerate((w for w in frequent if w not in table), start=2)}
    return Vocabulary(table, len(table))


def check_windows(places: int, length: int, folder: Path) -> None:
    """Check that windows, each as long as the longest sequence, fit in memory.

    Args:
      places: number of windows.
      length: number of tokens in a window.
      folder: folder of the data set, for the message.

    Raises:
      JaxpflError: if the windows do not fit.
    """
    check_fits(f"{folder} ({places} windows as long as the longest sequence, {length} tokens)", 8 * places * length)


def windows(
    x: list, y: list, whose: str, vocabulary: Vocabulary, length: int, every: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Convert one user's comments to examples for the prediction of the next token.

    LEAF cuts a comment into sequences of 10 tokens and predicts the next token (the target) at every position. Here,
    every position becomes a separate example: its input is the sequence up to this position, padded with `PAD` in
    front, and its label is the target. Positions whose target is padding or an unknown word are left out, because there
    is nothing to predict (LEAF counts such predictions as wrong). If ``every`` is true, an example is instead a whole
    sequence, padded at the end, with one label per position.

    Args:
      x: comments, each a list of sequences (or one sequence) of words or tokens.
      y: one dictionary per comment. ``target_tokens`` has the shape of the comment. If ``count_tokens`` is present, it
        has this shape too, and is 0 where a sequence is padded.
      whose: name of the user, for error messages.
      vocabulary: tokens of the words.
      length: number of tokens in a window, which is the length of the longest sequence.
      every: whether to label each position of a sequence.

    Returns:
      Inputs [n, length] int32 and labels [n] int32; with ``every``, labels [n, length] int32, -1 for no label.
    """
    contexts, labels = [np.zeros((0, length), np.int32)], [np.zeros((0, length) if every else 0, np.int32)]
    for sequence, target, counted in _aligned(x, y, whose):
        context, goal = vocabulary.tokens(sequence, whose), vocabulary.tokens(target, whose)
        wanted = (goal != PAD) & (goal != UNKNOWN) & counted
        ends = np.flatnonzero(wanted)
        if not every:
            padded = np.concatenate([np.full(length, PAD, np.int32), context])
            contexts.append(padded[ends[:, None] + 1 + np.arange(length)])
            labels.append(goal[ends])
        elif len(ends):
            behind = (0, length - len(goal))
            contexts.append(np.pad(context, behind, constant_values=PAD)[None])
            labels.append(np.pad(np.where(wanted, goal, NO_LABEL), behind, constant_values=NO_LABEL)[None])
    return np.concatenate(contexts), np.concatenate(labels).astype(np.int32)


def _aligned(x: list, y: list, whose: str) -> Iterator[tuple[list, list, np.ndarray]]:
    """Iterate over the sequences of a user's comments, their targets, and masks that are false at padding."""
    for comment, label in zip(x, y, strict=True):
        targets = label.get("target_tokens") if isinstance(label, dict) else None
        if not isinstance(comment, list) or not isinstance(targets, list):
            raise JaxpflError(f"{whose}: inputs must be lists of sequences, and labels must have lists 'target_tokens'")
        counts = label.get("count_tokens")
        rows = [_sequences(part) for part in (comment, targets, comment if counts is None else counts)]
        if len({tuple(map(len, part)) for part in rows}) > 1 or (comment and not rows[0]):
            raise JaxpflError(f"{whose}: inputs, target_tokens and any count_tokens must be sequences of equal lengths")
        for sequence, target, own in zip(*rows, strict=True):
            if counts is not None and not all(isinstance(count, int | float) for count in own):
                raise JaxpflError(f"{whose}: count_tokens must be numbers")
            yield sequence, target, np.array([counts is None or count != 0 for count in own], bool)


def _sequences(comment: Any) -> list[list]:
    """Return the sequences of a comment: a list of sequences, or one sequence. Other values give []."""
    if not isinstance(comment, list):
        return []
    nested = [isinstance(part, list) for part in comment]
    return comment if all(nested) else [] if any(nested) else [comment]


def _read_vocabulary(file: Path) -> Vocabulary:
    content = read_pickle(file)
    content = {_text(key): value for key, value in content.items()} if isinstance(content, dict) else {}
    words, size = content.get("vocab"), content.get("size")
    if not isinstance(words, dict) or not isinstance(size, int) or not 0 < size < _LARGEST:
        raise JaxpflError(
            f"{file} is not a LEAF vocabulary: it must have a dictionary 'vocab' and a positive integer 'size'"
        )
    table = {_text(word): token for word, token in words.items()}
    if any(not isinstance(token, int) or not 0 <= token < size for token in table.values()):
        raise JaxpflError(f"{file}: its tokens must be integers from 0 to {size - 1}")
    return Vocabulary(table, size)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _codes(text: str, whose: str) -> np.ndarray:
    table = np.full(_ASCII, -1, np.int32)  # index 127 (DEL) is not a letter, and is also used for higher codes
    table[[ord(letter) for letter in ALL_LETTERS]] = np.arange(len(ALL_LETTERS))
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    codes = table[np.minimum(points, _ASCII - 1)]
    if (codes < 0).any():
        wrong = text[int(np.argmin(codes))]
        raise JaxpflError(f"{whose}: the character {wrong!r} is not in LEAF's alphabet of {len(ALL_LETTERS)}")
    return codes
