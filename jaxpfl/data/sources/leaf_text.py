"""Tokenisation of LEAF's text: characters of Shakespeare, words of Reddit.

A classification has one label per example, as in LEAF's Shakespeare: a window of context, and the one token that
follows it. For the task next-token an example has a label at each of its positions, -1 where there is none.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.core.types import NO_LABEL
from jaxpfl.data.sources.pickles import read_pickle
from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.files import check_fits

ALL_LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's alphabet of 80 characters; a character's token is its index."""

PAD, UNKNOWN = 0, 1
"""The tokens of padding and of words outside the vocabulary, as in LEAF."""

MOST_WORDS = 10_000
"""The size of LEAF's vocabulary, `PAD` and `UNKNOWN` included."""

_VOCABULARY_FILE = "reddit_vocab.pck"
_ASCII = 128
_LARGEST = 2**31 - 2


class Vocabulary(NamedTuple):
    """Words and their tokens; ``words`` is None if the files already hold tokens."""

    words: dict[str, int] | None
    size: int

    def tokens(self, sequence: list, whose: str) -> list[int]:
        if self.words is not None:
            return [self.words.get(word, UNKNOWN) if isinstance(word, str) else UNKNOWN for word in sequence]
        if any(not isinstance(token, int) or not 0 <= token < self.size for token in sequence):
            raise JaxpflError(f"{whose}: tokens must be integers in 0 .. {self.size - 1}")
        return sequence


def encode_characters(x: list, y: list, whose: str) -> tuple[np.ndarray, np.ndarray]:
    """Encode strings of one length, and the character after each, as tokens of `ALL_LETTERS`.

    Returns:
      [n, length] int32 (80 in LEAF), [n] int32.

    Raises:
      JaxpflError: for inputs other than strings, strings of several lengths, or a character outside LEAF's alphabet.
    """
    if any(not isinstance(text, str) for text in x) or any(not isinstance(c, str) or len(c) != 1 for c in y):
        raise JaxpflError(f"{whose}: needs strings as inputs and single characters as labels")
    lengths = {len(text) for text in x}
    if len(lengths) > 1 or lengths == {0}:
        raise JaxpflError(f"{whose}: strings of {min(lengths)} to {max(lengths)} characters; all must be of one length")
    inputs = _codes("".join(x), whose).reshape(len(x), -1)
    return inputs, _codes("".join(y), whose)


def encode_runs(x: list, y: list, whose: str) -> tuple[np.ndarray, np.ndarray]:
    """Encode strings with the character after each of their own, as tokens of `ALL_LETTERS`.

    LEAF's strings of a speech follow each other by one character. Of such a run every L-th string is kept, L their
    length, and its last one: there the characters that others have as labels have none, so that each counts once.

    Returns:
      [n, L] int32 (80 in LEAF), [n, L] int32 with -1 for no label.

    Raises:
      JaxpflError: as `encode_characters`.
    """
    inputs, following = encode_characters(x, y, whose)
    labels = np.concatenate([inputs[:, 1:], following[:, None]], axis=1)
    length = inputs.shape[1]
    starts = np.flatnonzero(np.append(True, (labels[:-1] != inputs[1:]).any(axis=1)))
    kept: list[int] = []
    fresh: list[int] = []  # number of labels of each, its last ones
    for start, end in zip(starts, np.append(starts[1:], len(inputs)), strict=True):
        whole = range(start, end, length)
        kept += whole
        fresh += [length] * len(whole)
        if (rest := end - 1 - whole[-1]) > 0:
            kept.append(end - 1)
            fresh.append(rest)
    counted = np.arange(length) >= length - np.array(fresh)[:, None]
    return inputs[kept], np.where(counted, labels[kept], NO_LABEL).astype(np.int32)


class Tally:
    """Counts over users' inputs that must be known before the first of them is converted.

    Attributes:
      tokens: the number of occurrences of each word or token.
      longest: length of the longest sequence (LEAF pads all to 10).
      sequences: their number.
      places: tokens of all sequences together.
    """

    def __init__(self) -> None:
        self.tokens: Counter[str | int] = Counter()
        self.longest = self.sequences = self.places = 0

    def add(self, comments: list) -> None:
        """Count one user's inputs."""
        for sequence in (s for comment in comments for s in _sequences(comment)):
            self.tokens.update(token for token in sequence if isinstance(token, str | int))
            self.longest = max(self.longest, len(sequence))
            self.sequences += 1
            self.places += len(sequence)


def vocabulary_of(folder: Path, training: Tally) -> Vocabulary:
    """Vocabulary of a folder: LEAF's file if there is one, otherwise built from the training words.

    The file is ``vocab/reddit_vocab.pck`` or ``reddit_vocab.pck``. Without it the vocabulary is that of LEAF's
    ``build_vocab.py``: the most frequent words, ties alphabetically.

    Args:
      folder: of the data set.
      training: of the users' training inputs.
    """
    for file in (folder / "vocab" / _VOCABULARY_FILE, folder / _VOCABULARY_FILE):
        if file.is_file():
            return _read_vocabulary(file)
    counts = training.tokens
    numbers = [token for token in counts if isinstance(token, int)]
    if len(numbers) == len(counts):
        largest = max(numbers, default=0)
        if largest > _LARGEST:
            raise JaxpflError(f"{folder}: tokens must be integers in 0 .. {_LARGEST}, got {str(largest)[:20]}")
        return Vocabulary(None, largest + 1)
    words = {word: count for word, count in counts.items() if isinstance(word, str) and word != "<PAD>"}
    frequent = sorted(words, key=lambda word: (-words[word], word))[: MOST_WORDS - 2]
    table = {"<PAD>": PAD, "<UNK>": UNKNOWN}
    table |= {word: i for i, word in enumerate((w for w in frequent if w not in table), start=2)}
    return Vocabulary(table, len(table))


