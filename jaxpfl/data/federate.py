"""Splitting a source among clients by a partition: the split that ``--split-seed`` determines."""

from __future__ import annotations

import warnings
from enum import IntEnum
from typing import Any

import jax
import numpy as np

from jaxpfl import host_memory
from jaxpfl.data.partition.classes import Indices
from jaxpfl.data.partition.clusters import ClientClusters, draw_clusters
from jaxpfl.data.partition.registry import PartitionOptions, partitioner
from jaxpfl.data.sources.base import Source, check_finite, no_classes, pooled
from jaxpfl.data.stack import listed, stack_clients
from jaxpfl.data.standardize import check_standardizable, scaled, scaling_of
from jaxpfl.errors import JaxpflError, JaxpflWarning
from jaxpfl.types import Federation

_BYTES_PER_CLIENT = 1000
"""Memory of the lists of NumPy arrays that hold a client's indices, whatever their number."""


class SplitPurpose(IntEnum):
    """Purpose of a host random stream. The numbers are part of the splits: never renumber, only append."""

    PARTITION = 0
    TEST = 1
    VALIDATION = 2
    UNSEEN = 3


def split_rng(split_seed: int, purpose: SplitPurpose, *names: int) -> np.random.Generator:
    """Random generator of one named part of the split; the same numbers on every platform."""
    return np.random.default_rng(np.random.SeedSequence(split_seed, spawn_key=(int(purpose), *names)))


def federate(
    source: Source,
    *,
    partition: str = "classes",
    clients: int | None = None,
    classes_per_client: int | None = None,
    shards_per_client: int | None = None,
    alpha: float | None = None,
    min_examples: int | None = None,
    sigma: float | None = None,
    users_per_client: int | None = None,
    superclasses_per_client: int | None = None,
    clusters: int | None = None,
    test_share: float = 0.5,
    validation_share: float = 0.0,
    pool_test: bool = False,
    split_seed: int = 0,
    drop_empty: bool = False,
    standardize: bool = False,
) -> Federation:
    """Split a data set among clients. The result depends on these arguments alone: no run seed enters.

    Test examples come from the official test set if there is one, dealt by the partition's own rule; otherwise (and
    for "natural", if its users are not those of the training set) each client's examples are split, class by class as
    evenly as the counts allow.

    Args:
      source: the data set.
      partition: "iid"; "classes": a number of classes per client, with log-normal sizes if sigma is given; "shards"
        (or "pathological"): a number of shards of the examples sorted by class; "dirichlet": class proportions of each
        client from Dir(alpha); "dirichlet-class": each class in proportions from Dir(alpha); "lognormal": iid with
        unequal sizes; "natural": one client per user, or per number of users; "superclasses": all classes of a number
        of superclasses; "clusters": iid, and the clients of each cluster have their own permutation of the labels
        (see `true_clusters`).
      clients: m, at least 1; optional for "natural", which then takes all users.
      classes_per_client, shards_per_client, alpha, min_examples, sigma, users_per_client, superclasses_per_client,
        clusters: options of the partitions, see `PartitionOptions`; one that the partition does not take is refused.
      test_share: share of each client's examples held out for testing, in [0, 1); not used if the source has an
        official test set, unless it is pooled. A client with at least two examples has at least one for training and
        one for testing.
      validation_share: share of each client's training examples held out for validation, in [0, 1).
      pool_test: merge the official test set with the training set before dealing.
      split_seed: at least 0.
      drop_empty: leave out clients without training examples, with a warning; under "natural" also users too small to
        have a test example.
      standardize: scale each feature to mean 0 and deviation 1 over the training examples of all clients (including
        clients that are later `set_apart`; `standardize.scaled` scales these by the others' moments). A constant
        becomes 0. The means and deviations are not private: no epsilon covers them.

    Raises:
      JaxpflError: for a value out of range, an unknown partition, a missing or unsupported option, an impossible
        split, a client without training examples (unless ``drop_empty``), or a NaN in the source.

    Example:
      >>> import jaxpfl
      >>> federation = jaxpfl.federate(jaxpfl.load("digits"), clients=20, classes_per_client=3)
      >>> federation.num_clients, federation.input_shape
      (20, (8, 8, 1))
    """
    for name, share in (("test share", test_share), ("validation share", validation_share)):
        if not 0.0 <= share < 1.0:
            raise JaxpflError(f"{name} must lie in [0, 1), got {share}")
    if split_seed < 0:
        raise JaxpflError(f"split seed must be at least 0, got {split_seed}")
    if clients is not None and clients < 1:
        raise JaxpflError(f"the number of clients must be at least 1, got {clients}")
    options = PartitionOptions(
        classes_per_client=classes_per_client,
        shards_per_client=shards_per_client,
        alpha=alpha,
        min_examples=min_examples,
        sigma=sigma,
        users_per_client=users_per_client,
        superclasses_per_client=superclasses_per_client,
        clusters=clusters,
    )
    dealer = partitioner(partition, options)
    _check_source(source)
    if standardize:
        check_standardizable(source)
    if pool_test:
        source = pooled(source)
    if clients is not None and clients > len(source.y_train) and not drop_empty:
        raise JaxpflError(
            f"{clients} clients are more than the {len(source.y_train)} examples, so that some have no training data: "
            "use fewer, or leave them out with drop_empty (--drop-empty)"
        )
    host_memory.check(
        _BYTES_PER_CLIENT * (clients or 1), f"the split among {clients} clients alone needs", "take fewer clients"
    )

    dealt = dealer.assign(source, clients, split_rng(split_seed, SplitPurpose.PARTITION))
    train, test = dealt.train, dealt.test
    x_test, y_test = source.x_test, source.y_test
    if test is None:
        x_test, y_test = source.x_train, source.y_train
        train, test = _hold_out(train, source.y_train, test_share, split_seed, SplitPurpose.TEST)
    assert y_test is not None
    train, validation = _hold_out(train, source.y_train, validation_share, split_seed, SplitPurpose.VALIDATION)
    kept = np.arange(len(train))
    if dealer.needs_test and test_share > 0.0:
        kept = _with_test(train, test, drop_empty)

    def take(x: Any, y: np.ndarray, own: list[Indices]) -> list[tuple[Any, np.ndarray]]:
        def of(client: np.integer) -> tuple[Any, np.ndarray]:
            places = own[client]
            labels = y[places] if dealt.labels is None else dealt.labels[client][y[places]]
            return jax.tree.map(lambda leaf: leaf[places], x), labels

        return [of(client) for client in kept]

    federation = stack_clients(
        take(source.x_train, source.y_train, train),
        test=take(x_test, y_test, test),
        validation=take(source.x_train, source.y_train, validation),
        client_ids=kept,
        drop_empty=drop_empty,
    )
    return scaled(federation, scaling_of(federation)) if standardize else federation


