"""Clustering into k centers: k-means++ and Lloyd's algorithm, with a variant under central differential privacy."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import checks, trees
from jaxpfl.core.randomness import numbered
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.priors import discrete
from jaxpfl.priors.discrete import Discrete
from jaxpfl.privacy import local_dp, noise
from jaxpfl.privacy.noise import add_gaussian


class Clusters(NamedTuple):
    """Centers [k, d], and the number of points assigned to each center, [k]."""

    centers: Array
    sizes: Array

    @property
    def prior(self) -> Discrete:
        """Discrete prior with probabilities proportional to the sizes; uniform if no size is positive."""
        sizes = jnp.maximum(self.sizes, 0)
        total = sizes.sum()
        k = sizes.shape[0]
        return Discrete(jnp.where(total > 0, sizes / jnp.where(total > 0, total, 1), 1 / k), self.centers)


def square_distances(points: Array, centers: Array) -> Array:
    """Squared distances [m, k] between points [m, d] and centers [k, d]."""
    return ((points[:, None] - centers) ** 2).sum(axis=-1)


def within_ball(points: Array, radius: Scalar) -> Array:
    """Clip each of the points [m, d] to the L2 norm ``radius`` with `privacy.noise.clip`."""
    return jax.vmap(lambda point: noise.clip(point, radius)[0])(points)


def plus_plus(scores: Array, points: Array, valid: Array) -> Array:
    """Choose initial centers by k-means++ (Arthur and Vassilvitskii 2007).

    Every center is one of the points. A point is drawn with a probability proportional to its squared distance from the
    nearest of the centers drawn before.

    Args:
      scores: standard Gumbel variables, [m, k]. Each point has its own row of variables, so the draws do not depend on
        the order of the points.
      points: points to cluster, [m, d].
      valid: mask of the points to use, [m] bool.

    Returns:
      The centers, [k, d]. Some are equal if there are fewer than k distinct points.
    """

    def choose(weights: Array, score: Array) -> Array:
        # The argmax of log weights plus Gumbel scores is a draw with probabilities proportional to the weights.
        logs = jnp.where(valid & (weights > 0), jnp.log(jnp.where(weights > 0, weights, 1)), -jnp.inf)
        # If all weights are zero, every valid point is equally likely.
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
    """One-hot encoding [m, k] of each point's nearest center."""
    return jax.nn.one_hot(square_distances(points, centers).argmin(axis=1), len(centers), dtype=points.dtype)


def sums(points: Array, valid: Array, member: Array) -> tuple[Array, Array]:
    """Sum the points [m, d] of each cluster with weights ``member`` [m, k]; return the sums [k, d] and total weights
    [k].
    """
    member = jnp.where(valid[:, None], member, 0)
    return trees.sum_products(member, jnp.where(valid[:, None], points, 0)), member.sum(axis=0)


def lloyd(begin: Array, points: Array, valid: Array, steps: int) -> Clusters:
    """Run Lloyd's algorithm from initial centers ``begin`` [k, d]; a center without points keeps its position."""

    def step(_: Array, at: Clusters) -> Clusters:
        total, sizes = sums(points, valid, nearest(points, at.centers))
        return Clusters(jnp.where(sizes[:, None] > 0, total / jnp.maximum(sizes, 1)[:, None], at.centers), sizes)

    end = jax.lax.fori_loop(0, steps, step, Clusters(begin, jnp.zeros(len(begin), points.dtype)))
    return end._replace(sizes=sums(points, valid, nearest(points, end.centers))[1])


def kmeans(scores: Array, points: Array, valid: Array, steps: int) -> Clusters:
    """Run Lloyd's algorithm from several k-means++ starts, and return the result with the smallest cost.

    The cost is the sum of the points' squared distances from their nearest center.

    Args:
      scores: standard Gumbel variables, one row per point, [m, starts, k].
      points: points to cluster, [m, d].
      valid: mask of the points to use, [m] bool.
      steps: number of iterations of Lloyd's algorithm.
    """

    def one(of_start: Array) -> tuple[Array, Clusters]:
        end = lloyd(plus_plus(of_start, points, valid), points, valid, steps)
        return jnp.where(valid, square_distances(points, end.centers).min(axis=1), 0).sum(), end

    costs, ends = jax.lax.map(one, scores.swapaxes(0, 1))
    return jax.tree.map(lambda a: a[jnp.argmin(costs)], ends)


SENSITIVITY = math.sqrt(2)
"""L2 sensitivity of the clusters' numbers of points and (sums of points) / radius to adding or removing one client.
"""


