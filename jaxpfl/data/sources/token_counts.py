"""Token counts by user, in compressed rows, with their vocabulary; splits of users and tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpfl.support.errors import JaxpflError


class TokenCounts(NamedTuple):
    """Token counts of n users over a vocabulary of d tokens.

    Attributes:
      indptr: [n + 1] int64; user u's entries are ``indptr[u] ... indptr[u + 1] - 1``.
      indices: [nnz] int32, tokens, ascending for each user.
      counts: [nnz] int32, positive.
      users: [n], the users' own names or numbers.
      vocabulary: [d], the tokens as text.
    """

    indptr: np.ndarray
    indices: np.ndarray
    counts: np.ndarray
    users: np.ndarray
    vocabulary: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """m_u, the number of tokens of each user, [n] int64."""
        ends = np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])
        return ends[self.indptr[1:]] - ends[self.indptr[:-1]]

    @property
    def rows(self) -> np.ndarray:
        """The user of each entry, [nnz]."""
        return np.repeat(np.arange(len(self.users)), np.diff(self.indptr))

    def of_users(self, chosen: np.ndarray) -> TokenCounts:
        """The users with the given indices, in this order."""
        lengths = np.diff(self.indptr)[chosen]
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        places = np.repeat(self.indptr[chosen] - indptr[:-1], lengths) + np.arange(indptr[-1])
        return self._replace(
            indptr=indptr, indices=self.indices[places], counts=self.counts[places], users=self.users[chosen]
        )

    def most_frequent(self, tokens: int) -> TokenCounts:
        """Restrict the counts to the ``tokens`` most frequent tokens, most frequent first, with ties in their order.

        The choice depends on all users: under a privacy claim, the vocabulary must be public.
        """
        totals = np.bincount(self.indices, self.counts, len(self.vocabulary))
        chosen = np.argsort(-totals, kind="stable")[:tokens]
        place = np.full(len(self.vocabulary), -1)
        place[chosen] = np.arange(len(chosen))
        kept = place[self.indices] >= 0
        return build(self.rows[kept], place[self.indices[kept]], self.counts[kept], self.users, self.vocabulary[chosen])

    def with_tokens(self, least: int) -> TokenCounts:
        """The users with at least ``least`` tokens."""
        return self.of_users(np.flatnonzero(self.sizes >= least))

    def divided(self, rng: np.random.Generator, train: np.ndarray) -> tuple[TokenCounts, TokenCounts]:
        """Divide every user's tokens in two, drawn without replacement: ``train[u]`` of them, and the others."""
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
    """Build token counts from entries (user, token, count) in any order, each pair once."""
    order = np.lexsort((indices, rows))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(users)))])
    return TokenCounts(
        indptr, indices[order].astype(np.int32), counts[order].astype(np.int32), np.asarray(users), vocabulary
    )


def repeated(counts: TokenCounts) -> np.ndarray:
    """Mask of the entries [nnz] whose user has the same token in the entry before."""
    same = np.zeros(len(counts.indices), bool)
    same[1:] = (counts.indices[1:] == counts.indices[:-1]) & (counts.rows[1:] == counts.rows[:-1])
    return same


def added_up(counts: TokenCounts) -> TokenCounts:
    """The counts with one entry for each token that a user has in several."""
    first = np.flatnonzero(~repeated(counts))
    if len(first) == len(counts.indices):
        return counts
    sums = np.add.reduceat(counts.counts.astype(np.int64), first)
    return build(counts.rows[first], counts.indices[first], sums, counts.users, counts.vocabulary)


class Part(NamedTuple):
    """Users' tokens in two parts: their own for estimation, and held-out ones for scoring."""

    own: TokenCounts
    held_out: TokenCounts


class HistogramSplit(NamedTuple):
    """Users that estimate together, validation users, and unseen users."""

    users: Part
    validation: Part
    unseen: Part


def groups(rng: np.random.Generator, number: int, *shares: float) -> list[np.ndarray]:
    """Divide 0 ... n - 1 at random: a group for each share, at least one each, preceded by the rest; each ascending.

    Raises:
      JaxpflError: if there are too few to divide, or shares are not positive or leave no rest.
    """
    if not (min(shares) > 0 and sum(shares) < 1):  # NaN is refused too
        raise JaxpflError(f"shares of users set apart must be > 0 and below 1 together, got {shares}")
    if number <= len(shares):
        raise JaxpflError(f"{number} users cannot be divided into {len(shares) + 1} groups")
    sizes = shares_of(number, *shares)
    ends = np.cumsum([number - sum(sizes), *sizes])
    return [np.sort(part) for part in np.split(rng.permutation(number), ends[:-1])]


def shares_of(number: int, *shares: float) -> list[int]:
    """Number of users in each share, at least one."""
    return [max(1, int(share * number)) for share in shares]


def split(
    counts: TokenCounts,
    *,
    validation: float = 0.2,
    unseen: float = 0.1,
    train_share: float = 0.5,
    most: int | None = None,
    seed: int = 0,
) -> HistogramSplit:
    """Set shares of the users apart, and divide every user's tokens.

    Args:
      counts: of users with at least two tokens each.
      validation, unseen: shares of the users, drawn at random.
      train_share: of a user's tokens, rounded, at least one and at most all but one.
      most: maximum number of a user's own tokens; the others are held out.
      seed: of both draws.

    Raises:
      JaxpflError: for fewer than three users, a user with a single token, or shares out of range.
    """
    if not 0 < train_share < 1:
        raise JaxpflError(f"train_share must be > 0 and < 1, got {train_share}")
    rng, sizes = np.random.default_rng(seed), counts.sizes
    parts = groups(rng, len(sizes), validation, unseen)
    if sizes.min() < 2:
        user, size = counts.users[sizes.argmin()], sizes.min()
        raise JaxpflError(f"user {user} has {size} token(s): two are needed, to learn from one and test on the other")
    own = np.clip(np.rint(train_share * sizes).astype(np.int64), 1, sizes - 1)
    divided = counts.divided(rng, own if most is None else np.minimum(own, most))
    return HistogramSplit(*(Part(*(tokens.of_users(part) for tokens in divided)) for part in parts))
