"""Token counts from files: ``user,token,count`` text, the IRC users' archive, and LEAF's Reddit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from jaxpfl.data.sources import csv_text, leaf, leaf_text
from jaxpfl.data.sources.base import check_fits, data_directory, where_to_put_it
from jaxpfl.data.sources.npz import read_npz
from jaxpfl.data.sources.token_counts import TokenCounts, build
from jaxpfl.errors import JaxpflError, shown

HEADER = ["user", "token", "count"]
_IRC_ARRAYS = ("indptr", "indices", "counts", "vocab")
_SEPARATORS: tuple[csv_text.Separator, ...] = ("tab", "semicolon", "bar", "comma")
_IRC = ("irc", "ubuntu_irc_user_counts.npz")
_MARKS = ("<BOS>", "<EOS>", "<PAD>", "<UNK>")
_MOST = 2**31 - 1


def read_counts_csv(path: Path) -> TokenCounts:
    """Read counts from a CSV file with the columns ``user``, ``token`` and ``count``, one row per nonzero count.

    Columns may be in any order; cells are separated by commas, semicolons, tabs or bars; a leading column of row
    numbers is ignored. Users and tokens are numbered in order of first appearance.

    Raises:
      JaxpflError: if the file cannot be read, or has another header, a row without three cells, a count that is not a
        positive whole number, or a token of a user twice (with the line and the reason).
    """
    users: dict[str, int] = {}
    vocabulary: dict[str, int] = {}
    found: dict[tuple[int, int], int] = {}
    (_, header), *rows = _counts_rows(path)
    places = [header.index(name) for name in HEADER]
    for line, row in rows:
        where = f"{path} line {line}"
        if len(row) != len(header) or not row[places[0]] or not row[places[1]]:
            raise JaxpflError(f"{where}: needs a user, a token and a count, got {','.join(row)[:60]!r}")
        user, token, count = (row[place] for place in places)
        if not (count.isascii() and count.isdigit() and 0 < int(count.lstrip("0")[:12] or "0") <= _MOST):
            raise JaxpflError(f"{where}: count must be a whole number in 1 .. {_MOST}, got {count[:30]!r}")
        pair = users.setdefault(user, len(users)), vocabulary.setdefault(token, len(vocabulary))
        if pair in found:
            raise JaxpflError(f"{where}: user {shown(user)} has the token {shown(token)} twice: add the counts up")
        found[pair] = int(count.lstrip("0"))
    if not found:
        raise JaxpflError(f"{path}: a header, and no counts below it")
    owners, tokens = np.array(list(found), np.int64).T
    return build(owners, tokens, np.array(list(found.values())), np.array(list(users)), np.array(list(vocabulary)))


def _counts_rows(path: Path) -> list[tuple[int, list[str]]]:
    """Rows split by the separator of the header, whose names are lower-cased."""
    text = csv_text.text_of(path)
    first = next((line for line in text.splitlines() if line.strip()), "").lower().replace('"', "")
    for separator in _SEPARATORS:
        header = [cell.strip() for cell in first.split(csv_text.SEPARATORS[separator])]
        if sorted(header) in (sorted(HEADER), sorted(["", *HEADER])):
            (line, _), *rows = csv_text.split(path, text, separator)
            return [(line, header), *rows]
    raise JaxpflError(f"{path}: needs the header {','.join(HEADER)}, got {first[:60]!r}")


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
    rows = np.repeat(users, np.diff(indptr))
    if len(np.unique(rows * len(vocabulary) + indices)) < len(rows):
        raise JaxpflError(f"{path}: a user has a token twice")
    return build(rows, indices, counts, users, vocabulary).with_tokens(1)


def read_leaf_counts(folder: Path) -> TokenCounts:
    """Count each user's target tokens in LEAF's Reddit files, training and test together.

    Padding, words outside the vocabulary and begin and end marks do not count. Users without tokens are left out.

    Args:
      folder: as in `leaf.load_leaf`.

    Raises:
      JaxpflError: if files are missing or damaged, or inputs are not sequences of tokens.
    """
    parts = [leaf.read_part(part) for part in leaf.locate("reddit", folder) if part is not None]
    inputs = [x for part in parts for x, _ in part.values()]
    if leaf.kind_of(parts[0], folder) != "sequences":
        raise JaxpflError(f"{folder}: no sequences of tokens with 'target_tokens' in it: not LEAF's Reddit")
    vocabulary = leaf_text.vocabulary_of(folder, [x for x, _ in parts[0].values()])
    length = leaf_text.longest_sequence(inputs)
    check_fits(f"{folder} (a vocabulary of {vocabulary.size} tokens)", 200 * vocabulary.size)
    leaf_text.check_windows(inputs, length, folder)
    words = np.arange(vocabulary.size).astype(object)  # tokens without a known word are named by their number
    for word, token in (vocabulary.words or {}).items():
        words[token] = word
    found: Counter[tuple[str, int]] = Counter()
    for part in parts:
        for user, (x, y) in part.items():
            targets = leaf_text.windows(x, y, f"{folder}: user {shown(user)}", vocabulary, length)[1]
            found.update((user, int(token)) for token in targets if words[token] not in _MARKS)
    if not found:
        raise JaxpflError(f"{folder}: no user has a token")
    names = sorted({user for user, _ in found})
    place = {name: i for i, name in enumerate(names)}
    rows, tokens = (np.array(column) for column in zip(*((place[u], t) for u, t in found), strict=True))
    return build(rows, tokens, np.array(list(found.values())), np.array(names), words.astype(str))
