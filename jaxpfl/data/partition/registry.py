"""Partitioners by name: assignments of examples to clients, by seeded NumPy on the host.

A partition is drawn from one generator, derived from the split seed alone, so that a seed gives the same split for any
run, on every platform: only permutations, integers and the draws of `jaxpfl.data.portable` are used. Every partition
assigns each training example to exactly one client, except for users that ``natural`` was not asked for
(`jaxpfl.data.summary` counts the examples left out). The official test set is dealt by the same rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.core.settings import COUNT, setting
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
    present_classes,
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
      users: [m, g] the users of each client, for "natural"; else None.
      labels: [m, num_classes] int32, each client's own label of each class, for "clusters"; None for the source's.
    """

    train: list[Indices]
    test: list[Indices] | None
    users: np.ndarray | None = None
    labels: np.ndarray | None = None


class Partitioner(NamedTuple):
    """A rule that splits a data set among clients.

    Attributes:
      name: its registered name with its options, for display.
      assign: ``(source, m, rng) -> Assignment``; m is None if not given. The draws for the training set come first,
        so that its split does not depend on whether there is a test set.
      needs_test: whether a client without test examples is refused (unless dropped) rather than kept.
    """

    name: str
    assign: Callable[[Source, int | None, np.random.Generator], Assignment]
    needs_test: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """Options of all partitioners, None if not given; each takes its own (`PARTITIONS`)."""

    classes_per_client: int | None = setting(
        None, "Classes that each client holds, for the partition classes.", range=COUNT
    )
    shards_per_client: int | None = setting(
        None,
        "Shards of the examples sorted by class that each client holds, for the partition shards; 2 unless given.",
    )
    alpha: float | None = setting(
        None,
        "Dirichlet concentration, for the partitions dirichlet and dirichlet-class: small is very unlike, large is "
        "iid.",
    )
    min_examples: int | None = setting(
        None,
        "Examples that every client must hold, for the partitions dirichlet-class, and classes with a sigma; 10 unless "
        "given.",
    )
    sigma: float | None = setting(
        None,
        "Standard deviation of the logarithm of the clients' sizes, for the partitions lognormal and, where sizes are "
        "to differ, classes.",
    )
    users_per_client: int | None = setting(
        None, "Users (writers, speakers) that each client consists of, for the partition natural; 1 unless given."
    )
    superclasses_per_client: int | None = setting(
        None, "Superclasses that each client holds, for the partition superclasses."
    )
    clusters: int | None = setting(
        None, "Clusters of clients, each with its own permutation of the labels, for the partition clusters."
    )


_LEAST = 10  # examples of a client where sizes are random (Lin et al. 2020)


def partitioner(name: str, options: PartitionOptions | None = None) -> Partitioner:
    """The registered partitioner of that name.

    Raises:
      JaxpflError: for an unknown name (the nearest is suggested), a missing option, or one that it does not take.
    """
    takes, build = _registered(name)
    options = options or PartitionOptions()
    for field in dataclasses.fields(options):
        if getattr(options, field.name) is not None and field.name not in takes:
            allowed = " and ".join(map(_words, takes)) or "no option"
            raise JaxpflError(f"the partition {name!r} takes {allowed}, not {_words(field.name)}")
    return build(options)


def options_of(name: str) -> tuple[str, ...]:
    """The options (fields of `PartitionOptions`) that a partition takes.

    Raises:
      JaxpflError: for an unknown name.
    """
    return _registered(name)[0]


def _registered(name: str) -> tuple[tuple[str, ...], Callable[[PartitionOptions], Partitioner]]:
    if name not in PARTITIONS:
        raise unknown_name("partition", name, PARTITIONS)
    return PARTITIONS[name]


def _words(option: str) -> str:
    return option.replace("_", " ")


def _required(value: Any, partition: str, what: str) -> Any:
    if value is None:
        raise JaxpflError(f"the partition {partition!r} needs {what}")
    return value


def _clients(m: int | None) -> int:
    if m is None:
        raise JaxpflError("the number of clients must be given for every partition but 'natural'")
    return m


def _alike(name: str, split: Callable[[np.ndarray, int, int, np.random.Generator], list[Indices]]) -> Partitioner:
    """A partitioner from ``(labels, m, num_classes, rng)`` whose test set is dealt like the training set, by class."""

    def assign(source: Source, m: int | None, rng: np.random.Generator) -> Assignment:
        train = split(source.y_train, _clients(m), source.num_classes, rng)
        if source.y_test is None:
            return Assignment(train, None)
        return Assignment(
            train, deal_alike(source.y_test, count_classes(source.y_train, train, source.num_classes), rng)
        )

    return Partitioner(name, assign)


def _iid(options: PartitionOptions) -> Partitioner:
    def assign(source: Source, m: int | None, rng: np.random.Generator) -> Assignment:
        train = iid(source.y_train, _clients(m), rng)
        return Assignment(train, None if source.y_test is None else iid(source.y_test, _clients(m), rng))

    return Partitioner("iid", assign)


