"""Users' token counts in compressed sparse rows, and functions that split them and read files.

The readers support CSV files with ``user,token,count``, an archive of IRC users, and LEAF's Reddit.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpfl.data.sources import csv_text, leaf
from jaxpfl.data.sources.base import data_directory, one_line, warn_of_empty, where_to_put_it
from jaxpfl.data.sources.npz import read_npz
from jaxpfl.support.errors import JaxpflError, shown
from jaxpfl.support.files import check_fits


class TokenCounts(NamedTuple):
    """Token counts of n users over a vocabulary of d tokens, in compressed sparse rows with nnz nonzero counts.

    Attributes:
      indptr: bounds of the users' entries, [n + 1] int64; user u's entries are ``indptr[u] ... indptr[u + 1] - 1``.
      indices: position of each entry's token in ``vocabulary``, ascending for each user, [nnz] int32.
      counts: positive counts, [nnz] int32.
      users: names or numbers of the users in the data, [n].
      vocabulary: tokens as strings, [d].
    """

    indptr: np.ndarray
    indices: np.ndarray
    counts: np.ndarray
    users: np.ndarray
    vocabulary: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Number of tokens m_u of each user, [n] int64."""
        ends = np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])
        return ends[self.indptr[1:]] - ends[self.indptr[:-1]]

    @property
    def rows(self) -> np.ndarray:
        """Index of the user of each entry, [nnz]."""
        return np.repeat(np.arange(len(self.users)), np.diff(self.indptr))

    def select_users(self, chosen: np.ndarray) -> TokenCounts:
        """Return the counts of the users with the indices ``chosen``, in that order."""
        lengths = np.diff(self.indptr)[chosen]
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        places = np.repeat(self.indptr[chosen] - indptr[:-1], lengths) + np.arange(indptr[-1])
        return self._replace(
            indptr=indptr, indices=self.indices[places], counts=self.counts[places], users=self.users[chosen]
        )

    def most_frequent(self, tokens: int) -> TokenCounts:
        """Restrict the vocabulary to the ``tokens`` most frequent tokens.

        Tokens are sorted by decreasing frequency; ties keep their order in the vocabulary.

        The choice of tokens depends on all users, and no privacy claim covers it. Private estimates need a public
        vocabulary.
        """
        totals = np.bincount(self.indices, self.counts, len(self.vocabulary))
        chosen = np.argsort(-totals, kind="stable")[:tokens]
        place = np.full(len(self.vocabulary), -1)
        place[chosen] = np.arange(len(chosen))
        kept = place[self.indices] >= 0
        return build(self.rows[kept], place[self.indices[kept]], self.counts[kept], self.users, self.vocabulary[chosen])

    def active_users(self, least: int) -> TokenCounts:
        """Return the counts of the users who have at least ``least`` tokens."""
        return self.select_users(np.flatnonzero(self.sizes >= least))

    def divided(self, rng: np.random.Generator, train: np.ndarray) -> tuple[TokenCounts, TokenCounts]:
        """Divide each user's tokens into ``train[u]`` tokens, drawn without replacement, and the rest."""
        own = np.zeros_like(self.counts)
        for u, (low, high) in enumerate(zip(self.indptr, self.indptr[1:], strict=False)):
            own[low:high] = rng.multivariate_hypergeometric(self.counts[low:high], train[u], method="marginals")
        rows = self.rows
        parts = []
        for counts in (own, self.counts - own):
            some = counts > 0
            parts.append(build(rows[some], self.indices[some], counts[some], self.users, self.vocabulary))
        return parts[0], parts[1]


def build(
    rows: np.ndarray, indices: np.ndarray, counts: np.ndarray, users: np.ndarray, vocabulary: np.ndarray
) -> TokenCounts:
    """Build token counts from entries (user, token, count) in any order, with one entry per user and token."""
    order = np.lexsort((indices, rows))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(users)))])
    return TokenCounts(
        indptr, indices[order].astype(np.int32), counts[order].astype(np.int32), np.asarray(users), vocabulary
    )


class Part(NamedTuple):
    """Each user's tokens in two parts: ``own`` for the user's estimate, and ``held_out`` for scoring the estimate."""

    own: TokenCounts
    held_out: TokenCounts


class HistogramSplit(NamedTuple):
    """Users split into three groups: for the estimation, for validation, and unseen (used in neither)."""

    users: Part
    validation: Part
    unseen: Part


