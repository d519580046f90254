"""Token counts from files: ``user,token,count`` text, the IRC users' archive, and LEAF's Reddit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np

from jaxpfl.data.sources import csv_text, leaf, leaf_files, leaf_text, token_counts
from jaxpfl.data.sources.base import data_directory, warn_of_empty, where_to_put_it
from jaxpfl.data.sources.npz import read_npz
from jaxpfl.data.sources.token_counts import TokenCounts, build
from jaxpfl.support import mapped
from jaxpfl.support.errors import JaxpflError, shown
from jaxpfl.support.files import check_fits

HEADER = ["user", "token", "count"]
_IRC_ARRAYS = ("indptr", "indices", "counts", "vocab")
_SEPARATORS: tuple[csv_text.Separator, ...] = ("tab", "semicolon", "bar", "comma")
_IRC = ("irc", "ubuntu_irc_user_counts.npz")
_MARKS = ("<BOS>", "<EOS>", "<PAD>", "<UNK>")
_MOST = 2**31 - 1
_ROWS = 2**15
"""Number of entries written to a file at once."""


def read_counts_csv(path: Path, encoding: str | None = None) -> TokenCounts:
    """Read counts from a CSV file with the columns ``user``, ``token`` and ``count``, one row per nonzero count.

    Columns may be in any order; cells are separated by commas, semicolons, tabs or bars; a leading column of row
    numbers is ignored. Users and tokens are numbered in order of first appearance. Rows are read one at a time.

    Raises:
      JaxpflError: if the file cannot be read, or has another header, a row without three cells, a count that is not a
        positive whole number, or a token of a user twice (with the line and the reason).
    """
    users: dict[str, int] = {}
    vocabulary: dict[str, int] = {}
    entries = _Entries()
    with csv_text.opened(path, encoding) as text:
        header, rows = _counts_rows(path, text)
        places = [header.index(name) for name in HEADER]
        for line, row in rows:
            where = f"{path} line {line}"
            if len(row) != len(header) or not row[places[0]] or not row[places[1]]:
                raise JaxpflError(f"{where}: needs a user, a token and a count, got {','.join(row)[:60]!r}")
            user, token, count = (row[place] for place in places)
            if not (count.isascii() and count.isdigit() and 0 < int(count.lstrip("0")[:12] or "0") <= _MOST):
                raise JaxpflError(f"{where}: count must be a whole number in 1 .. {_MOST}, got {count[:30]!r}")
            pair = users.setdefault(user, len(users)), vocabulary.setdefault(token, len(vocabulary))
            entries.add(*pair, int(count.lstrip("0")), line)
    if not len(entries):
        raise JaxpflError(f"{path}: a header, and no counts below it")
    made = entries.counts(np.array(list(users)), np.array(list(vocabulary)))
    if token_counts.repeated(made).any():
        row, token, line = entries.first_again(len(vocabulary))
        user, word = list(users)[row], list(vocabulary)[token]
        where = f"{path} line {line}"
        raise JaxpflError(f"{where}: user {shown(user)} has the token {shown(word)} twice: add the counts up")
    return made


class _Entries:
    """Counts as they are read, [nnz, 4] in a temporary file: user, token, count, and line of the text."""

    def __init__(self) -> None:
        self._file, self._held = mapped.Growing(in_file=True), list[tuple[int, int, int, int]]()

    def __len__(self) -> int:
        return len(self._file) + len(self._held)

    def add(self, user: int, token: int, count: int, line: int = 0) -> None:
        self._held.append((user, token, count, line))
        if len(self._held) >= _ROWS:
            self._write()

    def _write(self) -> None:
        self._file.append(np.array(self._held, np.int64).reshape(-1, 4))
        self._held.clear()

    def counts(self, users: np.ndarray, vocabulary: np.ndarray) -> TokenCounts:
        """All of them; afterwards none can be added."""
        self._write()
        self._table = self._file.whole()
        rows, tokens, counts = (np.asarray(self._table[:, i]) for i in range(3))
        return build(rows, tokens, counts, users, vocabulary)

    def first_again(self, tokens: int) -> tuple[int, int, int]:
        """User, token and line of the first pair that was there before."""
        first = np.unique(self._table[:, 0] * tokens + self._table[:, 1], return_index=True)[1]
        again = int(np.setdiff1d(np.arange(len(self._table)), first)[0])
        row, token, _, line = self._table[again].tolist()
        return row, token, line


def _counts_rows(path: Path, text: IO[str]) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Names of the columns, lower-cased, and the rows below, split by the separator of the header."""
    first = next((line for line in text if line.strip()), "").lower().replace('"', "")
    for separator in _SEPARATORS:
        header = [cell.strip() for cell in first.split(csv_text.SEPARATORS[separator])]
        if sorted(header) in (sorted(HEADER), sorted(["", *HEADER])):
            text.seek(0)
            return header, islice(csv_text.rows_of(path, text, separator), 1, None)
    raise JaxpflError(f"{path}: needs the header {','.join(HEADER)}, got {first.strip()[:60]!r}")


