"""The rows of the histogram table: centers by every method, and what users make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.errors import JaxpflError
from jaxpfl.estimate.histogram_data import HistogramData, Prepared
from jaxpfl.estimate.settings import at_least, check_privacy
from jaxpfl.estimators import (
    histogram,
    histogram_clusters,
    histogram_dimred,
    histogram_dirichlet,
    histogram_printed,
    histogram_private,
    histogram_start,
)
from jaxpfl.estimators.histogram import Users, floored
from jaxpfl.estimators.histogram_start import Direction
from jaxpfl.estimators.histogram_tuning import Personal, blended, by_size, finetuned, fixed, local, loss, losses, tuned
from jaxpfl.privacy import checks
from jaxpfl.types import Array, Key, Scalar

LAMBDAS = tuple(np.linspace(0.05, 0.95, 10).round(3).tolist())
ALPHAS = tuple(np.geomspace(10, 3000, 10).round(1).tolist())
MOMENT_RADIUS = 1.0
"""B: public, the norm of a user's standardised deviation over the candidate tokens."""


@dataclass(frozen=True)
class HistogramSettings(HistogramData):
    """Users' histograms, estimated alone, together, in clusters, and under privacy."""

    clusters: int = 10
    """k."""
    rounds: int = 20
    """T of Algorithm 2 and of IFCA without privacy."""
    ifca_rate: float = 0.1
    """Of IFCA's steps."""
    temperature: float = 0.5
    """t of Algorithm 1."""
    direction: Direction = "printed"
    """Of Algorithm 1's divergence: as printed, or as in the objective."""
    kept_tokens: int = 100
    """Tokens that DimRed keeps."""
    candidates: int = 200
    """Tokens that private DimRed looks at, the most frequent by the private mean."""
    lam: float | None = None
    """lambda of fine-tuning; tuned on the validation users unless given."""
    epsilon: tuple[float, ...] = (1.0, 3.0, 8.0, 15.0)
    """Privacy of a user, a column of the table each; everything a row releases is counted."""
    delta: float = 1e-10
    """Of each eps."""
    private_clusters: int | None = None
    """k under privacy; --clusters unless given."""
    private_rounds: int = 5
    """T under privacy."""
    mean_share: float = 0.5
    """Of a clustering's privacy budget that its release of the mean takes; its rounds have the rest."""
    radius: float = 0.25
    """C: public, the L2 norm that histograms are clipped to before they are added up."""
    clip: float = 1.0
    """c of Algorithm 3 as printed."""
    floor: float = 1e-6
    """s: the least estimate of any token, before normalising; local's score is a function of it."""
    em_steps: int = 10
    """Of the Dirichlet mixture's EM, and of the Dirichlet fit of each cluster."""
    repetitions: int = 20
    """Runs, each with its own start and noise, side by side on the same users."""

    def check(self) -> None:
        """Refuses what cannot be estimated, or not be made private.

        Raises:
          JaxpflError: the name, its value, and what is allowed.
        """
        super().check()
        for name in ("clusters", "rounds", "private_rounds", "em_steps", "repetitions"):
            checks.count(name, getattr(self, name))
        if self.private_clusters is not None:
            checks.count("private_clusters", self.private_clusters)
        for name in ("kept_tokens", "candidates"):
            checks.count(name, getattr(self, name), self.tokens)
        for name in ("radius", "clip"):
            checks.positive(name, getattr(self, name))
        checks.rate("ifca_rate", self.ifca_rate)
        checks.probability("mean_share", self.mean_share)
        at_least("temperature", self.temperature, 0)
        if not 0 < self.floor < 1 / self.tokens:
            raise JaxpflError(f"floor must be > 0 and below 1/{self.tokens}, got {self.floor:g}")
        if self.lam is not None and not 0 <= self.lam <= 1:
            raise JaxpflError(f"lam must be >= 0 and <= 1, got {self.lam}")
        for epsilon in self.epsilon:
            check_privacy(epsilon, self.delta)


