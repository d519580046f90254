r"""Clustering of histograms by KL divergence: Algorithms 1 and 2 of Setlur et al. (2023), IFCA and DimRed.

.. math:: \min_P \sum_u \min_k KL(\hat Q_u \| P_k)

Here P_k are the centers, and Qhat_u is user u's histogram. In each round, every user is assigned to the nearest center.
A center then becomes the mean histogram of its users, which minimizes the sum of their divergences. The objective
therefore never increases, except by the effect of the floor. IFCA takes a gradient step toward this mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators.clustering import within_ball
from jaxpfl.estimators.histograms.base import Users, counts_dtype, divergences, floored, histograms, total
from jaxpfl.privacy.noise import add_gaussian

Direction: TypeAlias = Literal["printed", "objective"]
"""Divergence between centers and users: "printed" is KL(P_k || Qhat_u), and "objective" is KL(Qhat_u || P_k)."""


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
      complete: function applied to the means [k, d] before they become centers; see `token_mask`.
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


@full_precision.products
def far_apart(
    key: Key, users: Users, clusters: int, *, temperature: Scalar, floor: Scalar, direction: Direction = "printed"
) -> Array:
    r"""Initial centers by Algorithm 1, [k, d]: floored histograms of users that are far from each other.

    The first center is a random user's histogram. Each further center is the histogram of user u with a probability
    proportional to

    .. math:: \exp\big(t \, \min_k KL(P_k \| \hat Q_u)\big)

    where P_k are the centers so far. The objective of the clustering has the reverse divergence, :math:`KL(\hat Q_u \|
    P_k)`. If ``direction`` is "objective", that divergence is used here too. Both divergences need positive histograms,
    so centers and users' histograms are floored.

    The result is never private, because the centers are users' raw histograms. `histograms.private` has private initial
    centers.

    Implements: Setlur et al. 2023, Algorithm 1.

    Args:
      key: random key; a user's scores depend only on the key and the user's id.
      users: users whose histograms can become centers.
      clusters: number of centers k.
      temperature: temperature t >= 0. If zero, users are drawn uniformly; if infinite, the user with the largest
        divergence is chosen.
      floor: lower bound s on a token's probability, before normalization; see `floored`.
      direction: "printed" for the paper's divergence, or "objective" for the divergence of the objective.
    """

    temperature = counts_dtype(temperature, users)

    def pick(i: Array | int, gap: Array) -> Array:
        """Histogram of a random user, drawn with probability proportional to ``exp(t gap)``.

        ``gap`` is every user's divergence from the nearest center. The drawn user has the largest ``t gap`` plus Gumbel
        noise.
        """

        def step(best: tuple[Array, Array], xs: tuple[Users, Array]) -> tuple[tuple[Array, Array], None]:
            block, gaps = xs
            keys = jax.vmap(lambda user: jax.random.fold_in(jax.random.fold_in(key, i), user))(block.ids)
            scores = jax.vmap(lambda k: jax.random.gumbel(k, dtype=gap.dtype))(keys) + temperature * gaps
            scores = jnp.where(block.valid, scores, -jnp.inf)
            at = jnp.argmax(scores)
            better = scores[at] > best[0]
            return (jnp.maximum(scores[at], best[0]), jnp.where(better, histograms(block)[at], best[1])), None

        nobody = jnp.asarray(-jnp.inf, gap.dtype), jnp.zeros(users.tokens, users.count.dtype)
        return floored(jax.lax.scan(step, nobody, (users, gap))[0][1], floor)

    def gaps(center: Array) -> Array:
        def block_gaps(block: Users) -> Array:
            q = floored(histograms(block), floor)
            if direction == "printed":
                return center @ jnp.log(center) - jnp.log(q) @ center
            return (q * jnp.log(q)).sum(axis=1) - q @ jnp.log(center)

        return jax.lax.map(block_gaps, users)

    first = pick(0, jnp.zeros(users.size.shape, users.count.dtype))

    def another(carry: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], Array]:
        gap, latest = carry
        gap = jnp.minimum(gap, gaps(latest))
        center = pick(i, gap)
        return (gap, center), center

    infinite = jnp.full(users.size.shape, jnp.inf, users.count.dtype)
    rest = jax.lax.scan(another, (infinite, first), jnp.arange(1, clusters))[1]
    return jnp.concatenate([first[None], rest])


class Directions(NamedTuple):
    """The r leading eigenvectors [r, p] and eigenvalues [r] of the second moment of p tokens, and these tokens [p]."""

    vectors: Array
    values: Array
    candidates: Array


@full_precision.products
def second_moment(users: Users, mean: Array, candidates: Array, radius: Scalar | None = None) -> Array:
    r"""Sum over users of ``V_u V_u^T``, restricted to p candidate tokens, [p, p]. DimRed selects tokens from it.

    .. math:: V_u = Diag(\bar q)^{-1/2} (\hat Q_u - \bar q), \qquad M = \frac1n \sum_u V_u V_u^\top

    A token x is kept if |v_x| exceeds a threshold in any of M's leading eigenvectors v. This rule is our
    interpretation. Taken literally, the paper drops x if |v_x| is small in any v, which keeps almost no tokens. V_u is
    a deviation from the mean, so k clusters span k - 1 directions, while the paper uses k eigenvectors. (The paper's
    expression for the expectation of M lacks the terms I / (alpha + 1) and -sqrt(q) sqrt(q)^T. The first of these terms
    does not rotate the eigenvectors; the second removes one direction.)

    Clustering uses only the kept tokens. For the other tokens, every center has the entries of the mean histogram,
    whose release is included in the privacy accounting.

    Implements: Setlur et al. 2023, appendix C.

    Args:
      users: users to sum over.
      mean: positive mean histogram, [d].
      candidates: tokens to choose from, [p] int.
      radius: clipping norm B of each V_u, so that a user changes the sum by at most B^2 in Frobenius norm; None for no
        clipping.
    """
    of = mean[candidates]

    def block_moment(block: Users, q: Array) -> Array:
        v = (q[:, candidates] - of) / jnp.sqrt(of)
        v = jnp.where(block.valid[:, None], v if radius is None else within_ball(v, radius), 0)
        return v.T @ v

    return total(users, block_moment)


def directions(moment: Array, candidates: Array, number: int) -> Directions:
    """Leading eigenvectors of a second moment, exact or noisy.

    Implements: Setlur et al. 2023, appendix C.
    """
    values, vectors = jnp.linalg.eigh(moment)
    return Directions(vectors.T[::-1][:number], values[::-1][:number], candidates)


def noisy_moment(key: Key, moment: Array, radius: Scalar, noise: Scalar) -> Array:
    """Add symmetric noise to a second moment: ``N(0, (z B^2)^2)`` on and above the diagonal, mirrored below.

    Formal guarantees: this is a Gaussian mechanism with noise multiplier z for adding or removing one user, if every
    V_u is clipped to the norm B, and the mean and the candidates are private or public. One user changes the second
    moment by V V^T, and |V V^T|_F = |V|^2 <= B^2. The entries on and above the diagonal have at most this norm.
    """
    upper = jnp.triu(add_gaussian(key, moment, noise * radius**2, "second moment"))
    return upper + jnp.triu(upper, 1).T


def token_mask(found: Directions, tokens: int, threshold: Scalar) -> Array:
    """Mask of the kept tokens, [d] bool: |v_x| is above the threshold in at least one eigenvector v.

    Implements: Setlur et al. 2023, appendix C.
    """
    size = jnp.abs(found.vectors).max(axis=0)
    return jnp.zeros(tokens, bool).at[found.candidates].set(size > threshold)


def threshold_of(found: Directions, number: int) -> Array:
    """Threshold that keeps ``number`` candidates x: the ones with the largest |v_x| in any eigenvector v."""
    size = jnp.sort(jnp.abs(found.vectors).max(axis=0))[::-1]
    return size[number] if number < len(size) else jnp.asarray(-1.0, size.dtype)
