"""Partitioners: who holds which example. Host functions from labels to per-client indices, seeded NumPy.

A partition is drawn from one generator, made of the split seed alone, so a seed gives the same split whatever
the run does. Only `Generator.permutation` and `Generator.integers` are used, which give the same numbers on
every platform.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from jaxpfl.errors import JaxpflError, unknown_name

Indices: TypeAlias = np.ndarray
"""Places in a source's arrays, [n_i] int64."""


class Assignment(NamedTuple):
    """Who holds what: for each of m clients its places in the training set and in the official test set.

    ``test`` is None where the source has no official test set; lists are disjoint.
    """

    train: list[Indices]
    test: list[Indices] | None


class Partitioner(NamedTuple):
    """One way to split a data set among clients.

    Attributes:
      name: its registered name with its options, for people.
      assign: ``(labels_train [N], labels_test [T] or None, m, num_classes, rng) -> Assignment``. The draws
        for the training set come first, so it is split alike with and without a test set.
    """

    name: str
    assign: Callable[[np.ndarray, np.ndarray | None, int, int, np.random.Generator], Assignment]


@dataclasses.dataclass(frozen=True)
class PartitionOptions:
    """Options of all partitioners; each reads its own. ``classes_per_client`` is None where nobody set it."""

    classes_per_client: int | None = None


def partitioner(name: str, options: PartitionOptions | None = None) -> Partitioner:
    """The registered partitioner of that name.

    Raises:
      JaxpflError: an unknown name (the nearest is suggested), or a missing option.
    """
    if name not in PARTITIONS:
        raise unknown_name("partition", name, PARTITIONS)
    return PARTITIONS[name](options or PartitionOptions())


def iid(labels: np.ndarray, m: int, rng: np.random.Generator) -> list[Indices]:
    """Shuffles all examples and deals them evenly: sizes differ by at most 1.

    Args:
      labels: [N], of which only the count matters.
      m: the number of clients; more than N leaves some without an example.
      rng: the generator.
    """
    _check_clients(m)
    return list(np.array_split(rng.permutation(len(labels)), m))


def classes_per_client(labels: np.ndarray, m: int, k: int, num_classes: int, rng: np.random.Generator) -> list[Indices]:
    """Every client gets exactly k distinct classes; all examples are used.

    Each class is held by a nearly equal number of clients (counts differ by at most 1), and its examples are
    split evenly (sizes differ by at most 1) and disjointly among them.

    Args:
      labels: [N] in 0 .. num_classes - 1. Classes without any example are dealt to nobody.
      m: clients.
      k: classes of each client.
      num_classes: the number of classes.
      rng: the generator.

    Raises:
      JaxpflError: k is not in 1 .. the number of classes, m * k slots cannot hold all classes, or a class has
        fewer examples than holders.
    """
    held = deal_classes(_present(labels, num_classes), m, k, rng)
    return split_by_class(labels, held, rng)


