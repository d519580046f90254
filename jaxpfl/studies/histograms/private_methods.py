"""The private methods of the histogram table: their settings, their noise, and their centers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax

from jaxpfl.core.randomness import named, numbered
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators.histograms import dimred as histogram_dimred
from jaxpfl.estimators.histograms import printed as histogram_printed
from jaxpfl.estimators.histograms import private as histogram_private
from jaxpfl.estimators.histograms import standardised as histogram_standardised
from jaxpfl.estimators.histograms import start as histogram_start
from jaxpfl.estimators.histograms.base import Users
from jaxpfl.studies.histograms.methods import kept_tokens
from jaxpfl.studies.histograms.settings import HistogramSettings

MOMENT_RADIUS = 1.0
"""B: public, the norm of a user's standardised deviation over the candidate tokens."""
ONE_RELEASE = ("FedAvg", "FedAvg, denoised")
CLUSTERINGS = ("IFCA", "Algorithm 2 + DimRed", "Algorithm 2", "Standardised")
METHODS = ONE_RELEASE + CLUSTERINGS
PRINTED = "Algorithm 3 (printed)"


class Choice(NamedTuple):
    """Settings of a private method: k, T, the clipping norm C, and the first release's share of the budget."""

    clusters: int
    rounds: Scalar
    radius: Scalar
    mean_share: Scalar


class Noise(NamedTuple):
    """Noise for one budget (eps, delta).

    Attributes:
      alone: noise multiplier of a method's only release; those with several divide it (`divided`).
      printed_epsilon: Algorithm 3 as printed: eps of each of its calls.
      printed_stddev: and their noise's standard deviation.
    """

    alone: Scalar
    printed_epsilon: Scalar
    printed_stddev: Scalar


def noise_of(given: HistogramSettings, epsilon: float) -> Noise:
    """Noise that makes each private row (eps, delta)-DP as a whole."""
    alone = histogram_private.calibrated(epsilon, given.delta, 1)
    part = histogram_printed.of_a_call(epsilon, given.delta, given.private_rounds)
    return Noise(alone, part[0], histogram_printed.gaussian_stddev(*part))


def given_choices(given: HistogramSettings) -> dict[str, Choice]:
    """Settings of every method if nothing is tuned."""
    clusters = given.private_clusters or given.clusters
    shared = Choice(clusters, given.private_rounds, given.radius, given.mean_share)
    return {name: one_release(given.radius) if name in ONE_RELEASE else shared for name in METHODS}


def one_release(radius: Scalar) -> Choice:
    """Settings of a method with a single release."""
    return Choice(1, 0, radius, 1.0)


def divided(method: str, alone: Scalar, choice: Choice) -> tuple[Scalar, Scalar, Scalar]:
    """Noise multipliers of the first release and of each other one, and the number of others."""
    if method in ONE_RELEASE:
        return alone, alone, 0
    others = choice.rounds + (method == "Algorithm 2 + DimRed")
    return *histogram_private.divided(alone, others, choice.mean_share), others


def private_centers(
    method: str, key: Key, users: Users, alone: Scalar, choice: Choice, given: HistogramSettings
) -> Array:
    """Centers by a private method, [1 or k, d]; every use of the users' data is accounted for.

    Args:
      method: of `METHODS`.
      key: of the start and of all noise; every method, budget and choice has a stream of its own by it.
      users: the users.
      alone: noise multiplier of a single release that is as private as the whole; may be traced.
      choice: k static, the others may be traced.
      given: settings outside a choice: floor, IFCA's rate, DimRed's tokens.
    """
    s, k = given.floor, choice.clusters
    key = numbered(named(key, method, given), alone, *choice)
    of_first, of_rounds, of_moment = jax.random.split(key, 3)
    first_noise, noise, _ = divided(method, alone, choice)
    first = histogram_private.release_of_all(of_first, users, radius=choice.radius, noise=first_noise)
    if method == "FedAvg":
        return histogram_private.private_mean(first, s)[None]
    if method == "FedAvg, denoised":
        known = histogram_standardised.known_of(first, choice.radius, first_noise)
        return histogram_standardised.mean_of(known, s)[None]
    how = {"radius": choice.radius, "noise": noise, "first_noise": first_noise, "floor": s}
    if method == "Standardised":
        return histogram_standardised.cluster(of_rounds, users, first, k, choice.rounds, **how)
    keep = None
    if method == "Algorithm 2 + DimRed":
        mean = histogram_private.private_mean(first, s)
        candidates = histogram_dimred.candidate_tokens(mean, given.candidates)
        moment = histogram_dimred.second_moment(users, mean, candidates, MOMENT_RADIUS)
        keep = kept_tokens(histogram_dimred.noisy_moment(of_moment, moment, MOMENT_RADIUS, noise), candidates, k, given)
    rate = given.ifca_rate if method == "IFCA" else 1.0
    return histogram_private.cluster(of_rounds, users, first, k, choice.rounds, rate=rate, keep=keep, **how)


def all_private_centers(
    key: Key, users: Users, noise: Noise, choices: Mapping[str, Choice], given: HistogramSettings
) -> dict[str, Array]:
    """Centers by every private method, and by Algorithm 3 as printed, which is not private as a whole."""
    made = {name: private_centers(name, key, users, noise.alone, choices[name], given) for name in METHODS}
    own = numbered(named(key, PRINTED, given), *noise)
    of_start, of_printed = jax.random.split(own)
    clusters = given.private_clusters or given.clusters
    start = histogram_start.far_apart(of_start, users, clusters, temperature=given.temperature, floor=given.floor)
    return made | {
        PRINTED: histogram_printed.cluster(
            of_printed,
            users,
            start,
            given.private_rounds,
            epsilon=noise.printed_epsilon,
            stddev=noise.printed_stddev,
            clip=given.clip,
            floor=given.floor,
        )
    }
