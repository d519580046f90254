"""Clustering of clients' points under central differential privacy: Lloyd's algorithm, or EM, on noisy sums."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxpfl.core import checks
from jaxpfl.core.randomness import numbered
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators.clustering import Clusters, nearest, square_distances, sums, within_ball
from jaxpfl.priors import discrete
from jaxpfl.privacy import local_dp as local
from jaxpfl.privacy.noise import add_gaussian

SENSITIVITY = math.sqrt(2)
"""L2 sensitivity of (numbers, sums / radius) to adding or removing a client."""


def spread_out(key: Key, reach: Scalar, components: int, dim: int, candidates: int = 1024) -> Array:
    """Data-independent centers far from each other in a ball, [k, d]: a start that costs no privacy.

    Each is the one farthest from the earlier ones among many random points of the ball of radius ``reach``.
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
    r"""Lloyd's algorithm that sees the points through noisy sums only.

    In each step the server adds N(0, 2 noise^2) to each cluster's number of points and to each entry of its sum of
    points over the radius. A center becomes their quotient, clipped to ``reach``; it stays in place if its cluster's
    noisy number is below twice the noise's standard deviation.

    Formal guarantees: points are clipped to an L2 norm of ``radius`` here (one that is not finite counts as zero). One
    client's memberships r sum to one, so that it changes all numbers and sums together by at most
    sqrt(|r|^2 + |r|^2) <= sqrt(2) in L2 norm when it comes or goes: a step is a Gaussian mechanism of the noise
    multiplier ``noise`` under add-or-remove-one, and the whole is ``steps`` of them, composed adaptively (`event`). The
    start must not depend on the points.

    Implements: Ozkara et al. 2023, appendix D.3.

    Args:
      key: of the noise, which also depends on the other settings.
      begin: centers, [k, d].
      points: [m, d].
      valid: [m] bool.
      radius: R.
      noise: the noise multiplier z of one step.
      steps: T.
      reach: a public bound on the centers' norm; ``radius`` unless given.
      variance: of an entry of a point about its center, for soft memberships (EM); hard ones (k-means) if None.

    Returns:
      The last centers, and the last noisy numbers.
    """
    soft = (0.0, 0.0) if variance is None else (1.0, variance)
    key = numbered(key, radius, noise, steps, radius if reach is None else reach, *soft)
    points = within_ball(points, radius) / radius
    scale, within = noise * SENSITIVITY, 1.0 if reach is None else reach / radius

    def membership(at: Clusters) -> Array:
        if variance is None:
            return nearest(points, at.centers)
        losses = square_distances(points, at.centers) / (2 * variance / radius**2)
        return jax.vmap(discrete.responsibilities, in_axes=(None, 0))(at.as_prior.p, losses)

    def step(t: Array, at: Clusters) -> Clusters:
        total, sizes = sums(points, valid, membership(at))
        of_total, of_sizes = jax.random.split(jax.random.fold_in(key, t))
        sizes = add_gaussian(of_sizes, sizes, scale)
        total = add_gaussian(of_total, total, scale)
        known = sizes > jnp.maximum(2 * scale, 0.5)
        moved = within_ball(total / jnp.where(known, sizes, 1)[:, None], within)
        return Clusters(jnp.where(known[:, None], moved, at.centers), sizes)

    start = Clusters(begin / radius, jnp.zeros(len(begin), points.dtype))
    end = jax.lax.fori_loop(0, steps, step, start)
    return end._replace(centers=end.centers * radius)


def event(noise: float, steps: int) -> Any:
    """``DpEvent`` of `noisy_lloyd` for dp-accounting's accountants (add-or-remove-one, a client is the unit)."""
    from dp_accounting import GaussianDpEvent, SelfComposedDpEvent

    return SelfComposedDpEvent(GaussianDpEvent(noise), steps)


def noise_multiplier(epsilon: float, delta: float, steps: int) -> float:
    """Least noise multiplier of each of T steps that makes `noisy_lloyd` (eps, delta)-DP.

    T Gaussian mechanisms of multiplier z compose to exactly one of z / sqrt(T), also adaptively, so the analytic
    calibration is exact here too.

    Raises:
      JaxpflError: unless eps is positive, delta is in (0, 1) and ``steps`` is at least 1.
    """
    checks.count("steps", steps)
    return math.sqrt(steps) * local.analytic_gaussian_stddev(epsilon, delta, 1.0)