class Noise(NamedTuple):
    """Noise multipliers of the private rows at one eps, and Algorithm 3's eps and sigma of a call; traced scalars.

    Attributes:
      alone: of FedAvg, which releases once.
      mean: of the mean that a clustering releases first.
      rounds: of each round of a clustering.
      reduced: of DimRed's moment, and of each round after it.
    """

    alone: Scalar
    mean: Scalar
    rounds: Scalar
    reduced: Scalar
    printed_epsilon: Scalar
    printed_stddev: Scalar


def noise_of(given: HistogramSettings, epsilon: float) -> Noise:
    """What each private row needs to be (eps, delta)-DP as a whole."""
    alone = histogram_private.calibrated(epsilon, given.delta, 1, given.radius)
    mean, rounds = histogram_private.divided(alone, given.private_rounds, given.mean_share)
    reduced = histogram_private.divided(alone, given.private_rounds + 1, given.mean_share)[1]
    part = histogram_printed.of_a_call(epsilon, given.delta, given.private_rounds)
    return Noise(alone, mean, rounds, reduced, part[0], histogram_printed.gaussian_stddev(*part))


def exact_centers(key: Key, users: Users, given: HistogramSettings) -> dict[str, Array]:
    """Centers by every method without privacy, [1 or k, d] each."""
    k, s = given.clusters, given.floor
    mean = floored(histogram.mean(users), s)
    start = histogram_start.far_apart(key, users, k, temperature=given.temperature, floor=s, direction=given.direction)
    everything = jnp.arange(users.tokens)
    moment = histogram_dimred.second_moment(users, mean, everything)
    keep = _kept(moment, everything, k, given)
    return {
        "FedAvg": mean[None],
        "IFCA": histogram_clusters.cluster(users, start, given.rounds, floor=s, rate=given.ifca_rate).centers,
        "Algorithm 2 + DimRed": histogram_clusters.cluster(
            users, start, given.rounds, floor=s, complete=lambda centers: jnp.where(keep, centers, mean)
        ).centers,
        "Algorithm 2": histogram_clusters.cluster(users, start, given.rounds, floor=s).centers,
    }


def private_centers(key: Key, users: Users, noise: Noise, given: HistogramSettings) -> dict[str, Array]:
    """Centers by every private method, [1 or k, d] each; all but Algorithm 3 (printed) private as a whole."""
    k, s, t = given.private_clusters or given.clusters, given.floor, given.private_rounds
    of = dict(zip(("alone", "mean", "rounds", "moment", "start", "printed"), jax.random.split(key, 6), strict=True))

    def of_all(key: Key, z: Scalar) -> histogram_private.Release:
        return histogram_private.release_of_all(key, users, radius=given.radius, noise=z)

    alone, first = of_all(of["alone"], noise.alone), of_all(of["mean"], noise.mean)

    def clustered(z: Scalar, rate: float = 1.0, keep: Array | None = None) -> Array:
        return histogram_private.cluster(
            of["rounds"],
            users,
            first,
            k,
            t,
            radius=given.radius,
            noise=z,
            first_noise=noise.mean,
            floor=s,
            rate=rate,
            keep=keep,
        )

    mean = histogram_private.private_mean(first, s)
    candidates = histogram_dimred.candidate_tokens(mean, given.candidates)
    moment = histogram_dimred.second_moment(users, mean, candidates, MOMENT_RADIUS)
    moment = histogram_dimred.noisy_moment(of["moment"], moment, MOMENT_RADIUS, noise.reduced)
    keep = _kept(moment, candidates, k, given)
    start = histogram_start.far_apart(of["start"], users, k, temperature=given.temperature, floor=s)
    return {
        "FedAvg": histogram_private.private_mean(alone, s)[None],
        "IFCA": clustered(noise.rounds, given.ifca_rate),
        "Algorithm 2 + DimRed": clustered(noise.reduced, keep=keep),
        "Algorithm 2": clustered(noise.rounds),
        "Algorithm 3 (printed)": histogram_printed.cluster(
            of["printed"],
            users,
            start,
            t,
            epsilon=noise.printed_epsilon,
            stddev=noise.printed_stddev,
            clip=given.clip,
            floor=s,
        ),
    }


