"""How often each user wrote each token: counts in compressed rows, their vocabulary, and splits of users and tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpfl.errors import JaxpflError


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
        """m_u, [n] int64."""
        ends = np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])
        return ends[self.indptr[1:]] - ends[self.indptr[:-1]]

    @property
    def rows(self) -> np.ndarray:
        """The user of each entry, [nnz]."""
        return np.repeat(np.arange(len(self.users)), np.diff(self.indptr))

    def of_users(self, chosen: np.ndarray) -> TokenCounts:
        """The users with these places, in this order."""
        lengths = np.diff(self.indptr)[chosen]
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        places = np.repeat(self.indptr[chosen] - indptr[:-1], lengths) + np.arange(indptr[-1])
        return self._replace(
            indptr=indptr, indices=self.indices[places], counts=self.counts[places], users=self.users[chosen]
        )

    def most_frequent(self, tokens: int) -> TokenCounts:
        """The counts of the ``tokens`` most frequent tokens, most frequent first; ties as they stand.

        The choice looks at all users: where privacy is claimed, the vocabulary must be public.
        """
        totals = np.bincount(self.indices, self.counts, len(self.vocabulary))
        chosen = np.argsort(-totals, kind="stable")[:tokens]
        place = np.full(len(self.vocabulary), -1)
        place[chosen] = np.arange(len(chosen))
        kept = place[self.indices] >= 0
        return build(self.rows[kept], place[self.indices[kept]], self.counts[kept], self.users, self.vocabulary[chosen])

    def with_tokens(self, least: int) -> TokenCounts:
        """The users with at least so many tokens."""
        return self.of_users(np.flatnonzero(self.sizes >= least))

    def divided(self, rng: np.random.Generator, train: np.ndarray) -> tuple[TokenCounts, TokenCounts]:
        """Every user's tokens in two parts, drawn without replacement: ``train[u]`` of them, and the others."""
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
    """Token counts of entries (user, token, count) in any order, each pair once."""
    order = np.lexsort((indices, rows))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(users)))])
    return TokenCounts(
        indptr, indices[order].astype(np.int32), counts[order].astype(np.int32), np.asarray(users), vocabulary
    )


class HistogramSplit(NamedTuple):
    """What histogram estimation is studied on: users whose tokens are divided, and validation users apart."""

    train: TokenCounts
    test: TokenCounts
    validation_train: TokenCounts
    validation_test: TokenCounts


def split(
    counts: TokenCounts, *, validation: float = 0.2, train_share: float = 0.5, most: int | None = None, seed: int = 0
) -> HistogramSplit:
    """Sets a share of the users apart for validation, and divides every user's tokens.

    Args:
      counts: of users with at least two tokens each.
      validation: share of the users, drawn at random.
      train_share: of a user's tokens, rounded, at least one and at most all but one.
      most: of a user's training tokens; the others are test tokens.
      seed: of both draws.

    Raises:
      JaxpflError: fewer than two users, one with a single token, or shares outside (0, 1).
    """
    for name, share in (("validation", validation), ("train_share", train_share)):
        if not 0 < share < 1:
            raise JaxpflError(f"{name} must be > 0 and < 1, got {share}")
    n, sizes = len(counts.users), counts.sizes
    if n < 2:
        raise JaxpflError(f"needs at least two users, one of them for validation, got {n}")
    if sizes.min() < 2:
        raise JaxpflError(
            f"user {counts.users[sizes.argmin()]} has {sizes.min()} tokens: two are needed, to test on one"
        )
    rng = np.random.default_rng(seed)
    train = np.clip(np.rint(train_share * sizes).astype(np.int64), 1, sizes - 1)
    train = train if most is None else np.minimum(train, most)
    own, held_out = counts.divided(rng, train)
    apart = np.zeros(n, bool)
    apart[rng.permutation(n)[: min(max(1, round(validation * n)), n - 1)]] = True
    users, others = np.flatnonzero(~apart), np.flatnonzero(apart)
    return HistogramSplit(
        own.of_users(users), held_out.of_users(users), own.of_users(others), held_out.of_users(others)
    )