def _clusters(options: PartitionOptions) -> Partitioner:
    k = _required(options.clusters, "clusters", "the number of clusters")
    deal = _iid(options).assign

    def assign(source: Source, m: int | None, rng: np.random.Generator) -> Assignment:
        # Drawn first, so that the true clusters follow from the seed alone (`federate.true_clusters`).
        drawn = draw_clusters(_clients(m), k, source.num_classes, rng)
        return deal(source, m, rng)._replace(labels=drawn.labels[drawn.member])

    return Partitioner(f"{k} clusters, iid, each with its own labels", assign)


def _by_hands(name: str, deal: Callable[[Source, int, np.random.Generator], np.ndarray]) -> Partitioner:
    """A partitioner from ``(source, m, rng) -> classes held [m, k]``.

    The test set goes to the same holders, so that a client is tested on the classes it trains on.
    """

    def assign(source: Source, m: int | None, rng: np.random.Generator) -> Assignment:
        held = deal(source, _clients(m), rng)
        train = split_by_class(source.y_train, held, rng)
        test = None if source.y_test is None else split_by_class(source.y_test, held, rng, allow_none=True)
        return Assignment(train, test)

    return Partitioner(name, assign)


def _classes(options: PartitionOptions) -> Partitioner:
    k = _required(options.classes_per_client, "classes", "the number of classes per client")

    def deal(source: Source, m: int, rng: np.random.Generator) -> np.ndarray:
        return deal_classes(present_classes(source.y_train, source.num_classes), m, k, rng)

    name, sigma, least = f"{k} classes per client", options.sigma, options.min_examples
    if sigma is None:
        if least is not None:
            raise JaxpflError("the partition 'classes' takes min examples only with sigma: sizes are equal without")
        return _by_hands(name, deal)

    def split(labels: np.ndarray, m: int, num_classes: int, rng: np.random.Generator) -> list[Indices]:
        held = deal_classes(present_classes(labels, num_classes), m, k, rng)
        return lognormal_by_class(labels, held, sigma, _LEAST if least is None else least, num_classes, rng)

    return _alike(f"{name}, log-normal({sigma:g}) sizes", split)


def _superclasses(options: PartitionOptions) -> Partitioner:
    k = _required(options.superclasses_per_client, "superclasses", "the number of superclasses per client")

    def deal(source: Source, m: int, rng: np.random.Generator) -> np.ndarray:
        if source.superclasses is None:
            raise JaxpflError(f"data set {source.name!r} has no superclasses (cifar100 has)")
        held = deal_superclasses(source.superclasses, m, k, rng)
        present = present_classes(source.y_train, source.num_classes)
        return np.where(np.isin(held, present), held, -1)

    return _by_hands(f"{k} superclasses per client", deal)


def _shards(options: PartitionOptions) -> Partitioner:
    s = 2 if options.shards_per_client is None else options.shards_per_client
    return _alike(f"{s} shards per client", lambda labels, m, num_classes, rng: shards(labels, m, s, rng))


def _dirichlet(options: PartitionOptions) -> Partitioner:
    alpha = _required(options.alpha, "dirichlet", "alpha")
    return _alike(
        f"Dirichlet({alpha:g}) class proportions of each client",
        lambda labels, m, num_classes, rng: dirichlet_per_client(labels, m, alpha, num_classes, rng),
    )


def _dirichlet_class(options: PartitionOptions) -> Partitioner:
    alpha = _required(options.alpha, "dirichlet-class", "alpha")
    least = _LEAST if options.min_examples is None else options.min_examples
    return _alike(
        f"Dirichlet({alpha:g}) shares of each class",
        lambda labels, m, num_classes, rng: dirichlet_per_class(labels, m, alpha, least, num_classes, rng),
    )


def _lognormal(options: PartitionOptions) -> Partitioner:
    sigma = _required(options.sigma, "lognormal", "sigma")
    return _alike(f"log-normal({sigma:g}) sizes", lambda labels, m, num_classes, rng: lognormal(labels, m, sigma, rng))


def _natural(options: PartitionOptions) -> Partitioner:
    g = 1 if options.users_per_client is None else options.users_per_client

    def assign(source: Source, m: int | None, rng: np.random.Generator) -> Assignment:
        if source.users_train is None:
            raise JaxpflError(f"data set {source.name!r} has no users: the partition 'natural' needs them")
        groups = choose_users(np.unique(source.users_train), m, g, rng)
        train = examples_of(source.users_train, groups)
        # A test set of other users does not fit these clients: each client's own examples are split then.
        if source.users_test is None or are_unseen(source).all():
            return Assignment(train, None, groups)
        return Assignment(train, examples_of(source.users_test, groups), groups)

    return Partitioner(f"{g} users per client", assign, needs_test=True)


CLASSLESS = ("iid", "lognormal", "natural")
"""Partitions that do not look at labels, for real numbers and several labels each."""

PARTITIONS: dict[str, tuple[tuple[str, ...], Callable[[PartitionOptions], Partitioner]]] = {
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
"""Registered partitioners: the options that each takes, and its builder. "pathological" is the customary name of
"shards"."""