def groups(rng: np.random.Generator, number: int, *shares: float) -> list[np.ndarray]:
    """Divide 0 ... ``number`` - 1 at random into a group for each share and a group of the rest.

    The group of the rest is returned first. Each group is ascending and has at least one number.

    Raises:
      JaxpflError: if there are too few numbers to divide, if a share is not positive, or if the shares sum to one or
        more.
    """
    if not (min(shares) > 0 and sum(shares) < 1):  # NaN is refused too
        raise JaxpflError(f"shares of users set apart must be > 0 and sum to less than 1, got {shares}")
    if number <= len(shares):
        raise JaxpflError(f"{number} users cannot be divided into {len(shares) + 1} groups")
    sizes = shares_of(number, *shares)
    ends = np.cumsum([number - sum(sizes), *sizes])
    return [np.sort(part) for part in np.split(rng.permutation(number), ends[:-1])]


def shares_of(number: int, *shares: float) -> list[int]:
    """Return the number of users for each share, at least one."""
    return [max(1, int(share * number)) for share in shares]


def split(
    counts: TokenCounts,
    *,
    validation: float = 0.2,
    unseen: float = 0.1,
    train_share: float = 0.5,
    seed: int = 0,
) -> HistogramSplit:
    """Split users into three groups, and each user's tokens into two parts.

    Args:
      counts: token counts of the users, at least two tokens each.
      validation, unseen: shares of the users in the validation group and in the group unseen in training; the users
        are drawn at random.
      train_share: share of a user's tokens in the first part, from which the user's histogram is estimated. The number
        of tokens is rounded, and each part gets at least one token.
      seed: seed of both draws.

    Raises:
      JaxpflError: if there are fewer than three users, if a user has a single token, or if a share is out of range.
    """
    if not 0 < train_share < 1:
        raise JaxpflError(f"train_share must be > 0 and < 1, got {train_share}")
    rng, sizes = np.random.default_rng(seed), counts.sizes
    parts = groups(rng, len(sizes), validation, unseen)
    if sizes.min() < 2:
        user, size = counts.users[sizes.argmin()], sizes.min()
        raise JaxpflError(f"user {user} has {size} token(s), but training and testing require one each")
    own = np.clip(np.rint(train_share * sizes).astype(np.int64), 1, sizes - 1)
    divided = counts.divided(rng, own)
    return HistogramSplit(*(Part(*(tokens.select_users(part) for tokens in divided)) for part in parts))


HEADER = ["user", "token", "count"]
_IRC_ARRAYS = ("indptr", "indices", "counts", "vocab")
_IRC = ("irc", "ubuntu_irc_user_counts.npz")
_MARKS = ("<BOS>", "<EOS>", "<PAD>", "<UNK>")
_MOST = 2**31 - 1


def read_counts_csv(path: Path, encoding: str | None = None) -> TokenCounts:
    """Read counts from a CSV file with the columns ``user``, ``token`` and ``count``, one row per nonzero count.

    Columns may be in any order. Columns without a name, such as R's row numbers, are ignored. Users and tokens are
    numbered in order of first appearance.

    Raises:
      JaxpflError: if the file cannot be read or has a different header; if a row does not have three cells; if a count
        is not a positive integer; or if a token of a user occurs twice. The message gives the line and the reason.
    """
    import pandas

    cells, _ = csv_text.rows(path, encoding=encoding)
    header = [] if cells.empty else [name.lower() for name in cells.iloc[0]]
    if sorted(filter(None, header)) != sorted(HEADER):
        found = "" if cells.empty else ",".join(cells.iloc[0])
        raise JaxpflError(f"{path} must have the columns {', '.join(HEADER)} in any order, got header {found[:60]!r}")
    rows = cells.iloc[1:].set_axis(header, axis=1)[HEADER]
    if rows.empty:
        raise JaxpflError(f"{path} has a header but no counts below it")
    for line, row in rows[(rows == "").any(axis=1)].iterrows():
        got = ",".join(row).rstrip(",")
        raise JaxpflError(f"{path} line {line} must have a user, a token and a count, got {got[:60]!r}")
    counts = rows["count"].where(rows["count"].str.fullmatch("0*[1-9][0-9]{0,9}"), "0").astype(np.int64)
    for line, count in rows["count"][(counts < 1) | (counts > _MOST)].items():
        raise JaxpflError(f"{path} line {line}: count must be a whole number from 1 to {_MOST}, got {count[:30]!r}")
    for line, row in rows[rows.duplicated(["user", "token"])].iterrows():
        twice = f"user {shown(row['user'])} has the token {shown(row['token'])} twice"
        raise JaxpflError(f"{path} line {line}: {twice}: add the counts up")
    (users, names), (tokens, words) = (pandas.factorize(rows[name]) for name in ("user", "token"))
    return build(users, tokens, counts.to_numpy(), np.array(names.tolist()), np.array(words.tolist()))