def true_clusters(clients: int, clusters: int, num_classes: int, split_seed: int = 0) -> ClientClusters:
    """True clusters of the partition "clusters" with these settings, and each cluster's permutation of the labels.

    A federation's client i, including clients that were set apart, is in cluster ``member[i]``, with i from
    `Federation.client_ids`.

    Raises:
      JaxpflError: if there is no such partition for these numbers.
    """
    return draw_clusters(clients, clusters, num_classes, split_rng(split_seed, SplitPurpose.PARTITION))


def hold_out(labels: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Mask of one client's examples to hold out, [n] bool, class by class as evenly as the counts allow.

    round(share * n) examples are held out, but at least one and not all where share > 0 and n >= 2. Each
    class gives floor(share * its count); the rest come from the classes with the largest remainders, ties at
    random.
    """
    n = len(labels)
    held = np.zeros(n, bool)
    if share == 0.0 or n < 2:
        return held
    total = min(max(int(share * n + 0.5), 1), n - 1)
    classes, counts = np.unique(labels, return_counts=True)
    quotas = np.floor(share * counts).astype(int)
    remainders = share * counts - quotas
    order = rng.permutation(len(classes))
    # Rounding in floating point, or the cut to n - 1, can leave a difference of either sign.
    for place in order[np.argsort(-remainders[order], kind="stable")][: max(total - quotas.sum(), 0)]:
        quotas[place] += 1
    for label, quota in zip(classes, quotas, strict=True):
        held[rng.permutation(np.flatnonzero(labels == label))[:quota]] = True
    return held


def _hold_out(
    own: list[Indices], labels: np.ndarray, share: float, split_seed: int, purpose: SplitPurpose
) -> tuple[list[Indices], list[Indices]]:
    """Indices that each client keeps and holds out; a client's draw depends on its own examples alone."""
    keeps, held_out = [], []
    for client, indices in enumerate(own):
        held = hold_out(labels[indices], share, split_rng(split_seed, purpose, client))
        keeps.append(indices[~held])
        held_out.append(indices[held])
    return keeps, held_out


def _with_test(train: list[Indices], test: list[Indices], drop_empty: bool) -> np.ndarray:
    """The clients to keep: all, or those with a test example.

    Clients without training examples are kept here; they are checked by `stack_clients`.
    """
    without = np.array([len(a) > 0 and len(b) == 0 for a, b in zip(train, test, strict=True)])
    if not without.any():
        return np.arange(len(train))
    found = f"{without.sum()} of {len(train)} clients have too few examples to be tested"
    if not drop_empty:
        raise JaxpflError(
            f"{found} (client {listed(np.flatnonzero(without))}): "
            "leave them out with drop_empty (--drop-empty), or put more users in a client"
        )
    if without.all():
        raise JaxpflError(f"{found}: none is left")
    warnings.warn(f"left out: {found}", JaxpflWarning, stacklevel=3)
    return np.flatnonzero(~without)


def _check_source(source: Source) -> None:
    """Check a source before it is split, so that errors name the user's own examples."""
    if (source.x_test is None) != (source.y_test is None):
        raise JaxpflError(f"data set {source.name!r}: give x_test and y_test, or neither")
    for part, x, y in (("train", source.x_train, source.y_train), ("test", source.x_test, source.y_test)):
        if x is None or y is None:
            continue
        whose = f"data set {source.name!r}, {part}"
        for leaf in jax.tree.leaves(x):
            if len(leaf) != len(y):
                raise JaxpflError(f"{whose}: {len(leaf)} inputs but {len(y)} labels")
        check_finite(x, whose)
        if not np.issubdtype(y.dtype, np.integer):
            raise no_classes(f"{whose}: labels", y.dtype)
        if len(y) and (y.min() < 0 or y.max() >= source.num_classes):
            raise JaxpflError(f"{whose}: labels must lie in 0 .. {source.num_classes - 1}")
    for part, users, y in (("train", source.users_train, source.y_train), ("test", source.users_test, source.y_test)):
        if users is not None and (y is None or users.shape != y.shape or not np.issubdtype(users.dtype, np.integer)):
            raise JaxpflError(f"data set {source.name!r}, {part}: users must be integers, one for each example")
    if source.superclasses is not None and source.superclasses.shape != (source.num_classes,):
        raise JaxpflError(f"data set {source.name!r}: superclasses must be [{source.num_classes}], one for each class")
