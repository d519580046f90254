r"""Users' histograms over a vocabulary: sparse counts, which are made dense one block of users at a time.

A block has rows for c users. User u has m_u tokens, with counts c_u over a vocabulary of d tokens. The user's empirical
histogram is Qhat_u = c_u / m_u. The aim is to estimate the user's own distribution Q_u; the loss is KL(Q_u ||
estimate).

Zeros in an estimate make the loss infinite. Entries of an estimate below a floor s are therefore set to s, and the
estimate is normalized again (`floored`). All methods use the same s, because s largely determines the loss of local
histograms.

Reference: Setlur, Feldman and Talwar 2023, "Private and Personalized Histogram Estimation in a Federated Setting".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxpfl.core import checks, full_precision
from jaxpfl.core.full_precision import RunningSum
from jaxpfl.core.types import Array, Scalar
from jaxpfl.support.errors import JaxpflError

BLOCK = 256
"""Default number of users per block; their dense histograms over a thousand tokens take 1 MB."""


@struct.dataclass
class Users:
    """Token counts of n users, in b blocks of c rows each: one row per user, and rows without a user at the end.

    Within a scan over blocks, the arrays have no axis [b].

    Attributes:
      place: index of each nonzero count of a block in the block's table of counts [c, d], flattened, [b, e] int32:
        ``row * d + token``. The fullest block has e nonzero counts; other blocks are padded with the index c * d.
      count: nonzero counts, [b, e] float32; zero in the padding.
      size: number m_u of tokens, [b, c] float32; zero in rows without a user.
      ids: distinct ids from which the users' randomness is derived, [b, c] int32.
      tokens: size d of the vocabulary.
    """

    place: Array
    count: Array
    size: Array
    ids: Array
    tokens: int = struct.field(pytree_node=False)

    @property
    def valid(self) -> Array:
        """Mask of the rows with a user, [..., c] bool."""
        return self.size > 0

    @property
    def number(self) -> Array:
        """Number of users n; within a scan over blocks, the number of users in the block."""
        return self.valid.sum()


Truth: TypeAlias = Users | Array
"""Ground truth for the loss: held-out counts of the same users in the same blocks, or true histograms [b, c, d]."""


def from_sparse(indptr: np.ndarray, indices: np.ndarray, counts: np.ndarray, tokens: int, block: int = BLOCK) -> Users:
    """Build `Users` from compressed sparse rows: user u's distinct tokens are ``indices[indptr[u]:indptr[u + 1]]``.

    Args:
      indptr: start of each user's tokens in ``indices``; the last entry is the length of ``indices``, [n + 1].
      indices: tokens, [nnz], in 0 ... d - 1.
      counts: counts of these tokens, [nnz], positive.
      tokens: size d of the vocabulary.
      block: number c of users per block, which affects only memory and speed.

    Raises:
      JaxpflError: if there are no users, if a user has no tokens, or if the block is too large for int32 indices.
    """
    checks.count("block", block)
    n = len(indptr) - 1
    if n < 1:
        raise JaxpflError("histograms require at least one user, got none")
    if block * tokens >= 2**31:
        raise JaxpflError(f"block must be below {2**31 // tokens} for {tokens} tokens, got {block}")
    lengths = np.diff(indptr)
    if lengths.min() < 1:
        raise JaxpflError(f"user {int(lengths.argmin())} has no tokens: leave it out")
    block = min(block, n)
    blocks = -(-n // block)
    bounds = np.asarray(indptr)[np.minimum(np.arange(blocks + 1) * block, n)]
    capacity = int(np.diff(bounds).max())
    place = np.full((blocks, capacity), block * tokens, np.int32)
    count = np.zeros((blocks, capacity), np.float32)
    size = np.zeros(blocks * block, np.float32)
    rows = np.repeat(np.arange(n) % block, lengths)
    for b, (low, high) in enumerate(itertools.pairwise(bounds)):
        place[b, : high - low] = rows[low:high] * tokens + indices[low:high]
        count[b, : high - low] = counts[low:high]
    size[:n] = np.add.reduceat(np.asarray(counts, np.float64), indptr[:-1])
    ids = np.arange(blocks * block, dtype=np.int32).reshape(blocks, block)
    return Users(jnp.asarray(place), jnp.asarray(count), jnp.asarray(size.reshape(ids.shape)), jnp.asarray(ids), tokens)


def arrange(values: np.ndarray, users: Users, fill: Any = 0) -> Array:
    """Arrange one value (or row) per user, [n, ...], as an array of the users' blocks, [b, c, ...]."""
    blocks, block = users.size.shape
    rest = blocks * block - len(values)
    padded = np.concatenate([values, np.full((rest, *values.shape[1:]), fill, values.dtype)])
    return jnp.asarray(padded.reshape(blocks, block, *values.shape[1:]))


