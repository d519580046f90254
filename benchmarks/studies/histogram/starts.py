"""The paper's initial centers (Algorithm 1) and choice of tokens (DimRed, appendix C), without privacy."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators.clustering import within_ball
from jaxpfl.estimators.histograms.base import Users, counts_dtype, floored, histograms, total

Direction: TypeAlias = Literal["printed", "objective"]
"""Divergence between centers and users: "printed" is KL(P_k || Qhat_u), and "objective" is KL(Qhat_u || P_k)."""


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