def load_irc(data_dir: str | None = None) -> TokenCounts:
    """Load token counts of Ubuntu's IRC users from ``irc/ubuntu_irc_user_counts.npz`` in the data directory.

    The archive has ``indptr``, ``indices``, ``counts`` (compressed sparse rows) and ``vocab``. Users without tokens are
    left out.

    Raises:
      JaxpflError: if the file is missing (the message says where to put it), damaged, or in another format.
    """
    from scipy import sparse

    path = data_directory(data_dir).joinpath(*_IRC)
    if not path.is_file():
        raise JaxpflError(f"file {path} of data set 'irc' not found: {where_to_put_it()}")
    arrays = read_npz(path, _IRC_ARRAYS)
    missing = [name for name in _IRC_ARRAYS if name not in arrays]
    if missing:
        raise JaxpflError(f"{path} has no array {missing[0]!r} (it contains {', '.join(sorted(arrays)) or 'nothing'})")
    indptr, indices, counts, vocabulary = (arrays[name] for name in _IRC_ARRAYS)
    if any(array.dtype.kind not in "iu" for array in (indptr, indices, counts)):
        raise JaxpflError(f"{path}: indptr, indices and counts must be integers")
    try:
        matrix = sparse.csr_array((counts, indices, indptr), shape=(len(indptr) - 1, len(vocabulary)))
        matrix.check_format()  # SciPy does not check an indptr that ends with 0
        if (np.diff(matrix.indptr) < 0).any():
            raise ValueError("indptr decreases")
    except (TypeError, ValueError) as error:
        raise JaxpflError(f"{path} has no token counts in compressed rows: {one_line(error)}") from error
    if not ((matrix.data > 0) & (matrix.data <= _MOST)).all():
        raise JaxpflError(f"{path}: counts must be from 1 to {_MOST}")
    matrix.sort_indices()
    if not matrix.has_canonical_format:
        raise JaxpflError(f"{path}: a user has a token twice")
    users = np.arange(len(indptr) - 1)
    rows = np.repeat(users, np.diff(matrix.indptr))
    return build(rows, matrix.indices, matrix.data, users, vocabulary).active_users(1)


def read_leaf_counts(folder: Path) -> TokenCounts:
    """Count each user's target tokens in LEAF's Reddit files, training and test together.

    Padding, words outside the vocabulary, and beginning- and end-of-sequence tokens are not counted. Users without
    tokens are left out, with a warning.

    Args:
      folder: folder of the files, as in `leaf.load_leaf`.

    Raises:
      JaxpflError: if files are missing or damaged, or if inputs are not sequences of tokens.
    """
    parts = [leaf.read_users(part) for part in leaf.locate("reddit", folder) if part is not None]
    if leaf.kind_of(parts[0], folder) != "sequences":
        raise JaxpflError(f"{folder} is not LEAF's Reddit data set: its users have no 'target_tokens'")
    tallies = [leaf.tally(users) for users in parts]
    vocabulary, length = leaf.vocabulary_of(folder, tallies[0]), max(found.longest for found in tallies)
    check_fits(f"{folder} (a vocabulary of {vocabulary.size} tokens)", 200 * vocabulary.size)
    words = np.arange(vocabulary.size).astype(object)  # the name of a token without a known word is its number
    for word, token in (vocabulary.words or {}).items():
        words[token] = word
    marks = np.isin(words.astype(str), _MARKS)
    names = sorted(set().union(*parts))
    found = {name: Counter[int]() for name in names}
    for user, (x, y) in (one for users in parts for one in users.items()):
        leaf.check_windows(leaf.tally({user: (x, y)}).places, length, folder)
        targets = leaf.windows(x, y, f"{folder}: user {shown(user)}", vocabulary, length)[1]
        found[user].update(targets[~marks[targets]].tolist())
    entries = [(i, *one) for i, name in enumerate(names) for one in found[name].items()]
    if not entries:
        raise JaxpflError(f"{folder}: no user has a token")
    rows, tokens, number = np.array(entries).T
    counts = build(rows, tokens, number, np.array(names), words.astype(str)).active_users(1)
    warn_of_empty(folder, set(names).difference(counts.users.tolist()))
    return counts
