r"""Private clustering of standardised histograms, with smaller noise on rare tokens.

A small error e of a center P costs :math:`\frac12 \sum_x e_x^2 / P_x`, so that noise of equal size on all tokens spoils
the rare ones. As in DimRed and in the paper's second step, histograms are therefore standardised by the private mean:
with weights :math:`w_x = (\bar q_x + b)^{-1/2}` a user's :math:`w \circ \hat Q_u` is clipped to a norm of C, and a
token's sum has noise of standard deviation :math:`z C / w_x`. The weights depend on released vectors alone. Every user
has a norm of about one or more, and most have two to five; with C = 1 all are scaled to it, so that all users have the
same influence.

The clusters' masses need no release of their own: the total of a sum has noise :math:`z C (\sum_x w_x^{-2})^{1/2}`,
which is only about z.

Each round's release of the mean is combined with the earlier ones by precision, and the mean is `denoised`; with one
cluster the method reduces to FedAvg in T + 1 releases.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators.histograms.base import Users, floored
from jaxpfl.estimators.histograms.denoised import denoised
from jaxpfl.estimators.histograms.private import Release, clipped_sums, private_start, shrunk, stddevs
from jaxpfl.privacy.noise import add_gaussian

REACH = 1.0
"""C, the public clipping norm of the standardised histograms."""
LEAST = 0.1
"""b d: below a tenth of the average token's share the noise shrinks no further."""


class Known(NamedTuple):
    """Combined releases of the mean: a value per token [d] and its precision, the inverse variance of the noise [d]."""

    value: Array
    precision: Array


def known_of(release: Release, radius: Scalar, noise: Scalar) -> Known:
    """Mean and precision from `release_of_all`."""
    mass = jnp.maximum(release.masses[0], 1)
    value = release.sums[0] / mass
    return Known(value, jnp.full_like(value, (mass / stddevs(radius, noise)[0]) ** 2))


def mean_of(known: Known, floor: Scalar) -> Array:
    """Denoised mean, [d]."""
    return denoised(known.value, 1 / jnp.sqrt(known.precision), floor)


def weights_of(mean: Array) -> Array:
    """Standardising weights w, [d], from a private mean [d]."""
    return 1 / jnp.sqrt(mean + LEAST / len(mean))


@full_precision.products
def noisy_sums(key: Key, users: Users, centers: Array, weights: Array, noise: Scalar) -> Release:
    """A round's release: noisy sums [k, d] of the users nearest to each center, and their totals as masses [k].

    Formal guarantees: a Gaussian mechanism of the noise multiplier ``noise`` under add-or-remove-one of a user, for
    weights that are public or private: a user is in one cluster and changes ``weights * sums`` by at most `REACH`.
    """
    exact = clipped_sums(users, centers, REACH, weights=weights).sums
    sums = add_gaussian(key, exact * weights, noise * REACH) / weights
    return Release(sums, sums.sum(axis=1))


@full_precision.products
def cluster(
    key: Key,
    users: Users,
    first: Release,
    clusters: int,
    rounds: Scalar,
    *,
    radius: Scalar,
    noise: Scalar,
    first_noise: Scalar,
    floor: Scalar,
    spread: Scalar = 1.0,
) -> Array:
    """Private Algorithm 2 with standardised sums: the centers, [k, d], floored.

    Formal guarantees: as in `histograms.private.cluster`, T adaptively composed Gaussian mechanisms of the noise
    multiplier ``noise``, given the noisy ``first``.

    Args:
      key: of the start and of the noise.
      users: to be clustered.
      first: `release_of_all`, clipped without weights.
      clusters: k.
      rounds: T.
      radius: C of ``first``.
      noise: z of each round, positive.
      first_noise: z of ``first``.
      floor: s.
      spread: of the start (`private_start`).
    """
    of_start, of_rounds = jax.random.split(key)

    def step(t: Array, at: tuple[Array, Array, Known]) -> tuple[Array, Array, Known]:
        centers, mean, known = at
        weights = weights_of(mean)
        release = noisy_sums(jax.random.fold_in(of_rounds, t), users, centers, weights, noise)
        mass = jnp.maximum(release.masses.sum(), 1)
        precision = (mass * weights / (noise * REACH)) ** 2 / clusters
        total = known.precision + precision
        value = known.value + precision / total * (release.sums.sum(axis=0) / mass - known.value)
        known = Known(value, total)
        mean = mean_of(known, floor)
        return floored(shrunk(release, mean, noise * REACH / weights), floor), mean, known

    known = known_of(first, radius, first_noise)
    mean = mean_of(known, floor)
    start = private_start(of_start, mean, clusters, spread, floor)
    return jax.lax.fori_loop(0, rounds, step, (start, mean, known))[0]
