r"""Clustering of histograms under central differential privacy, with one noisy vector per round.

Each histogram is clipped to the public L2 norm C. For each of k clusters, the vector contains the sum of the users'
clipped histograms, and the mass of the cluster: the total of this sum over all tokens. A center is the sum divided by
the mass. Each user is in one cluster. Adding or removing a user changes sums / C by at most 1 in L2 norm, and the
masses by at most 1. With a public weight w of the masses (`MASS_WEIGHT`), the vector (sums / C, w masses) therefore
changes by at most sqrt(1 + w^2). A Gaussian release with noise multiplier z thus has noise of standard deviation z C
sqrt(1 + w^2) on the sums, and z sqrt(1 + w^2) / w on the masses.

Setlur et al. (2023) add the noise to each cluster's mean instead. In a small cluster, a user changes the mean more.

The privacy accounting includes one release of the mean, from which the initial centers are derived (`private_start`),
and one release per round, possibly with another noise multiplier (`divided`). Users do not send their assignments.
Post-processing of released vectors costs no privacy; examples are shrinking centers toward the mean (`shrunk`), and
choosing DimRed's candidate tokens.

The following must be public: the clipping norm C, the number of clusters k, the number of rounds T, the weight w, the
floor s, the spread of the initial centers, and the vocabulary. The guarantee does not cover the held-out users on whom
fine-tuning chooses lambda or alpha (`tuning.tuned`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators.clustering import within_ball
from jaxpfl.estimators.histograms.base import Users, floored, nearest, total
from jaxpfl.privacy import CentralNoise, Full, PrivacyPlan, calibrate
from jaxpfl.privacy.descriptions import combined
from jaxpfl.privacy.noise import add_gaussian

MASS_WEIGHT = 0.25
"""Weight w of the masses, which need little precision because centers are normalized. The value 0.25 increases the
noise on the sums by 3 %.
"""
NEIGHBOURS = 51
"""Number of tokens of similar frequency for which the centers' variance is assumed proportional to the mean."""
REACH = 1.0
"""Public clipping norm R of the standardized histograms."""
LEAST = 0.1
"""Constant b of `standard_weights`, multiplied by the number d of tokens. For tokens whose share is below a tenth of
the mean share, weights hardly grow further.
"""
GRID = 60
"""Number of grid values g_j in `denoised`, from the floor to the largest noisy value."""
STEPS = 60
"""Number of EM steps in `denoised`. With three times as many, a loss changes by less than the spread between runs.
"""


class Release(NamedTuple):
    """Sums of clipped histograms [k, d] and their masses [k] for k clusters, exact or noisy."""

    sums: Array
    masses: Array


@full_precision.products
def clipped_sums(
    users: Users, centers: Array, radius: Scalar, keep: Array | None = None, weights: Array | None = None
) -> Release:
    """Sums and masses of clipped histograms: a round's release before the noise is added.

    Args:
      users: users to sum over.
      centers: centers of the clusters, [k, d]; each user is added to the cluster of the nearest center.
      radius: clipping norm C.
      keep: mask of the tokens to release, [d] bool; by default all.
      weights: positive weights of the tokens in the norm that is clipped, [d]; by default 1.
    """

    def block_sums(block: Users, q: Array) -> Release:
        member = jax.nn.one_hot(nearest(q, centers), len(centers), dtype=q.dtype)
        member = jnp.where(block.valid[:, None], member, 0)
        q = q if keep is None else jnp.where(keep, q, 0)
        q = within_ball(q, radius) if weights is None else within_ball(weights * q, radius) / weights
        sums = member.T @ q
        return Release(sums, sums.sum(axis=1))

    return total(users, block_sums)


def stddevs(radius: Scalar, noise: Scalar) -> tuple[Scalar, Scalar]:
    """Standard deviations of the noise on an entry of the sums and on a mass."""
    sensitivity = math.sqrt(1 + MASS_WEIGHT**2)
    return noise * radius * sensitivity, noise * sensitivity / MASS_WEIGHT


