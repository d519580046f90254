"""Rows of the histogram table: centers by every non-private method, and the users' estimates from any centers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxpfl.core.types import Array, Key
from jaxpfl.estimators.histograms import base as histogram
from jaxpfl.estimators.histograms import clusters as histogram_clusters
from jaxpfl.estimators.histograms import dimred as histogram_dimred
from jaxpfl.estimators.histograms import dirichlet as histogram_dirichlet
from jaxpfl.estimators.histograms import private as histogram_private
from jaxpfl.estimators.histograms import start as histogram_start
from jaxpfl.estimators.histograms import tuning as histogram_tuning
from jaxpfl.estimators.histograms.base import Users, floored
from jaxpfl.estimators.histograms.tuning import Personal, by_size, finetuned, fixed, local, loss, losses, toward
from jaxpfl.studies.histograms.data import Prepared
from jaxpfl.studies.histograms.settings import HistogramSettings

LAMBDAS = tuple(np.linspace(0.05, 0.95, 10).round(3).tolist())
ALPHAS = tuple(np.geomspace(10, 3000, 10).round(1).tolist())
METHODS = ("FedAvg", "IFCA", "Algorithm 2 + DimRed", "Algorithm 2", "Standardised")
BLENDED = ("Algorithm 2", "Standardised")
"""Methods whose users also blend the centers."""
PUBLIC = "Validation users' mean"
BY_SIZE = ("FedAvg", "Algorithm 2")
"""Methods whose users also weight their own histogram by its number of tokens."""


def exact_centers(method: str, key: Key, users: Users, clusters: int, given: HistogramSettings) -> Array:
    """Centers by a non-private method, [1 or k, d].

    Without noise ``Standardised`` is Algorithm 2 from random multiples of the mean.
    """
    k, s = clusters, given.floor
    mean = floored(histogram.mean(users), s)
    if method == "FedAvg":
        return mean[None]
    if method == "Standardised":
        start = histogram_private.private_start(key, mean, k, 1.0, s)
        return histogram_clusters.cluster(users, start, given.rounds, floor=s).centers
    start = histogram_start.far_apart(key, users, k, temperature=given.temperature, floor=s, direction=given.direction)
    if method == "IFCA":
        return histogram_clusters.cluster(users, start, given.rounds, floor=s, rate=given.ifca_rate).centers
    if method == "Algorithm 2":
        return histogram_clusters.cluster(users, start, given.rounds, floor=s).centers
    everything = jnp.arange(users.tokens)
    keep = kept_tokens(histogram_dimred.second_moment(users, mean, everything), everything, k, given)
    return histogram_clusters.cluster(
        users, start, given.rounds, floor=s, complete=lambda centers: jnp.where(keep, centers, mean)
    ).centers


def kept_tokens(moment: Array, candidates: Array, clusters: int, given: HistogramSettings) -> Array:
    """Mask of the tokens that DimRed keeps, [d] bool."""
    found = histogram_dimred.directions(moment, candidates, max(clusters - 1, 1))
    threshold = histogram_dimred.threshold_of(found, given.kept_tokens)
    return histogram_dimred.kept(found, given.tokens, threshold)


def rows_of(
    centers: Mapping[str, Array], data: Prepared, given: HistogramSettings
) -> dict[str, tuple[Personal, Array]]:
    """All rows of the table for these centers: the estimates, and the lambda or alpha that was chosen (NaN if none).

    Each row's own is tuned on the validation users alone.
    """
    s, rows = given.floor, {}
    none = jnp.asarray(jnp.nan)

    def lam(point: Personal) -> tuple[Personal, Array]:
        best = given.lam
        if best is None:
            best = histogram_tuning.tuned(*data.validation, jnp.array(LAMBDAS), point, fixed, s)[0]
        return toward(point, fixed(best), s), jnp.asarray(best)

    for name, at in centers.items():
        rows[name] = finetuned(at, fixed(1.0), s), none
        nearest = histogram_tuning.of_nearest(at)
        rows[f"{name} + FT"] = lam(nearest)
        if name in BLENDED:
            rows[f"{name}, blended + FT"] = lam(histogram_tuning.between(at))
        if name in BY_SIZE:
            alpha = histogram_tuning.tuned(*data.validation, jnp.array(ALPHAS), nearest, by_size, s)[0]
            rows[f"{name} + FT by m_u"] = toward(nearest, by_size(alpha), s), alpha
    return rows


def exact_rows(
    key: Key, data: Prepared, clusters: Mapping[str, int], given: HistogramSettings
) -> dict[str, tuple[Personal, Array]]:
    """All non-private rows except `reference_rows`.

    Args:
      key: of the starts.
      data: the users.
      clusters: k of every method.
      given: everything else.
    """
    centers = {name: exact_centers(name, key, data.clients.users, clusters[name], given) for name in METHODS}
    return {"Local": (local(given.floor), jnp.asarray(jnp.nan))} | rows_of(centers, data, given)


def reference_rows(centers: Array, data: Prepared, given: HistogramSettings) -> dict[str, tuple[Personal, Array]]:
    """Reference rows from Dirichlet models around Algorithm 2's centers [k, d].

    They are a Dirichlet distribution fitted to each cluster, the mixture of them by EM, and for a known population its
    Bayes estimate, which is optimal. Also the validation users' mean, fine-tuned, which costs the users no privacy and
    is the baseline of FedAvg under much noise.
    """
    s, users, none = given.floor, data.clients.users, jnp.asarray(jnp.nan)
    start = histogram_dirichlet.around(centers, 100.0)
    hard = histogram_dirichlet.em(users, start, given.em_steps, hard=centers).mixture
    mixture = histogram_dirichlet.em(users, start, given.em_steps).mixture
    public = floored(histogram.mean(data.validation.users), s)[None]
    rows = {
        f"{PUBLIC} + FT": rows_of({PUBLIC: public}, data, given)[f"{PUBLIC} + FT"],
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
    """Scores of a row: mean loss of the users and of unseen ones, the lambda or alpha, and each user's loss [b, c]."""

    loss: Array
    unseen: Array
    chosen: Array
    users: Array


def score(rows: dict[str, tuple[Personal, Array]], data: Prepared) -> dict[str, Scored]:
    """Score every row; unseen users are assigned and fine-tuned by their own counts alone."""
    found = {}
    for name, (personal, chosen) in rows.items():
        own = losses(*data.clients, personal)
        mean = own.sum() / jnp.maximum(data.clients.users.number, 1)
        found[name] = Scored(mean, loss(*data.unseen, personal), chosen, own)
    return found