def each(values: Array, users: Users) -> np.ndarray:
    """Undo `arrange`: return one value per user, [..., n], from values in blocks, [..., b, c]."""
    flat = np.asarray(values).reshape(*values.shape[:-2], -1)
    return flat[..., np.asarray(users.valid).ravel()]


def counts_dtype(tree: Any, users: Users) -> Any:
    """Cast a pytree to the dtype of the users' counts, so that the carry of a scan over blocks keeps its dtype."""
    return jax.tree.map(lambda a: jnp.asarray(a, users.count.dtype), tree)


def histograms(block: Users | Array) -> Array:
    """Dense histograms of a block, [c, d]; zero in rows without a user. An array is returned unchanged."""
    if not isinstance(block, Users):
        return block
    rows = block.size.shape[0]
    # The padding's index is out of range, and mode="drop" ignores such entries.
    flat = jnp.zeros(rows * block.tokens, block.count.dtype).at[block.place].add(block.count, mode="drop")
    return flat.reshape(rows, block.tokens) / jnp.maximum(block.size, 1)[:, None]


def floored(p: Array, floor: Scalar) -> Array:
    """``max(p, s)`` normalized along the last axis, in the dtype of p."""
    p = jnp.maximum(p, jnp.asarray(floor, p.dtype))
    return p / p.sum(axis=-1, keepdims=True)


def entropy_term(q: Array) -> Array:
    """Negative entropy ``sum_x q log q`` of each histogram of q [..., d], with 0 log 0 = 0."""
    return jnp.where(q > 0, q * jnp.log(jnp.where(q > 0, q, 1)), 0).sum(axis=-1)


@full_precision.products
def divergences(q: Array, centers: Array) -> Array:
    """Divergences ``KL(q_u || P_k)``, [c, k], of c histograms q [c, d] from k positive centers P [k, d]."""
    return entropy_term(q)[:, None] - q @ jnp.log(centers).T


@full_precision.products
def nearest(q: Array, centers: Array) -> Array:
    """Index [c] int32 of each histogram's nearest center, ``argmin_k KL(q_u || P_k)``."""
    return jnp.argmax(q @ jnp.log(centers).T, axis=-1)


def total(users: Users, of: Callable[[Users, Array], Any]) -> Any:
    """Sum over all blocks of the pytrees ``of(block, histograms)``."""

    def step(sums: RunningSum, block: Users) -> tuple[RunningSum, None]:
        return sums.plus(of(block, histograms(block))), None

    first = jax.tree.map(lambda a: a[0], users)
    shapes = jax.eval_shape(lambda b: of(b, histograms(b)), first)
    return jax.lax.scan(step, RunningSum.zero(shapes), users)[0].total


def mean(users: Users) -> Array:
    """FedAvg's estimate: the mean of the users' histograms, [d], with the same weight for every user.

    Implements: Setlur et al. 2023, Lemma 2.1; Setlur et al. 2023, equation (2).
    """
    return total(users, lambda block, q: q.sum(axis=0)) / jnp.maximum(users.number, 1)
