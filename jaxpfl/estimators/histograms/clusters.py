r"""Clustering of histograms by KL divergence: Algorithm 2 of Setlur et al. (2023), and IFCA.

.. math:: \min_P \sum_u \min_k KL(\hat Q_u \| P_k)

Here P_k are the centers, and Qhat_u is user u's histogram. In each round, every user is assigned to the nearest center.
A center then becomes the mean histogram of its users, which minimizes the sum of their divergences. The objective
therefore never increases, except by the effect of the floor. IFCA takes a gradient step toward this mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators.histograms.base import Users, counts_dtype, divergences, floored, total
from jaxpfl.privacy.noise import add_gaussian


class Clustering(NamedTuple):
    """Floored centers [k, d], each center's number of users [k], and the objective in each of T rounds [T].

    The numbers of users belong to the assignment from which the centers were computed. The objective is divided by the
    number of users, and evaluated at the start of each round.
    """

    centers: Array
    sizes: Array
    objective: Array


class Sums(NamedTuple):
    """Summed histograms [k, d] and number of users [k] for each center, and all users' summed divergences []."""

    histograms: Array
    sizes: Array
    divergence: Array


@full_precision.products
def sums(users: Users, centers: Array) -> Sums:
    """Assign every user to the nearest center, and sum the histograms for each center, in one pass over the users."""

    def block_sums(block: Users, q: Array) -> Sums:
        apart = divergences(q, centers)
        member = jax.nn.one_hot(apart.argmin(axis=1), len(centers), dtype=q.dtype)
        member = jnp.where(block.valid[:, None], member, 0)
        return Sums(member.T @ q, member.sum(axis=0), jnp.where(block.valid, apart.min(axis=1), 0).sum())

    return total(users, block_sums)


@full_precision.products
def cluster(
    users: Users,
    start: Array,
    rounds: int,
    *,
    floor: Scalar,
    rate: Scalar = 1.0,
    complete: Callable[[Array], Array] = lambda centers: centers,
) -> Clustering:
    """Run Setlur et al.'s Algorithm 2, or IFCA if ``rate`` < 1, in which centers take a step toward their users' mean.

    Implements: Setlur et al. 2023, equation (3); Setlur et al. 2023, Algorithm 2.

    Args:
      users: users to be clustered.
      start: initial centers, [k, d].
      rounds: number of rounds T.
      floor: lower bound s on a token's probability, before normalization; see `floored`.
      rate: step size toward the users' mean. If 1, a center without users becomes uniform, as in the paper; otherwise
        such a center keeps its value.
      complete: function applied to the means [k, d] before they become centers, such as DimRed's choice of tokens.
    """
    start, rate = counts_dtype((start, rate), users)
    jumps = rate == 1

    def step(at: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], Array]:
        centers = at[0]
        found = sums(users, centers)
        means = found.histograms / jnp.maximum(found.sizes, 1)[:, None]
        lonely = jnp.where(jumps, 1 / users.tokens, centers)
        moved = jnp.where(found.sizes[:, None] > 0, centers + rate * (means - centers), lonely)
        # At rate 1 use the mean directly, without the rounding errors of centers + (means - centers).
        moved = jnp.where(jumps & (found.sizes[:, None] > 0), means, moved)
        return (floored(complete(moved), floor), found.sizes), found.divergence / jnp.maximum(users.number, 1)

    begin = floored(complete(start), floor)
    (centers, sizes), objective = jax.lax.scan(step, (begin, jnp.zeros(len(start), begin.dtype)), None, length=rounds)
    return Clustering(centers, sizes, objective)


def noisy_moment(key: Key, moment: Array, radius: Scalar, noise: Scalar) -> Array:
    """Add symmetric noise to a sum over users of ``V_u V_u^T``, in which every V_u is clipped to the norm B.

    The noise is ``N(0, (z B^2)^2)`` on and above the diagonal, and mirrored below.

    Formal guarantees: this is a Gaussian mechanism with noise multiplier z for adding or removing one user, if the mean
    and the tokens from which the V_u are computed are private or public. One user changes the sum by V V^T, and
    |V V^T|_F = |V|^2 <= B^2. The entries on and above the diagonal have at most this norm.
    """
    upper = jnp.triu(add_gaussian(key, moment, noise * radius**2, "second moment"))
    return upper + jnp.triu(upper, 1).T