def load_irc(data_dir: str | None = None) -> TokenCounts:
    """Load token counts of a public chat's users from ``irc/ubuntu_irc_user_counts.npz`` in the data directory.

    The archive has ``indptr``, ``indices``, ``counts`` (compressed rows) and ``vocab``. Users without tokens are left
    out.

    Raises:
      JaxpflError: if the file is missing (with advice), damaged, or not of the format.
    """
    path = data_directory(data_dir).joinpath(*_IRC)
    if not path.is_file():
        raise JaxpflError(f"data set 'irc': no file {path}: {where_to_put_it()}")
    arrays = read_npz(path, _IRC_ARRAYS)
    missing = [name for name in _IRC_ARRAYS if name not in arrays]
    if missing:
        raise JaxpflError(f"{path}: no array {missing[0]!r} (it holds {', '.join(sorted(arrays)) or 'nothing'})")
    indptr, indices, counts, vocabulary = (arrays[name] for name in _IRC_ARRAYS)
    for name, array in (("indptr", indptr), ("indices", indices), ("counts", counts)):
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise JaxpflError(f"{path}: {name} must be integers [N], got {array.shape} of {array.dtype}")
        if array.size and not (array.min() >= 0 and array.max() <= _MOST):
            raise JaxpflError(f"{path}: {name} must be in 0 .. {_MOST}, got {array.min()} to {array.max()}")
    indptr, indices = indptr.astype(np.int64), indices.astype(np.int64)
    if len(indptr) < 2 or indptr[0] != 0 or (np.diff(indptr) < 0).any() or indptr[-1] != len(indices):
        raise JaxpflError(f"{path}: indptr must rise from 0 to the {len(indices)} entries")
    if len(counts) != len(indices) or vocabulary.ndim != 1 or vocabulary.dtype.kind not in "iufSU":
        raise JaxpflError(f"{path}: needs as many counts as indices, and a vocabulary [d]")
    if len(indices) and not (indices.min() >= 0 and indices.max() < len(vocabulary) and counts.min() > 0):
        raise JaxpflError(f"{path}: indices must be in 0 .. {len(vocabulary) - 1}, and counts positive")
    users = np.arange(len(indptr) - 1)
    made = build(np.repeat(users, np.diff(indptr)), indices, counts, users, vocabulary)
    if token_counts.repeated(made).any():
        raise JaxpflError(f"{path}: a user has a token twice")
    return made.with_tokens(1)


def read_leaf_counts(folder: Path) -> TokenCounts:
    """Count each user's target tokens in LEAF's Reddit files, training and test together.

    Padding, words outside the vocabulary and begin and end marks do not count. Users without tokens are left out,
    with a warning. The files are read twice, one user at a time.

    Args:
      folder: as in `leaf.load_leaf`.

    Raises:
      JaxpflError: if files are missing or damaged, or inputs are not sequences of tokens.
    """
    parts = [leaf_files.Part(part) for part in leaf_files.locate("reddit", folder) if part is not None]
    surveys = [leaf.survey(part, folder) for part in parts]
    if surveys[0].kind != "sequences":
        raise JaxpflError(f"{folder}: no sequences of tokens with 'target_tokens' in it: not LEAF's Reddit")
    vocabulary = leaf_text.vocabulary_of(folder, surveys[0].tally)
    length = max(survey.tally.longest for survey in surveys)
    check_fits(f"{folder} (a vocabulary of {vocabulary.size} tokens)", 200 * vocabulary.size)
    words = np.arange(vocabulary.size).astype(object)  # tokens without a known word are named by their number
    for word, token in (vocabulary.words or {}).items():
        words[token] = word
    names = {name: i for i, name in enumerate(sorted(set().union(*(survey.names for survey in surveys))))}
    entries = _Entries()
    for part in parts:
        for user, x, y in part:
            tally = leaf_text.Tally()
            tally.add(x)
            leaf_text.check_windows(tally.places, length, folder)
            targets = leaf_text.windows(x, y, f"{folder}: user {shown(user)}", vocabulary, length)[1]
            for token, count in Counter(targets.tolist()).items():
                if words[token] not in _MARKS:
                    entries.add(names[user], token, count)
    if not len(entries):
        raise JaxpflError(f"{folder}: no user has a token")
    made = entries.counts(np.array(list(names)), words.astype(str))
    counts = token_counts.added_up(made).with_tokens(1)
    everyone = set(names).union(*(survey.empty for survey in surveys))
    warn_of_empty(folder, everyone.difference(counts.users.tolist()))
    return counts
