"""Registry of partitions. A partition assigns the examples of a data set to clients; it is drawn with NumPy.

The random generator of a partition depends only on the split seed. A seed gives the same split in every run and on
every platform: partitions draw permutations and integers with NumPy, and all other random numbers with
`jaxpfl.data.portable`. Every partition except ``natural`` assigns each training example to exactly one client.
``natural`` leaves out the examples of users that were not chosen; `jaxpfl.data.summary` counts these examples. The
official test set is divided so that each client's test set resembles its training set: both have the same users, or
similar proportions of the same classes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.core.settings import COUNT, POSITIVE, Range, read_help, setting
from jaxpfl.data.partition.deals import (
    Indices,
    choose_users,
    count_classes,
    deal_alike,
    deal_classes,
    deal_superclasses,
    draw_clusters,
    examples_of,
    iid,
    shards,
    split_by_class,
)
from jaxpfl.data.partition.skew import dirichlet_per_class, dirichlet_per_client, lognormal, lognormal_by_class
from jaxpfl.data.sources.base import Source, are_unseen
from jaxpfl.support.errors import JaxpflError, unknown_name


class Assignment(NamedTuple):
    """Indices of each client's examples in the training set and in the official test set.

    Attributes:
      train: m disjoint arrays of indices.
      test: m disjoint arrays of indices; None if there is no official test set, or none of its users
        is a training user.
      labels: for the partition ``clusters``, the label that each client gives to each class, [m, num_classes] int32.
        For other partitions, None: the clients use the labels of the data set.
    """

    train: list[Indices]
    test: list[Indices] | None
    labels: np.ndarray | None = None


@read_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """Options of all partitions. An option that is not given is None; `PARTITIONS` lists each partition's options."""

    classes_per_client: int | None = setting(None, range=COUNT)
    """Number of classes that each client holds, for the partition classes."""
    shards_per_client: int | None = setting(None, range=COUNT)
    """Number of shards (pieces of the examples, sorted by class) that each client holds, for the partition shards
    (default: 2)."""
    alpha: float | None = setting(None, range=POSITIVE)
    """Dirichlet concentration, for the partitions dirichlet and dirichlet-class; clients with a small value have few
    classes, and clients with a large value are nearly iid."""
    min_examples: int | None = setting(None)
    """Minimum number of examples per client, for the partition dirichlet-class, and for classes with a sigma
    (default: 10)."""
    sigma: float | None = setting(None, range=Range(0, math.inf, False, True))
    """Standard deviation of the logarithm of the clients' sizes, for the partition lognormal, and for classes with
    unequal sizes."""
    users_per_client: int | None = setting(None, range=COUNT)
    """Number of users (writers, speakers) that make up each client, for the partition natural (default: 1)."""
    superclasses_per_client: int | None = setting(None, range=COUNT)
    """Number of superclasses that each client holds, for the partition superclasses."""
    clusters: int | None = setting(None, range=COUNT)
    """Number of clusters of clients, each with its own permutation of the labels, for the partition clusters."""


_LEAST = 10  # default minimum number of examples of a client, where sizes are random (Lin et al. 2020)


def check_options(name: str, options: PartitionOptions) -> None:
    """Check that a partition takes the given options.

    Raises:
      JaxpflError: if the partition is unknown (the message suggests the nearest name), or does not take an option.
    """
    takes = options_of(name)
    for field in dataclasses.fields(options):
        if getattr(options, field.name) is not None and field.name not in takes:
            allowed = " and ".join(map(_words, takes)) or "no options"
            raise JaxpflError(
                f"the partition {name!r} does not take {_words(field.name)} = {getattr(options, field.name)}: it takes "
                f"{allowed}"
            )


def assign(name: str, source: Source, m: int | None, options: PartitionOptions, rng: np.random.Generator) -> Assignment:
    """Assign the examples of a source to m clients by the partition ``name``.

    The training set is assigned first, so that its split is the same with and without a test set.

    Raises:
      JaxpflError: if an option is missing or the split is impossible.
    """
    if name == "natural":
        return _natural(source, m, options, rng)
    if m is None:
        raise JaxpflError(f"the partition {name!r} requires the number of clients")
    return PARTITIONS[name][1](source, m, options, rng)


def options_of(name: str) -> tuple[str, ...]:
    """Return the options (fields of `PartitionOptions`) that a partition takes.

    Raises:
      JaxpflError: if the name is unknown.
    """
    if name not in PARTITIONS:
        raise unknown_name("partition", name, PARTITIONS)
    return PARTITIONS[name][0]


def _words(option: str) -> str:
    return option.replace("_", " ")


def _required(value: Any, partition: str, what: str) -> Any:
    if value is None:
        raise JaxpflError(f"the partition {partition!r} requires {what}")
    return value


def _alike(source: Source, train: list[Indices], rng: np.random.Generator) -> Assignment:
    """Assign the test set so that each client's test set has the class proportions of its training set."""
    if source.y_test is None:
        return Assignment(train, None)
    return Assignment(train, deal_alike(source.y_test, count_classes(source.y_train, train, source.num_classes), rng))


