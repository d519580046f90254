"""Selection of every method's settings on validation users, with equally many tries for each.

Under privacy both sides of a try are validation users: a method learns from three quarters of them (with ``folds`` 4)
and is scored on the others. Noise is scaled by their number over the users', so that it is the same in a mean. Only the
number of the users, which counts as public, is used, so that their eps holds for all results; the validation users are
public, and no claim covers them. Without privacy methods learn from the users themselves, and are scored on the
validation users.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators.histograms import base as histogram
from jaxpfl.estimators.histograms import tuning as histogram_tuning
from jaxpfl.estimators.histograms.base import Users
from jaxpfl.studies.histogram.methods import (
    BLENDED,
    LAMBDAS,
    METHODS,
    ONE_RELEASE,
    PRIVATE_METHODS,
    Choice,
    exact_centers,
    given_choices,
    one_release,
    private_centers,
)
from jaxpfl.studies.histogram.settings import Group, HistogramSettings, Prepared

RADII = (0.02, 1.0)
"""Least and largest C that FedAvg tries."""
BASELINE = "FedAvg"


class Tuned(NamedTuple):
    """Tries and chosen settings of one column.

    Attributes:
      choices: of every method; k alone counts without privacy.
      tries: of every method: its settings, their loss and whether a blend of centers gave it.
      best: the row, `BASELINE`'s aside, of the least loss on the validation users.
    """

    choices: dict[str, Choice]
    tries: dict[str, list[dict[str, Any]]]
    best: str


def grid(method: str, given: HistogramSettings) -> list[Choice]:
    """Settings that a private method tries."""
    product = itertools.product(given.try_clusters, given.try_rounds, given.try_radii, given.try_shares)
    choices = [Choice(*values) for values in product]
    if method in ONE_RELEASE:
        return [one_release(float(radius)) for radius in np.geomspace(*RADII, len(choices))]
    return choices


def private(given: HistogramSettings, data: Prepared, alone: Mapping[str, float]) -> dict[str, Tuned]:
    """Choose settings for every column, from its noise multiplier of a single release."""
    group = data.validation
    number = int(group.users.number)
    rng = np.random.default_rng(given.seed)
    fold = histogram.in_blocks(rng.permutation(number) % given.folds, group.users, fill=-1)
    key = _key(given, 2)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {column: {} for column in alone}
    for method in PRIVATE_METHODS:
        choices = grid(method, given)
        for k in dict.fromkeys(choice.clusters for choice in choices):
            own = [choice for choice in choices if choice.clusters == k]
            of_grid = full_precision.jit(partial(_scores, method, k, given))
            for column, z in alone.items():
                traced = Choice(k, *(jnp.array(part) for part in list(zip(*own, strict=True))[1:]))
                losses = np.asarray(of_grid(key, group, fold, data.clients.users.number, z, traced))
                tries = [_tried(choice, loss) for choice, loss in zip(own, losses, strict=True)]
                found[column].setdefault(method, []).extend(tries)
    return {column: _chosen(tries) for column, tries in found.items()}


def exact(given: HistogramSettings, data: Prepared) -> Tuned:
    """Choose every method's k without privacy."""
    key = _key(given, 3)
    tries: dict[str, list[dict[str, Any]]] = {}
    for method in METHODS:
        for k in (1,) if method == BASELINE else given.try_clusters:
            scores = full_precision.jit(partial(_exact_scores, method, k, given))
            losses = np.asarray(scores(key, data.clients.users, data.validation))
            tries.setdefault(method, []).append(_tried(Choice(k, given.rounds, 0.0, 0.0), losses))
    return _chosen(tries)


def choices_of(tuned: Tuned | None, given: HistogramSettings) -> dict[str, Choice]:
    """Settings of a private column: the chosen ones, or those given."""
    return given_choices(given) if tuned is None else tuned.choices


def _key(given: HistogramSettings, purpose: int) -> Key:
    return jax.random.split(jax.random.fold_in(jax.random.key(given.seed), 2**31 + purpose), 1)[0]


def _scores(
    method: str,
    clusters: int,
    given: HistogramSettings,
    key: Key,
    group: Group,
    fold: Array,
    number: Scalar,
    alone: Scalar,
    choices: Choice,
) -> Array:
    """Mean losses over folds of settings that share k, [g, kinds, lambdas]."""
    users = group.users

    def of_fold(i: Scalar, choice: Choice) -> Array:
        others = histogram.only(users, users.valid & (fold != i))
        mine = Group(histogram.only(users, fold == i), group.truth)
        noise = alone * others.number / number
        return _losses(method, private_centers(method, key, others, noise, choice, given), mine, given.floor)

    def of_choice(values: tuple[Scalar, ...]) -> Array:
        folds = jnp.arange(given.folds)
        return jax.lax.map(lambda i: of_fold(i, Choice(clusters, *values)), folds).mean(axis=0)

    return jax.lax.map(of_choice, choices[1:])


def _exact_scores(method: str, clusters: int, given: HistogramSettings, key: Key, users: Users, group: Group) -> Array:
    """Losses without privacy, [kinds, lambdas]."""
    return _losses(method, exact_centers(method, key, users, clusters, given), group, given.floor)


def _losses(method: str, centers: Array, group: Group, floor: Scalar) -> Array:
    """Losses [kinds, lambdas]: from the nearest center, and from a blend if the method has that row."""
    points = [histogram_tuning.of_nearest(centers)] + [histogram_tuning.between(centers)] * (method in BLENDED)
    candidates = jnp.array(LAMBDAS)
    return jnp.stack([histogram_tuning.tuned(*group, candidates, p, histogram_tuning.fixed, floor)[1] for p in points])


def _tried(choice: Choice, losses: np.ndarray) -> dict[str, Any]:
    by_kind = losses.min(axis=1)
    kind = int(np.nanargmin(by_kind))
    return choice._asdict() | {"loss": float(by_kind[kind]), "blended": bool(kind)}


def _chosen(tries: dict[str, list[dict[str, Any]]]) -> Tuned:
    best = {method: min(own, key=lambda t: t["loss"]) for method, own in tries.items()}
    first = min((method for method in best if method != BASELINE), key=lambda method: best[method]["loss"])
    row = f"{first}, blended + FT" if best[first]["blended"] else f"{first} + FT"
    choices = {method: Choice(*(own[name] for name in Choice._fields)) for method, own in best.items()}
    return Tuned(choices, tries, row)