def noisy(key: Key, exact: Release, radius: Scalar, noise: Scalar) -> Release:
    """Add noise to a release: a Gaussian mechanism with noise multiplier ``noise``."""
    of_sums, of_masses = jax.random.split(key)
    on_sums, on_masses = stddevs(radius, noise)
    return Release(
        add_gaussian(of_sums, exact.sums, on_sums, "sums of a round"),
        add_gaussian(of_masses, exact.masses, on_masses, "masses of a round"),
    )


@full_precision.products
def release_of_all(key: Key, users: Users, *, radius: Scalar, noise: Scalar) -> Release:
    """Noisy sum of all users' histograms, as sums [1, d] and masses [1]; for accounting, this is one release."""
    everyone = jnp.full((1, users.tokens), 1 / users.tokens, users.count.dtype)
    return noisy(key, clipped_sums(users, everyone, radius), radius, noise)


def private_mean(release: Release, floor: Scalar) -> Array:
    """Private FedAvg: the floored mean histogram, [d], from `release_of_all`."""
    return floored(release.sums[0] / jnp.maximum(release.masses[0], 1), floor)


def private_start(key: Key, mean: Array, clusters: int, spread: Scalar, floor: Scalar) -> Array:
    """Initial centers ``mean * exp(spread N(0, I))``, [k, d], from a private mean, at no further privacy cost."""
    factors = jnp.exp(spread * jax.random.normal(key, (clusters, mean.shape[-1]), mean.dtype))
    return floored(mean * factors, floor)