def deal_classes(classes: np.ndarray, m: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """The classes of each client: [m, k], distinct within a row, every class in nearly equally many rows.

    A shuffled deck with floor(m k / C) or one more slots of each class is dealt, k slots to a client; a
    client that got a class twice swaps one of them with a client that lacks it. Should no swap help, the deck
    is dealt anew, and after some attempts dealt greedily, which always succeeds (but mixes the classes less).
    """
    _check_clients(m)
    if not 1 <= k <= len(classes):
        raise JaxpflError(f"classes per client must be 1 to {len(classes)} (the number of classes), got {k}")
    if m * k < len(classes):
        raise JaxpflError(
            f"{m} clients with {k} classes each cannot hold all {len(classes)} classes: "
            f"clients x classes per client must be at least {len(classes)}"
        )
    copies = np.full(len(classes), m * k // len(classes))
    copies[rng.permutation(len(classes))[: m * k % len(classes)]] += 1
    for _ in range(20):
        hands = rng.permutation(np.repeat(np.arange(len(classes)), copies)).reshape(m, k)
        if _repair(hands, len(classes), rng):
            return classes[hands]
    return classes[_deal_greedily(copies, m, k, rng)]


def split_by_class(
    labels: np.ndarray, held: np.ndarray, rng: np.random.Generator, *, allow_none: bool = False
) -> list[Indices]:
    """Splits each class's examples evenly among its holders.

    Args:
      labels: [N].
      held: [m, k] classes of each client.
      rng: the generator. Who gets the odd examples is random.
      allow_none: accept a class with fewer examples than holders; some then get none of it (a small test
        set).

    Raises:
      JaxpflError: a class has fewer examples than holders, and ``allow_none`` is false.
    """
    parts: list[list[Indices]] = [[] for _ in held]
    for label in np.unique(held):
        holders = rng.permutation(np.flatnonzero((held == label).any(axis=1)))
        examples = rng.permutation(np.flatnonzero(labels == label))
        if len(examples) < len(holders) and not allow_none:
            raise JaxpflError(
                f"class {label} has {len(examples)} examples for {len(holders)} clients that hold it: "
                "use fewer clients or fewer classes per client"
            )
        for client, part in zip(holders, np.array_split(examples, len(holders)), strict=True):
            parts[client].append(part)
    return [np.concatenate(own) for own in parts]


def _repair(hands: np.ndarray, num_classes: int, rng: np.random.Generator) -> bool:
    """Swaps slots of hands [m, k] in place until no hand holds a class twice; false where it got stuck.

    Every swap lowers the number of surplus slots, so this ends.
    """
    m, k = hands.shape
    counts = np.zeros((m, num_classes), np.int32)
    np.add.at(counts, (np.repeat(np.arange(m), k), hands.ravel()), 1)

    def helps(i: int, own: int, j: int, other: int) -> bool:
        return counts[j, own] == 0 and counts[i, other] == 0

    for i in rng.permutation(np.flatnonzero((counts > 1).any(axis=1))):
        for slot in range(k):
            own = hands[i, slot]
            if counts[i, own] < 2:
                continue
            # A few blind guesses nearly always find a partner; else look at every slot there is.
            places = [divmod(int(place), k) for place in rng.integers(m * k, size=16)]
            place = next(((j, s) for j, s in places if helps(i, own, j, hands[j, s])), None)
            if place is None:
                good = (counts[:, own] == 0)[:, None] & (counts[i, hands] == 0)
                options = np.argwhere(good)
                if not len(options):
                    return False
                place = tuple(options[rng.integers(len(options))])
            j, s = place
            other = hands[j, s]
            hands[i, slot], hands[j, s] = other, own
            counts[i, own] -= 1
            counts[i, other] += 1
            counts[j, other] -= 1
            counts[j, own] += 1
    return True


def _deal_greedily(copies: np.ndarray, m: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Deals class by class, each to the clients with most free slots, ties at random: feasible whenever a
    deal is (Gale and Ryser)."""
    free = np.full(m, k)
    hands: list[list[int]] = [[] for _ in range(m)]
    for label in rng.permutation(len(copies)):
        shuffled = rng.permutation(m)
        for client in shuffled[np.argsort(-free[shuffled], kind="stable")][: copies[label]]:
            hands[client].append(int(label))
            free[client] -= 1
    return np.array(hands)


def _present(labels: np.ndarray, num_classes: int) -> np.ndarray:
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= num_classes:
        raise JaxpflError(f"labels must be given and lie in 0 .. {num_classes - 1}")
    return np.unique(labels)


def _check_clients(m: int) -> None:
    if m < 1:
        raise JaxpflError(f"the number of clients must be at least 1, got {m}")


def _iid(options: PartitionOptions) -> Partitioner:
    def assign(
        labels_train: np.ndarray,
        labels_test: np.ndarray | None,
        m: int,
        num_classes: int,
        rng: np.random.Generator,
    ) -> Assignment:
        train = iid(labels_train, m, rng)
        return Assignment(train, None if labels_test is None else iid(labels_test, m, rng))

    return Partitioner("iid", assign)


def _classes(options: PartitionOptions) -> Partitioner:
    k = options.classes_per_client
    if k is None:
        raise JaxpflError("the partition 'classes' needs the number of classes per client")

    def assign(
        labels_train: np.ndarray,
        labels_test: np.ndarray | None,
        m: int,
        num_classes: int,
        rng: np.random.Generator,
    ) -> Assignment:
        held = deal_classes(_present(labels_train, num_classes), m, k, rng)
        train = split_by_class(labels_train, held, rng)
        if labels_test is None:
            return Assignment(train, None)
        # The same holders: a client is tested on the classes it trains on.
        return Assignment(train, split_by_class(labels_test, held, rng, allow_none=True))

    return Partitioner(f"{k} classes per client", assign)


PARTITIONS: dict[str, Callable[[PartitionOptions], Partitioner]] = {"iid": _iid, "classes": _classes}
"""Registered partitioners: a new one is a builder here and, where it has options, a field of
`PartitionOptions`."""
