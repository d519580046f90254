"""Partitioners by name: assignments of examples to clients, by seeded NumPy on the host.

A partition is drawn from one generator, derived from the split seed alone, so that a seed gives the same split for any
run, on every platform: only permutations, integers and the draws of `jaxpfl.data.portable` are used. Every partition
assigns each training example to exactly one client, except for users that ``natural`` was not asked for
(`jaxpfl.data.summary` counts the examples left out). The official test set is dealt by the same rule.
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
    """Indices of each of m clients into the training set and the official test set.

    Attributes:
      train: m disjoint lists.
      test: m disjoint lists, or None if no official test set fits these clients (there is none, or it is of other
        users).
      labels: [m, num_classes] int32, each client's own label of each class, for "clusters"; None for the source's.
    """

    train: list[Indices]
    test: list[Indices] | None
    labels: np.ndarray | None = None


@read_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """Options of all partitioners, None if not given; each takes its own (`PARTITIONS`)."""

    classes_per_client: int | None = setting(None, range=COUNT)
    """Classes that each client holds, for the partition classes."""
    shards_per_client: int | None = setting(None, range=COUNT)
    """Shards of the examples sorted by class that each client holds, for the partition shards; 2 unless given."""
    alpha: float | None = setting(None, range=POSITIVE)
    """Dirichlet concentration, for the partitions dirichlet and dirichlet-class: small is very unlike, large is iid."""
    min_examples: int | None = setting(None)
    """Examples that every client must hold, for the partitions dirichlet-class, and classes with a sigma; 10 unless
    given."""
    sigma: float | None = setting(None, range=Range(0, math.inf, False, True))
    """Standard deviation of the logarithm of the clients' sizes, for the partitions lognormal and, where sizes are
    to differ, classes."""
    users_per_client: int | None = setting(None, range=COUNT)
    """Users (writers, speakers) that each client consists of, for the partition natural; 1 unless given."""
    superclasses_per_client: int | None = setting(None, range=COUNT)
    """Superclasses that each client holds, for the partition superclasses."""
    clusters: int | None = setting(None, range=COUNT)
    """Clusters of clients, each with its own permutation of the labels, for the partition clusters."""


_LEAST = 10  # examples of a client where sizes are random (Lin et al. 2020)


def check_options(name: str, options: PartitionOptions) -> None:
    """Check that a partition takes the options.

    Raises:
      JaxpflError: for an unknown partition (the nearest is suggested), or an option that it does not take.
    """
    takes = options_of(name)
    for field in dataclasses.fields(options):
        if getattr(options, field.name) is not None and field.name not in takes:
            allowed = " and ".join(map(_words, takes)) or "no option"
            raise JaxpflError(f"the partition {name!r} takes {allowed}, not {_words(field.name)}")


def assign(name: str, source: Source, m: int | None, options: PartitionOptions, rng: np.random.Generator) -> Assignment:
    """Assign the examples of a source to m clients by the partition of that name, which takes the ``options``.

    The draws for the training set come first, so that its split does not depend on whether there is a test set.

    Raises:
      JaxpflError: for a missing option, and an impossible split.
    """
    if name == "natural":
        return _natural(source, m, options, rng)
    if m is None:
        raise JaxpflError("the number of clients must be given for every partition but 'natural'")
    return PARTITIONS[name][1](source, m, options, rng)


def options_of(name: str) -> tuple[str, ...]:
    """The options (fields of `PartitionOptions`) that a partition takes.

    Raises:
      JaxpflError: for an unknown name.
    """
    if name not in PARTITIONS:
        raise unknown_name("partition", name, PARTITIONS)
    return PARTITIONS[name][0]


def _words(option: str) -> str:
    return option.replace("_", " ")


def _required(value: Any, partition: str, what: str) -> Any:
    if value is None:
        raise JaxpflError(f"the partition {partition!r} needs {what}")
    return value


def _alike(source: Source, train: list[Indices], rng: np.random.Generator) -> Assignment:
    """An assignment whose test set is dealt like the training set, by class."""
    if source.y_test is None:
        return Assignment(train, None)
    return Assignment(train, deal_alike(source.y_test, count_classes(source.y_train, train, source.num_classes), rng))


def _assign_hands(source: Source, held: np.ndarray, rng: np.random.Generator) -> Assignment:
    """An assignment by the classes that clients hold, [m, k]; a client is tested on the classes it trains on."""
    train = split_by_class(source.y_train, held, rng)
    test = None if source.y_test is None else split_by_class(source.y_test, held, rng, allow_none=True)
    return Assignment(train, test)


def _iid(source: Source, m: int, options: PartitionOptions, rng: np.random.Generator) -> Assignment:
    train = iid(source.y_train, m, rng)
    return Assignment(train, None if source.y_test is None else iid(source.y_test, m, rng))


def _clusters(source: Source, m: int, options: PartitionOptions, rng: np.random.Generator) -> Assignment:
    k = _required(options.clusters, "clusters", "the number of clusters")
    # Drawn first, so that the true clusters follow from the seed alone (`federate.true_clusters`).
    drawn = draw_clusters(m, k, source.num_classes, rng)
    return _iid(source, m, options, rng)._replace(labels=drawn.labels[drawn.member])


def _classes(source: Source, m: int, options: PartitionOptions, rng: np.random.Generator) -> Assignment:
    k = _required(options.classes_per_client, "classes", "the number of classes per client")
    if options.sigma is None and options.min_examples is not None:
        raise JaxpflError("the partition 'classes' takes min examples only with sigma: sizes are equal without")
    held = deal_classes(np.unique(source.y_train), m, k, rng)
    if options.sigma is None:
        return _assign_hands(source, held, rng)
    least = _least(options)
    return _alike(source, lognormal_by_class(source.y_train, held, options.sigma, least, source.num_classes, rng), rng)


def _superclasses(source: Source, m: int, options: PartitionOptions, rng: np.random.Generator) -> Assignment:
    k = _required(options.superclasses_per_client, "superclasses", "the number of superclasses per client")
    if source.superclasses is None:
        raise JaxpflError(f"data set {source.name!r} has no superclasses (cifar100 has)")
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
        raise JaxpflError(f"data set {source.name!r} has no users: the partition 'natural' needs them")
    groups = choose_users(np.unique(source.users_train), m, g, rng)
    train = examples_of(source.users_train, groups)
    # A test set of other users does not fit these clients: each client's own examples are split then.
    if source.users_test is None or are_unseen(source).all():
        return Assignment(train, None)
    return Assignment(train, examples_of(source.users_test, groups))


CLASSLESS = ("iid", "lognormal", "natural")
"""Partitions that do not look at labels, for real numbers and several labels each."""

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
"""Registered partitions: the options that each takes, and (source, m, options, rng) -> `Assignment`. "pathological" is
the customary name of "shards"."""