def check_windows(places: int, length: int, folder: Path) -> None:
    """Check that windows fit in memory: one long sequence makes those of all others as long.

    Args:
      places: tokens of all sequences.
      length: of a window.
      folder: for the message.

    Raises:
      JaxpflError.
    """
    check_fits(f"{folder} (windows of the longest sequence's {length} tokens at {places} places)", 8 * places * length)


def windows(
    x: list, y: list, whose: str, vocabulary: Vocabulary, length: int, every: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Convert one user's comments to (context, next token) examples.

    LEAF cuts a comment into sequences of 10 tokens and predicts the next token at every position. Here every position
    is a separate example: the sequence up to it, padded with `PAD` in front, and the target. Positions whose target is
    padding or an unknown word are left out: there is nothing to predict (LEAF counts them as wrong). With ``every`` an
    example is a sequence, padded behind, with its targets.

    Args:
      x: comments, each a list of sequences (or one sequence) of words or tokens.
      y: for each comment a dictionary with its ``target_tokens``, of the same shape, and optionally ``count_tokens``,
        0 where a sequence is padded.
      whose: for errors.
      vocabulary: the words' tokens.
      length: of a window, that of the longest sequence.
      every: a label at each position of a sequence.

    Returns:
      [n, length] int32, [n] int32; with ``every`` [n, length] int32, -1 where there is nothing to predict.
    """
    contexts, labels = [np.zeros((0, length), np.int32)], [np.zeros((0, length) if every else 0, np.int32)]
    for comment, label in zip(x, y, strict=True):
        targets = label.get("target_tokens") if isinstance(label, dict) else None
        if not isinstance(comment, list) or not isinstance(targets, list):
            raise JaxpflError(f"{whose}: every input must be a list of sequences, and its label hold 'target_tokens'")
        counts = label.get("count_tokens")
        rows = [_sequences(part) for part in (comment, targets, counts if counts is not None else comment)]
        if len({tuple(map(len, part)) for part in rows}) > 1 or (comment and not rows[0]):
            raise JaxpflError(f"{whose}: inputs, target_tokens and count_tokens must be shaped alike")
        for i, (sequence, target) in enumerate(zip(rows[0], rows[1], strict=True)):
            goal = np.array(vocabulary.tokens(target, whose), np.int32)
            wanted = (goal != PAD) & (goal != UNKNOWN)
            if counts is not None:
                if not all(isinstance(count, int | float) for count in rows[2][i]):
                    raise JaxpflError(f"{whose}: count_tokens must be numbers")
                wanted &= np.array([count != 0 for count in rows[2][i]], bool)
            ends = np.flatnonzero(wanted)
            if every:
                if len(ends):
                    behind = (0, length - len(goal))
                    contexts.append(np.pad(vocabulary.tokens(sequence, whose), behind, constant_values=PAD)[None])
                    labels.append(np.pad(np.where(wanted, goal, NO_LABEL), behind, constant_values=NO_LABEL)[None])
                continue
            padded = np.concatenate([np.full(length, PAD), vocabulary.tokens(sequence, whose)]).astype(np.int32)
            contexts.append(padded[ends[:, None] + 1 + np.arange(length)])
            labels.append(goal[ends])
    return np.concatenate(contexts).astype(np.int32), np.concatenate(labels).astype(np.int32)


def _sequences(comment: Any) -> list[list]:
    """Sequences of a comment, which may itself be one sequence; none if it is no list, or a mixed one."""
    if not isinstance(comment, list):
        return []
    nested = [isinstance(part, list) for part in comment]
    return comment if all(nested) else [] if any(nested) else [comment]


def _read_vocabulary(file: Path) -> Vocabulary:
    content = read_pickle(file)
    content = {_text(key): value for key, value in content.items()} if isinstance(content, dict) else {}
    words, size = content.get("vocab"), content.get("size")
    if not isinstance(words, dict) or not isinstance(size, int) or not 0 < size <= _LARGEST:
        raise JaxpflError(f"{file}: no 'vocab' and 'size' in it: not a vocabulary of LEAF")
    table = {_text(word): token for word, token in words.items()}
    if any(not isinstance(token, int) or not 0 <= token < size for token in table.values()):
        raise JaxpflError(f"{file}: its tokens must be integers in 0 .. {size - 1}")
    return Vocabulary(table, size)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _codes(text: str, whose: str) -> np.ndarray:
    table = np.full(_ASCII, -1, np.int32)  # the last character, DEL, is no letter: it represents all others too
    table[[ord(letter) for letter in ALL_LETTERS]] = np.arange(len(ALL_LETTERS))
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    codes = table[np.minimum(points, _ASCII - 1)]
    if (codes < 0).any():
        wrong = text[int(np.argmin(codes))]
        raise JaxpflError(f"{whose}: the character {wrong!r} is not in LEAF's alphabet of {len(ALL_LETTERS)}")
    return codes
