"""Clustering of points into k centers: k-means++ and Lloyd's algorithm."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import trees
from jaxpfl.core.types import Array, Scalar
from jaxpfl.priors.discrete import Discrete
from jaxpfl.privacy import clipping


class Clusters(NamedTuple):
    """Centers [k, d] and the number of points of each, [k]."""

    centers: Array
    sizes: Array

    @property
    def as_prior(self) -> Discrete:
        """Discrete prior with shares in proportion to the sizes; uniform if no size is positive."""
        sizes = jnp.maximum(self.sizes, 0)
        total = sizes.sum()
        k = sizes.shape[0]
        return Discrete(jnp.where(total > 0, sizes / jnp.where(total > 0, total, 1), 1 / k), self.centers)


def square_distances(points: Array, centers: Array) -> Array:
    """Squared distances between points [m, d] and centers [k, d], [m, k]."""
    return ((points[:, None] - centers) ** 2).sum(axis=-1)


def within_ball(points: Array, radius: Scalar) -> Array:
    """Rows of [m, d], each clipped to an L2 norm of ``radius`` by `privacy.clipping.clip`."""
    return jax.vmap(lambda point: clipping.clip(point, radius)[0])(points)


def plus_plus(scores: Array, points: Array, valid: Array) -> Array:
    """Initial centers by k-means++ (Arthur and Vassilvitskii 2007).

    Centers are points, each drawn with a probability proportional to its squared distance to the nearest earlier
    center.

    Args:
      scores: [m, k] standard Gumbel variables, one row per point, so that the draws do not depend on the order of the
        points.
      points: [m, d].
      valid: [m] bool, the points that count.

    Returns:
      [k, d]; centers coincide if there are fewer distinct points.
    """

    def choose(weights: Array, score: Array) -> Array:
        logs = jnp.where(valid & (weights > 0), jnp.log(jnp.where(weights > 0, weights, 1)), -jnp.inf)
        logs = jnp.where(jnp.isneginf(logs).all(), jnp.where(valid, 0.0, -jnp.inf), logs)
        return points[jnp.argmax(logs + score)]

    first = choose(jnp.ones(len(points)), scores[:, 0])
    gap, chosen = square_distances(points, first[None])[:, 0], [first]
    for column in scores.T[1:]:
        center = choose(gap, column)
        gap = jnp.minimum(gap, square_distances(points, center[None])[:, 0])
        chosen.append(center)
    return jnp.stack(chosen)


def nearest(points: Array, centers: Array) -> Array:
    """One-hot membership of the nearest center, [m, k]."""
    return jax.nn.one_hot(square_distances(points, centers).argmin(axis=1), len(centers), dtype=points.dtype)


def sums(points: Array, valid: Array, member: Array) -> tuple[Array, Array]:
    """Sum [k, d] and number [k] of the points [m, d] of each center, for memberships [m, k]."""
    member = jnp.where(valid[:, None], member, 0)
    return trees.sum_products(member, jnp.where(valid[:, None], points, 0)), member.sum(axis=0)


def lloyd(begin: Array, points: Array, valid: Array, steps: int) -> Clusters:
    """Lloyd's algorithm from initial centers [k, d]; a center without points stays in place."""

    def step(_: Array, at: Clusters) -> Clusters:
        total, sizes = sums(points, valid, nearest(points, at.centers))
        return Clusters(jnp.where(sizes[:, None] > 0, total / jnp.maximum(sizes, 1)[:, None], at.centers), sizes)

    end = jax.lax.fori_loop(0, steps, step, Clusters(begin, jnp.zeros(len(begin), points.dtype)))
    return end._replace(sizes=sums(points, valid, nearest(points, end.centers))[1])


def kmeans(scores: Array, points: Array, valid: Array, steps: int) -> Clusters:
    """Best of several k-means++ starts of Lloyd's algorithm, by the sum of squared distances.

    Args:
      scores: [m, starts, k] standard Gumbel variables, one row per point.
    """

    def one(of_start: Array) -> tuple[Array, Clusters]:
        end = lloyd(plus_plus(of_start, points, valid), points, valid, steps)
        return jnp.where(valid, square_distances(points, end.centers).min(axis=1), 0).sum(), end

    costs, ends = jax.lax.map(one, scores.swapaxes(0, 1))
    return jax.tree.map(lambda a: a[jnp.argmin(costs)], ends)
