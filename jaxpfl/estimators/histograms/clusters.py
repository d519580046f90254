r"""Algorithm 2, clustering of histograms by KL divergence, and IFCA, its variant with gradient steps.

.. math:: \min_P \sum_u \min_k KL(\hat Q_u \| P_k)

Users are assigned to the nearest center; a center becomes the mean of its users, which minimises their divergences.
The objective therefore never increases, up to the effect of the floor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Scalar
from jaxpfl.estimators.histograms.base import Users, as_counted, divergences, floored, total


class Clustering(NamedTuple):
    """Floored centers [k, d], the users of each in the last assignment [k], and the objective (3) over n by round [T].

    The sizes are of the assignment that the centers were computed from, and the objective is that before each round.
    """

    centers: Array
    sizes: Array
    objective: Array


class Sums(NamedTuple):
    """Sums over the users nearest to each center: of histograms [k, d], of ones [k], and of all divergences []."""

    histograms: Array
    sizes: Array
    divergence: Array


@full_precision.products
def sums(users: Users, centers: Array) -> Sums:
    """Assign every user to its nearest center and sum, in one pass."""

    def of_block(block: Users, q: Array) -> Sums:
        apart = divergences(q, centers)
        member = jax.nn.one_hot(apart.argmin(axis=1), len(centers), dtype=q.dtype)
        member = jnp.where(block.valid[:, None], member, 0)
        return Sums(member.T @ q, member.sum(axis=0), jnp.where(block.valid, apart.min(axis=1), 0).sum())

    return total(users, of_block)


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
    """Algorithm 2; with a rate below one IFCA, whose centers take a gradient step towards their users' mean.

    Implements: Setlur et al. 2023, equation (3); Setlur et al. 2023, Algorithm 2.

    Args:
      users: to be clustered.
      start: initial centers, [k, d].
      rounds: T.
      floor: s.
      rate: of a step towards the mean. A center without users becomes uniform, as printed, and stays where it is under
        IFCA.
      complete: applied to the means [k, d] before they become centers (`histograms.dimred`).
    """
    start, rate = as_counted((start, rate), users)
    jumps = rate == 1

    def step(at: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], Array]:
        centers = at[0]
        found = sums(users, centers)
        means = found.histograms / jnp.maximum(found.sizes, 1)[:, None]
        lonely = jnp.where(jumps, 1 / users.tokens, centers)
        moved = jnp.where(found.sizes[:, None] > 0, centers + rate * (means - centers), lonely)
        moved = jnp.where(jumps & (found.sizes[:, None] > 0), means, moved)
        return (floored(complete(moved), floor), found.sizes), found.divergence / jnp.maximum(users.number, 1)

    begin = floored(complete(start), floor)
    (centers, sizes), objective = jax.lax.scan(step, (begin, jnp.zeros(len(start), begin.dtype)), None, length=rounds)
    return Clustering(centers, sizes, objective)