def spread_out(key: Key, reach: Scalar, components: int, dim: int, candidates: int = 1024) -> Array:
    """Choose centers [k, d] far from each other in a ball, independently of the data and so at no privacy cost.

    The centers are chosen from ``candidates`` random points in the ball of radius ``reach``: first any candidate, then
    always the candidate farthest from the earlier centers.
    """
    of_direction, of_length = jax.random.split(key)
    direction = jax.random.normal(of_direction, (candidates, dim))
    direction /= jnp.maximum(jnp.linalg.norm(direction, axis=1, keepdims=True), 1e-12)
    places = direction * reach * jax.random.uniform(of_length, (candidates, 1)) ** (1 / dim)
    chosen, gap = [places[0]], square_distances(places, places[:1])[:, 0]
    for _ in range(components - 1):
        chosen.append(places[jnp.argmax(gap)])
        gap = jnp.minimum(gap, square_distances(places, chosen[-1][None])[:, 0])
    return jnp.stack(chosen)


def noisy_lloyd(
    key: Key,
    begin: Array,
    points: Array,
    valid: Array,
    *,
    radius: Scalar,
    noise: Scalar,
    steps: int,
    reach: Scalar | None = None,
    variance: Scalar | None = None,
) -> Clusters:
    r"""Run Lloyd's algorithm with noise on each cluster's sum and number of points.

    Points are first clipped to the norm ``radius`` and divided by it. In each step, the server adds noise N(0, 2
    noise^2) to each cluster's number of points and to each entry of its sum of points. The new center is the noisy sum
    divided by the noisy number, clipped to the norm ``reach``. A center keeps its position if the noisy number is at
    most twice the standard deviation of the noise, or at most one half.

    Formal guarantees: this function clips points to an L2 norm of ``radius``; a point that is not finite counts as
    zero. Let the vector r be one client's memberships in the clusters, which sum to one. Adding or removing the client
    changes the vector of all numbers and sums by at most sqrt(|r|^2 + |r|^2) <= sqrt(2) in L2 norm, because points have
    at most norm one after the division by the radius. A step is therefore a Gaussian mechanism with noise multiplier
    ``noise`` under the add-or-remove-one relation. The whole run is the adaptive composition of ``steps`` of these
    mechanisms (`event`). The initial centers must not depend on the points.

    Implements: Ozkara et al. 2023, appendix D.3.

    Args:
      key: random key; the other settings are folded into it, so runs with different settings draw different noise.
      begin: initial centers, [k, d].
      points: points to cluster, [m, d].
      valid: mask of the points to use, [m] bool.
      radius: clipping norm R of the points.
      noise: noise multiplier z of one step.
      steps: number of steps T.
      reach: data-independent bound on the norm of the centers; by default ``radius``.
      variance: variance of each entry of a point about its center, for soft memberships (EM); None for hard
        memberships (k-means).

    Returns:
      The centers, and the clusters' noisy numbers of points in the last step.
    """
    soft = (0.0, 0.0) if variance is None else (1.0, variance)
    key = numbered(key, radius, noise, steps, radius if reach is None else reach, *soft)
    points = within_ball(points, radius) / radius
    scale, within = noise * SENSITIVITY, 1.0 if reach is None else reach / radius

    def membership(at: Clusters) -> Array:
        if variance is None:
            return nearest(points, at.centers)
        losses = square_distances(points, at.centers) / (2 * variance / radius**2)
        return jax.vmap(discrete.responsibilities, in_axes=(None, 0))(at.prior.p, losses)

    def step(t: Array, at: Clusters) -> Clusters:
        total, sizes = sums(points, valid, membership(at))
        of_total, of_sizes = jax.random.split(jax.random.fold_in(key, t))
        sizes = add_gaussian(of_sizes, sizes, scale, "sizes of a step")
        total = add_gaussian(of_total, total, scale, "sums of a step")
        # If a cluster's number of points is smaller than the noise, its center would move at random.
        known = sizes > jnp.maximum(2 * scale, 0.5)
        moved = within_ball(total / jnp.where(known, sizes, 1)[:, None], within)
        return Clusters(jnp.where(known[:, None], moved, at.centers), sizes)

    start = Clusters(begin / radius, jnp.zeros(len(begin), points.dtype))
    end = jax.lax.fori_loop(0, steps, step, start)
    return end._replace(centers=end.centers * radius)


def event(noise: float, steps: int) -> Any:
    """Make the ``DpEvent`` of `noisy_lloyd` for dp-accounting's accountants, for adding or removing one client."""
    from dp_accounting import GaussianDpEvent, SelfComposedDpEvent

    return SelfComposedDpEvent(GaussianDpEvent(noise), steps)


def noise_multiplier(epsilon: float, delta: float, steps: int) -> float:
    """Smallest noise multiplier z of a step for which `noisy_lloyd` is (eps, delta)-DP.

    The composition of T Gaussian mechanisms with multiplier z, even if adaptive, is as private as one Gaussian
    mechanism with multiplier z / sqrt(T). The analytic calibration of this mechanism therefore gives the smallest z.

    Raises:
      JaxpflError: if eps is not positive, delta is not in (0, 1), or ``steps`` is below 1.
    """
    checks.count("steps", steps)
    return math.sqrt(steps) * local_dp.analytic_gaussian_stddev(epsilon, delta, 1.0)