def shrunk(release: Release, mean: Array, stddev: Scalar | Array) -> Array:
    r"""Shrink noisy centers toward the private mean; each entry has its own (Wiener) weight, [k, d].

    .. math:: \bar q_x + \frac{t_x}{t_x + v_k} (S_{kx} / M_k - \bar q_x), \qquad v_k = (stddev / M_k)^2

    Here qbar is the private mean, and S_k and M_k are the sums and the mass of cluster k. t_x is the variance of the
    centers' entries for token x about qbar_x. A few noisy clusters give little information about the variance for one
    token, so t_x is modeled as :math:`r_x \bar q_x`. The factor r_x is estimated from the `NEIGHBOURS` tokens whose
    means are most similar to qbar_x. For each of these tokens, the squared distances of the centers' entries to the
    mean, minus the noise variance, are averaged with the clusters' masses as weights. If noise explains the distances,
    r_x is zero and the entry becomes qbar_x.

    Args:
      release: a noisy release.
      mean: the private mean, [d].
      stddev: standard deviation of the noise on an entry of the sums, [] or [d] by token.
    """
    masses = jnp.maximum(release.masses, 1)[:, None]
    apart = release.sums / masses - mean
    noise = (stddev / masses) ** 2
    excess = (masses / masses.sum() * (apart**2 - noise)).sum(axis=0)
    order = jnp.argsort(-mean)
    window = jnp.ones(min(NEIGHBOURS, len(mean)), mean.dtype)
    ratio = jnp.convolve(excess[order], window, mode="same") / jnp.convolve(mean[order], window, mode="same")
    signal = mean * jnp.zeros_like(mean).at[order].set(jnp.maximum(ratio, 0))
    return mean + signal / (signal + noise) * apart


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
    rate: Scalar = 1.0,
    shrink: bool = True,
    keep: Array | None = None,
) -> Array:
    """Run Setlur et al.'s Algorithm 2 with noisy sums (or IFCA if ``rate`` < 1); return floored centers, [k, d].

    Formal guarantees: for adding or removing one user, and given the noisy ``first``, the T rounds are an adaptive
    composition of T Gaussian mechanisms with noise multiplier ``noise``. ``keep`` must be public or released privately.

    Args:
      key: random key of the initial centers and of the noise.
      users: users to be clustered.
      first: result of `release_of_all`, from which the initial centers are derived. If ``keep`` is None, the total of
        each round's noisy sums over the clusters also estimates the sum of all users' histograms. Its variance is k
        (``noise`` / ``first_noise``)^2 times the variance of ``first``. The mean histogram, toward which centers are
        shrunk, is computed from the weighted mean of ``first`` and these totals.
      clusters: number of clusters k.
      rounds: number of rounds T.
      radius: clipping norm C.
      noise: noise multiplier z of each round, positive.
      first_noise: noise multiplier of ``first``, which determines the weight of ``first`` relative to the rounds.
      floor: lower bound s on an entry of a center, before the center is normalized; see `floored`.
      spread: standard deviation of the log of the random factors that turn the private mean into initial centers;
        see `private_start`.
      rate: step size from a center toward the (shrunk) noisy mean of its cluster; 1 replaces the center by this mean.
      shrink: whether noisy centers are shrunk toward the mean; see `shrunk`.
      keep: mask of the tokens used for clustering, [d] bool; for the other tokens, each center has the entries of
        the mean.
    """
    of_start, of_rounds = jax.random.split(key)
    precision = (first_noise / noise) ** 2 / clusters

    def step(t: Array, at: tuple[Array, Release]) -> tuple[Array, Release]:
        centers, pooled = at
        release = noisy(jax.random.fold_in(of_rounds, t), clipped_sums(users, centers, radius, keep), radius, noise)
        if keep is None:
            share = precision / (1 + (t + 1) * precision)  # precisions are relative to the first release
            pooled = jax.tree.map(lambda p, r: p + share * (r.sum(axis=0) - p), pooled, release)
        else:
            of_kept = jnp.where(keep, private_mean(pooled, floor), 0).sum()
            release = release._replace(masses=release.masses / jnp.maximum(of_kept, floor))
        mean = private_mean(pooled, floor)
        if shrink:
            means = shrunk(release, mean, stddevs(radius, noise)[0])
        else:
            means = release.sums / jnp.maximum(release.masses, 1)[:, None]
        means = floored(means if keep is None else jnp.where(keep, means, mean), floor)
        return floored(centers + rate * (means - centers), floor), pooled

    start = private_start(of_start, private_mean(first, floor), clusters, spread, floor)
    return jax.lax.fori_loop(0, rounds, step, (start, first))[0]


def denoised(noisy: Array, stddev: Scalar | Array, floor: Scalar) -> Array:
    r"""Denoise every token's share by its empirical-Bayes posterior mean, [d], floored and normalized.

    The noisy value y_x is normal about the share p_x with a known variance v_x. The shares are modeled as draws from
    an unknown prior, a mixture of normal distributions with means g_j and standard deviations h g_j. The means are
    equally spaced on the logarithmic scale, with step h. EM finds the maximum-likelihood weights w_j, and the estimate
    is the posterior mean:

    .. math:: w_j \leftarrow \frac1d \sum_x r_{xj}, \qquad r_{xj} \propto w_j N(y_x; g_j, v_x + h^2 g_j^2),
       \qquad \hat p_x = \sum_j r_{xj} \frac{g_j v_x + y_x h^2 g_j^2}{v_x + h^2 g_j^2}

    Of all estimates, the posterior mean of the shares p has the smallest expected KL(p || estimate). Setlur et al.
    (2023) replace negative values by the floor. If a share is far below the noise's standard deviation, its noisy value
    is negative with a probability of about one half, and the token is then treated as nearly impossible. With little
    noise both methods return the release unchanged. This function only post-processes a release and costs no privacy.

    References: Kiefer and Wolfowitz 1956; Koenker and Mizera 2014, "Convex optimization, shape constraints, compound
    decisions, and empirical Bayes rules"; normal mixtures on a grid: Stephens 2017, "False discovery rates: a new
    deal".

    Args:
      noisy: noisy shares, [d].
      stddev: standard deviation of the noise, [] or [d], positive.
      floor: lower bound s on a share, before the shares are normalized; see `floored`.
    """
    y = noisy[:, None]
    variance = jnp.broadcast_to(jnp.asarray(stddev, noisy.dtype), noisy.shape)[:, None] ** 2
    logs = jnp.linspace(jnp.log(floor), jnp.log(jnp.maximum(noisy.max(), 10 * floor)), GRID, dtype=noisy.dtype)
    values, own = jnp.exp(logs), (jnp.exp(logs) * (logs[1] - logs[0])) ** 2
    whole = variance + own
    # Scaling each token's likelihoods changes neither the posterior nor the weights.
    likelihood = jax.nn.softmax(-0.5 * ((y - values) ** 2 / whole + jnp.log(whole)), axis=1)

    def posterior(prior: Array) -> Array:
        joint = likelihood * prior
        return joint / jnp.maximum(joint.sum(axis=1, keepdims=True), jnp.finfo(noisy.dtype).tiny)

    even = jnp.full(GRID, 1 / GRID, noisy.dtype)
    prior = jax.lax.fori_loop(0, STEPS, lambda _, prior: posterior(prior).mean(axis=0), even)
    return floored((posterior(prior) * (values * variance + y * own) / whole).sum(axis=1), floor)