def _assign_hands(source: Source, held: np.ndarray, rng: np.random.Generator) -> Assignment:
    """Split the training and test sets by ``held`` [m, k], the classes that each client holds in both sets."""
    train = split_by_class(source.y_train, held, rng)
    test = None if source.y_test is None else split_by_class(source.y_test, held, rng, allow_none=True)
    return Assignment(train, test)


def _iid(source: Source, m: int, options: PartitionOptions, rng: np.random.Generator) -> Assignment:
    train = iid(source.y_train, m, rng)
    return Assignment(train, None if source.y_test is None else iid(source.y_test, m, rng))


def _clusters(source: Source, m: int, options: PartitionOptions, rng: np.random.Generator) -> Assignment:
    k = _required(options.clusters, "clusters", "the number of clusters")
    # The clusters are drawn first, so that `federate.true_clusters` can repeat the draw from the seed alone.
    drawn = draw_clusters(m, k, source.num_classes, rng)
    return _iid(source, m, options, rng)._replace(labels=drawn.labels[drawn.member])


def _classes(source: Source, m: int, options: PartitionOptions, rng: np.random.Generator) -> Assignment:
    k = _required(options.classes_per_client, "classes", "the number of classes per client")
    if options.sigma is None and options.min_examples is not None:
        raise JaxpflError(
            "the partition 'classes' takes min_examples only with sigma: set sigma, or leave out min_examples"
        )
    held = deal_classes(np.unique(source.y_train), m, k, rng)
    if options.sigma is None:
        return _assign_hands(source, held, rng)
    least = _least(options)
    return _alike(source, lognormal_by_class(source.y_train, held, options.sigma, least, source.num_classes, rng), rng)


def _superclasses(source: Source, m: int, options: PartitionOptions, rng: np.random.Generator) -> Assignment:
    k = _required(options.superclasses_per_client, "superclasses", "the number of superclasses per client")
    if source.superclasses is None:
        raise JaxpflError(f"data set {source.name!r} has no superclasses: use cifar100, or another partition")
    held = deal_superclasses(source.superclasses, m, k, rng)
    return _assign_hands(source, np.where(np.isin(held, source.y_train), held, -1), rng)


def _shards(source: Source, m: int, options: PartitionOptions, rng: np.random.Generator) -> Assignment:
    s = 2 if options.shards_per_client is None else options.shards_per_client
    return _alike(source, shards(source.y_train, m, s, rng), rng)


def _dirichlet(source: Source, m: int, options: PartitionOptions, rng: np.random.Generator) -> Assignment:
    alpha = _required(options.alpha, "dirichlet", "alpha")
    return _alike(source, dirichlet_per_client(source.y_train, m, alpha, source.num_classes, rng), rng)


def _dirichlet_class(source: Source, m: int, options: PartitionOptions, rng: np.random.Generator) -> Assignment:
    alpha = _required(options.alpha, "dirichlet-class", "alpha")
    return _alike(source, dirichlet_per_class(source.y_train, m, alpha, _least(options), source.num_classes, rng), rng)


def _least(options: PartitionOptions) -> int:
    return _LEAST if options.min_examples is None else options.min_examples


def _lognormal(source: Source, m: int, options: PartitionOptions, rng: np.random.Generator) -> Assignment:
    sigma = _required(options.sigma, "lognormal", "sigma")
    return _alike(source, lognormal(source.y_train, m, sigma, rng), rng)


def _natural(source: Source, m: int | None, options: PartitionOptions, rng: np.random.Generator) -> Assignment:
    g = 1 if options.users_per_client is None else options.users_per_client
    if source.users_train is None:
        raise JaxpflError(f"data set {source.name!r} has no users, which the partition 'natural' requires")
    groups = choose_users(np.unique(source.users_train), m, g, rng)
    train = examples_of(source.users_train, groups)
    # If the test set has only other users, return none: the caller then splits each client's own examples.
    if source.users_test is None or are_unseen(source).all():
        return Assignment(train, None)
    return Assignment(train, examples_of(source.users_test, groups))


CLASSLESS = ("iid", "lognormal", "natural")
"""Partitions that do not use the labels, and therefore allow labels that are real numbers or vectors."""

PARTITIONS: dict[str, tuple[tuple[str, ...], Callable[..., Assignment]]] = {
    "iid": ((), _iid),
    "classes": (("classes_per_client", "sigma", "min_examples"), _classes),
    "shards": (("shards_per_client",), _shards),
    "pathological": (("shards_per_client",), _shards),
    "dirichlet": (("alpha",), _dirichlet),
    "dirichlet-class": (("alpha", "min_examples"), _dirichlet_class),
    "lognormal": (("sigma",), _lognormal),
    "natural": (("users_per_client",), _natural),
    "superclasses": (("superclasses_per_client",), _superclasses),
    "clusters": (("clusters",), _clusters),
}
"""Registered partitions: the options that each takes, and a function (source, m, options, rng) -> `Assignment`.
"pathological" is another name for "shards"."""
