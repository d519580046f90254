"""Partitions by class: iid, classes per client, shards, superclasses.

Only `Generator.permutation` and `Generator.integers` are used, which return the same numbers on every platform.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from jaxpfl.support.errors import JaxpflError

Indices: TypeAlias = np.ndarray
"""Indices into a source's arrays, [n_i] int64."""


def iid(labels: np.ndarray, m: int, rng: np.random.Generator) -> list[Indices]:
    """Shuffle all examples and deal them evenly: sizes differ by at most 1.

    Args:
      labels: [N], of which only the count matters.
      m: the number of clients; more than N leaves some without an example.
      rng: the generator.
    """
    check_clients(m)
    return list(np.array_split(rng.permutation(len(labels)), m))


def deal_classes(classes: np.ndarray, m: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Classes of each client: [m, k], distinct within a row, each class in nearly equally many rows.

    A shuffled deck with floor(m k / C) or one more slots of each class is dealt, k slots to a client; a
    client that got a class twice swaps one of them with a client that lacks it. If no swap helps, the deck is dealt
    again, and after some attempts greedily, which always succeeds (but mixes the classes less).
    """
    check_clients(m)
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
    """Split each class's examples evenly among its holders.

    Args:
      labels: [N].
      held: [m, k] classes of each client; -1 where a client holds fewer than k.
      rng: the generator. The remaining examples go to random holders.
      allow_none: accept a class with fewer examples than holders, some of whom then get none of it (a small test
        set).

    Raises:
      JaxpflError: if a class has fewer examples than holders, unless ``allow_none``.
    """
    parts: list[list[Indices]] = [[] for _ in held]
    for label in np.unique(held[held >= 0]):
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


def shards(labels: np.ndarray, m: int, s: int, rng: np.random.Generator) -> list[Indices]:
    """Sort the examples by label, cut them into m * s shards and deal s of them to each client.

    This is the "pathological" non-iid split of McMahan et al. 2017: 200 shards of 300 digits, 2 for each of 100
    clients. All examples are used; shards differ in size by at most 1. Within a label the order is random.

    Args:
      labels: [N].
      m: clients.
      s: shards of each client.
      rng: the generator.

    Raises:
      JaxpflError: if s is below 1, or there are more shards than examples.
    """
    check_clients(m)
    if s < 1:
        raise JaxpflError(f"shards per client must be at least 1, got {s}")
    if m * s > len(labels):
        raise JaxpflError(f"{m} clients with {s} shards each need {m * s} examples, but there are {len(labels)}")
    shuffled = rng.permutation(len(labels))
    by_label = np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], m * s)
    hands = rng.permutation(m * s).reshape(m, s)
    return [np.concatenate([by_label[shard] for shard in hand]) for hand in hands]


def deal_superclasses(superclasses: np.ndarray, m: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Classes of each client if each holds all classes of k distinct superclasses.

    Superclasses are dealt like classes in `deal_classes`: each to nearly equally many clients.

    Args:
      superclasses: [num_classes], the superclass of each class.
      m: clients.
      k: superclasses of each client.
      rng: the generator.

    Returns:
      [m, most classes of a client], -1 where a client holds fewer, for `split_by_class`.

    Raises:
      JaxpflError: if k is not in 1 .. the number of superclasses, or m * k slots cannot hold all of them.
    """
    known = np.unique(superclasses)
    if not 1 <= k <= len(known):
        raise JaxpflError(f"superclasses per client must be 1 to {len(known)}, got {k}")
    if m * k < len(known):
        raise JaxpflError(f"{m} clients with {k} superclasses each cannot hold all {len(known)} superclasses")
    hands = deal_classes(known, m, k, rng)
    held = [np.flatnonzero(np.isin(superclasses, hand)) for hand in hands]
    widest = max(map(len, held))
    return np.array([np.pad(classes, (0, widest - len(classes)), constant_values=-1) for classes in held])


def present_classes(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Classes with examples.

    Raises:
      JaxpflError: if there are no labels, or labels are out of range.
    """
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= num_classes:
        raise JaxpflError(f"labels must be given and lie in 0 .. {num_classes - 1}")
    return np.unique(labels)


def check_clients(m: int) -> None:
    """Check that the number of clients is at least 1, with a `JaxpflError` otherwise."""
    if m < 1:
        raise JaxpflError(f"the number of clients must be at least 1, got {m}")


def _repair(hands: np.ndarray, num_classes: int, rng: np.random.Generator) -> bool:
    """Swap slots of hands [m, k] in place until no hand holds a class twice; false if no swap is left.

    Every swap lowers the number of surplus slots, so this terminates.
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
            # A few random guesses nearly always find a partner; otherwise search all slots.
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
    """Deal class by class, each to the clients with most free slots, ties at random.

    This succeeds whenever a deal is feasible (Gale and Ryser).
    """
    free = np.full(m, k)
    hands: list[list[int]] = [[] for _ in range(m)]
    for label in rng.permutation(len(copies)):
        shuffled = rng.permutation(m)
        for client in shuffled[np.argsort(-free[shuffled], kind="stable")][: copies[label]]:
            hands[client].append(int(label))
            free[client] -= 1
    return np.array(hands)