class MeanEstimate(NamedTuple):
    """Estimate of the mean histogram from several releases: values and precisions (inverse variances), [d] each."""

    value: Array
    precision: Array


def initial_mean(release: Release, radius: Scalar, noise: Scalar) -> MeanEstimate:
    """Mean and precision from the result of `release_of_all`."""
    mass = jnp.maximum(release.masses[0], 1)
    value = release.sums[0] / mass
    return MeanEstimate(value, jnp.full_like(value, (mass / stddevs(radius, noise)[0]) ** 2))


def denoised_mean(known: MeanEstimate, floor: Scalar) -> Array:
    """Denoised mean, [d]."""
    return denoised(known.value, 1 / jnp.sqrt(known.precision), floor)


def standard_weights(mean: Array) -> Array:
    """Standardizing weights w, [d], from a private mean [d]."""
    return 1 / jnp.sqrt(mean + LEAST / len(mean))


@full_precision.products
def noisy_sums(key: Key, users: Users, centers: Array, weights: Array, noise: Scalar) -> Release:
    """Release of a round: noisy sums [k, d] over the users nearest to each center, and their totals as masses [k].

    Formal guarantees: this is a Gaussian mechanism with noise multiplier ``noise`` for adding or removing one user, if
    the weights are public, or were released privately. A user is in one cluster, and changes ``weights * sums`` by at
    most `REACH` in L2 norm.
    """
    exact = clipped_sums(users, centers, REACH, weights=weights).sums
    sums = add_gaussian(key, exact * weights, noise * REACH, "standardized sums of a round") / weights
    return Release(sums, sums.sum(axis=1))