def _kept(moment: Array, candidates: Array, clusters: int, given: HistogramSettings) -> Array:
    found = histogram_dimred.directions(moment, candidates, max(clusters - 1, 1))
    threshold = histogram_dimred.threshold_of(found, given.kept_tokens)
    return histogram_dimred.kept(found, given.tokens, threshold)


def rows_of(centers: dict[str, Array], data: Prepared, given: HistogramSettings) -> dict[str, tuple[Personal, Array]]:
    """Every row of the table for these centers: the estimates, and the lambda or alpha that was chosen (NaN if none).

    Each row's own is tuned on the validation users alone.
    """
    s, rows = given.floor, {}
    none = jnp.asarray(jnp.nan)

    def choose(build: Callable[[Scalar], Personal], candidates: tuple[float, ...]) -> tuple[Personal, Array]:
        if given.lam is not None and candidates is LAMBDAS:
            return build(given.lam), jnp.asarray(given.lam)
        best = tuned(*data.validation, jnp.array(candidates), build)[0]
        return build(best), best

    for name, at in centers.items():
        rows[name] = finetuned(at, fixed(1.0), s), none
    for name, at in centers.items():
        rows[f"{name} + FT"] = choose(lambda v, at=at: finetuned(at, fixed(v), s), LAMBDAS)
    for name in ("FedAvg", "Algorithm 2"):
        rows[f"{name} + FT by m_u"] = choose(lambda v, at=centers[name]: finetuned(at, by_size(v), s), ALPHAS)
    at = centers["Algorithm 2"]
    rows["Algorithm 2, blended + FT"] = choose(lambda v: blended(at, fixed(v), s), LAMBDAS)
    return rows


def exact_rows(key: Key, data: Prepared, given: HistogramSettings) -> dict[str, tuple[Personal, Array]]:
    """All rows without privacy but `reference_rows`."""
    rows = rows_of(exact_centers(key, data.clients.users, given), data, given)
    return {"Local": (local(given.floor), jnp.asarray(jnp.nan))} | rows


def reference_rows(centers: Array, data: Prepared, given: HistogramSettings) -> dict[str, tuple[Personal, Array]]:
    """What Dirichlet distributions make of Algorithm 2's centers [k, d]: one fitted to each cluster, their mixture by
    EM, and where the population is known its Bayes estimate, which nothing beats but by chance."""
    s, users, none = given.floor, data.clients.users, jnp.asarray(jnp.nan)
    start = histogram_dirichlet.around(centers, 100.0)
    hard = histogram_dirichlet.em(users, start, given.em_steps, hard=centers).mixture
    mixture = histogram_dirichlet.em(users, start, given.em_steps).mixture
    rows = {
        "Algorithm 2, a Dirichlet each": (histogram_dirichlet.empirical_bayes(hard, centers, s), none),
        "Dirichlet mixture by EM": (histogram_dirichlet.posterior(mixture, s), none),
    }
    if data.population is None:
        return rows
    shares, known = (
        jnp.asarray(part, jnp.float32)
        for part in (data.population.shares, data.population.alpha * data.population.centers)
    )
    bayes = histogram_dirichlet.posterior(histogram_dirichlet.Mixture(shares, known), s)
    return rows | {"Bayes, population known": (bayes, none)}


class Scored(NamedTuple):
    """Of one row: the mean loss of the users and of unseen ones, the lambda or alpha, and each user's loss [b, c]."""

    loss: Array
    unseen: Array
    chosen: Array
    users: Array


def score(rows: dict[str, tuple[Personal, Array]], data: Prepared) -> dict[str, Scored]:
    """Scores every row; unseen users are assigned and fine-tuned by their own counts alone."""
    found = {}
    for name, (personal, chosen) in rows.items():
        own = losses(*data.clients, personal)
        mean = own.sum() / jnp.maximum(data.clients.users.number, 1)
        found[name] = Scored(mean, loss(*data.unseen, personal), chosen, own)
    return found
