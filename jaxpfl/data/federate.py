"""A source and a partition make a `Federation`: the split that ``--split-seed`` fixes."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from jaxpfl.data.partition import Indices, PartitionOptions, partitioner
from jaxpfl.data.sources import Source, check_finite
from jaxpfl.data.stack import stack_clients
from jaxpfl.errors import JaxpflError
from jaxpfl.types import Federation


class SplitPurpose(IntEnum):
    """What a host stream of randomness is for. The numbers are part of the splits: never renumber, only
    append."""

    PARTITION = 0
    TEST = 1
    VALIDATION = 2


def split_rng(split_seed: int, purpose: SplitPurpose, *names: int) -> np.random.Generator:
    """The generator of one named part of the split; the same numbers on every platform."""
    return np.random.default_rng(np.random.SeedSequence(split_seed, spawn_key=(int(purpose), *names)))


def federate(
    source: Source,
    *,
    partition: str = "classes",
    clients: int,
    classes_per_client: int | None = None,
    test_share: float = 0.5,
    validation_share: float = 0.0,
    split_seed: int = 0,
    drop_empty: bool = False,
) -> Federation:
    """Splits a data set among clients. Depends on the arguments here alone: no run seed enters.

    Test examples come from the official test set where there is one, dealt by the partition's own rule; else
    each client's examples are split, class by class as evenly as the counts allow.

    Args:
      source: the data set.
      partition: a registered partition: "iid" or "classes".
      clients: m, at least 1.
      classes_per_client: for "classes".
      test_share: the share of each client's examples kept for testing, in [0, 1); not used where the source
        has an official test set. A client with at least two examples keeps at least one for training and one
        for testing.
      validation_share: the share of each client's training examples kept for validation, in [0, 1).
      split_seed: at least 0.
      drop_empty: leave out clients without training examples, with a warning.

    Raises:
      JaxpflError: a value out of range, an unknown partition, a split that is impossible, a client without
        training examples (unless ``drop_empty``), a NaN in the source.
    """
    for name, share in (("test share", test_share), ("validation share", validation_share)):
        if not 0.0 <= share < 1.0:
            raise JaxpflError(f"{name} must lie in [0, 1), got {share}")
    if split_seed < 0:
        raise JaxpflError(f"split seed must be at least 0, got {split_seed}")
    if clients < 1:
        raise JaxpflError(f"the number of clients must be at least 1, got {clients}")
    _check_source(source)

    dealer = partitioner(partition, PartitionOptions(classes_per_client=classes_per_client))
    rng = split_rng(split_seed, SplitPurpose.PARTITION)
    train, test = dealer.assign(source.y_train, source.y_test, clients, source.num_classes, rng)
    x_test, y_test = source.x_test, source.y_test
    if test is None:
        x_test, y_test = source.x_train, source.y_train
        train, test = _hold_out(train, source.y_train, test_share, split_seed, SplitPurpose.TEST)
    assert x_test is not None
    assert y_test is not None
    train, validation = _hold_out(train, source.y_train, validation_share, split_seed, SplitPurpose.VALIDATION)
    return stack_clients(
        [(source.x_train[own], source.y_train[own]) for own in train],
        test=[(x_test[own], y_test[own]) for own in test],
        validation=[(source.x_train[own], source.y_train[own]) for own in validation],
        drop_empty=drop_empty,
    )


def hold_out(labels: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Which of one client's examples to hold out: [n] bool, class by class as evenly as the counts allow.

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
    """What each client keeps and what it holds out; a client's draw depends on its own examples alone."""
    keeps, held_out = [], []
    for client, indices in enumerate(own):
        held = hold_out(labels[indices], share, split_rng(split_seed, purpose, client))
        keeps.append(indices[~held])
        held_out.append(indices[held])
    return keeps, held_out


def _check_source(source: Source) -> None:
    """A user's own source is checked before it is split, so that errors name its own examples."""
    if (source.x_test is None) != (source.y_test is None):
        raise JaxpflError(f"data set {source.name!r}: give x_test and y_test, or neither")
    for part, x, y in (("train", source.x_train, source.y_train), ("test", source.x_test, source.y_test)):
        if x is None or y is None:
            continue
        whose = f"data set {source.name!r}, {part}"
        if len(x) != len(y):
            raise JaxpflError(f"{whose}: {len(x)} inputs but {len(y)} labels")
        check_finite(x, whose)
        if not np.issubdtype(y.dtype, np.integer):
            raise JaxpflError(f"{whose}: labels must be integers >= 0, got {y.dtype}")
        if len(y) and (y.min() < 0 or y.max() >= source.num_classes):
            raise JaxpflError(f"{whose}: labels must lie in 0 .. {source.num_classes - 1}")