@full_precision.products
def cluster_standardised(
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
    r"""Run Setlur et al.'s Algorithm 2 with noisy sums of standardized histograms; return the floored centers, [k, d].

    A small error e of a center P increases the loss by :math:`\frac12 \sum_x e_x^2 / P_x`. Noise of equal size on all
    tokens would thus do most harm at rare tokens. The histograms are therefore standardized by the private mean qbar,
    as in DimRed and in the second step of Setlur et al. (2023). With weights :math:`w_x = (\bar q_x + b)^{-1/2}` and a
    small constant b, a user's :math:`w \circ \hat Q_u` is clipped to norm R (`REACH`), and the noise on the sum of
    token x has standard deviation :math:`z R / w_x`. The weights depend only on released vectors. Most standardized
    histograms have norms between two and five, and few have norms below one. With R = 1, nearly all histograms are
    scaled down to norm 1, so that users have the same influence.

    The clusters' masses are the totals of their noisy sums over all tokens. They need no separate release, because the
    noise on a total has standard deviation :math:`z R (\sum_x w_x^{-2})^{1/2}`, only about z.

    Each round's sums also give an estimate of the mean histogram. It is combined with the earlier estimates, weighted
    by their precisions, and the result is `denoised`. With one cluster, the method is FedAvg with T + 1 releases.

    Formal guarantees: as in `cluster`. Given the noisy ``first``, the rounds are T adaptively composed Gaussian
    mechanisms with noise multiplier ``noise``.

    Args:
      key: random key of the initial centers and of the noise.
      users: users to be clustered.
      first: result of `release_of_all`, in which histograms are clipped without the weights w.
      clusters: number of clusters k.
      rounds: number of rounds T.
      radius: clipping norm C of ``first``.
      noise: noise multiplier z of each round, positive.
      first_noise: noise multiplier of ``first``.
      floor: lower bound s on an entry of a center, before the center is normalized; see `floored`.
      spread: standard deviation of the log of the random factors that turn the private mean into initial centers;
        see `private_start`.
    """
    of_start, of_rounds = jax.random.split(key)

    def step(t: Array, at: tuple[Array, Array, MeanEstimate]) -> tuple[Array, Array, MeanEstimate]:
        centers, mean, known = at
        weights = standard_weights(mean)
        release = noisy_sums(jax.random.fold_in(of_rounds, t), users, centers, weights, noise)
        mass = jnp.maximum(release.masses.sum(), 1)
        precision = (mass * weights / (noise * REACH)) ** 2 / clusters
        total = known.precision + precision
        value = known.value + precision / total * (release.sums.sum(axis=0) / mass - known.value)
        known = MeanEstimate(value, total)
        mean = denoised_mean(known, floor)
        return floored(shrunk(release, mean, noise * REACH / weights), floor), mean, known

    known = initial_mean(first, radius, first_noise)
    mean = denoised_mean(known, floor)
    start = private_start(of_start, mean, clusters, spread, floor)
    return jax.lax.fori_loop(0, rounds, step, (start, mean, known))[0]


def plan(multipliers: Iterable[float], radius: float | None = None) -> PrivacyPlan:
    """Privacy plan of a run that releases the mean, the sums of each round and, with DimRed, the second moment.

    Implements: Setlur et al. 2023, Definition 2.1.

    Args:
      multipliers: noise multiplier of each release.
      radius: clipping norm; None if not stated.

    Raises:
      JaxpflError: as in `PrivacyPlan`.
    """
    return PrivacyPlan(CentralNoise(combined(multipliers), clipping_norm=radius), Full(), 1)


def divided(noise: Scalar, others: Scalar, share: float) -> tuple[Scalar, Scalar]:
    r"""Split one release with noise multiplier z (``noise``) into a first release and ``others`` further releases.

    All these releases together are as private as the one release. The first release uses the fraction c (``share``) of
    the budget: :math:`z_1 = z / \sqrt c`. Each of the r further releases has :math:`z_r = z \sqrt{r / (1 - c)}`, so
    that :math:`z_1^{-2} + r z_r^{-2} = z^{-2}` (`descriptions.combined`).
    """
    return noise / share**0.5, noise * (others / (1 - share)) ** 0.5


def calibrated(epsilon: float, delta: float, releases: int, radius: float | None = None) -> float:
    """Find the smallest noise multiplier for which all ``releases`` releases together are (eps, delta)-DP.

    The privacy loss is computed by PLD accounting.

    Raises:
      JaxpflError: as in `calibrate`.
    """
    one = PrivacyPlan(CentralNoise(1.0, clipping_norm=radius, releases=releases), Full(), 1)
    noise = calibrate(one, epsilon, delta).noise
    assert isinstance(noise, CentralNoise)
    return noise.noise_multiplier
