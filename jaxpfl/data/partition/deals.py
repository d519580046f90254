"""Partitions by class or user: iid, classes per client, shards, superclasses, natural users, clusters of concepts.

Only `Generator.permutation` and `Generator.integers` are used, which return the same numbers on every platform, and
shares are divided in integer arithmetic.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

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
    return list(np.array_split(rng.permutation(len(labels)), m))


def deal_classes(classes: np.ndarray, m: int, k: int, rng: np.random.Generator, what: str = "classes") -> np.ndarray:
    """Classes of each client: [m, k], distinct within a row, each class in nearly equally many rows.

    A shuffled deck with floor(m k / C) or one more slots of each class is dealt, k slots to a client; a
    client that got a class twice swaps one of them with a client that lacks it. If no swap helps, the deck is dealt
    again, and after some attempts greedily, which always succeeds (but mixes the classes less).
    """
    if k > len(classes):
        raise JaxpflError(f"{what} per client must be 1 to {len(classes)} (all that there are), got {k}")
    if m * k < len(classes):
        raise JaxpflError(
            f"{m} clients with {k} {what} each cannot hold all {len(classes)} {what}: "
            f"clients x {what} per client must be at least {len(classes)}"
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
      JaxpflError: if there are more shards than examples.
    """
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
      JaxpflError: as `deal_classes`.
    """
    hands = deal_classes(np.unique(superclasses), m, k, rng, "superclasses")
    held = [np.flatnonzero(np.isin(superclasses, hand)) for hand in hands]
    widest = max(map(len, held))
    return np.array([np.pad(classes, (0, widest - len(classes)), constant_values=-1) for classes in held])


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


_SCALE = 2**36


def integer_weights(weights: np.ndarray) -> np.ndarray:
    """Weights in [0, 1] as integers up to 2**36, so that later computations are exact."""
    return np.floor(weights * _SCALE).astype(np.int64)


def apportion(weights: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
    """Apportion ``total`` in proportion to integer weights, by largest remainders, ties at random.

    Args:
      weights: [k] integers >= 0, not all zero.
      total: number to apportion; total * the largest weight must stay below 2**63.
      rng: the generator.

    Returns:
      [k] int64 that sum to ``total``; 0 where the weight is 0.
    """
    whole = int(weights.sum())
    quotas, remainders = np.divmod(weights * total, whole)
    order = rng.permutation(len(weights))
    lacking = total - int(quotas.sum())
    quotas[order[np.argsort(-remainders[order], kind="stable")][:lacking]] += 1
    return quotas


def deal(labels: np.ndarray, classes: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Deal examples by a table: client i gets counts[i, c] random examples of classes[c].

    Args:
      labels: [N].
      classes: [C] distinct labels.
      counts: [m, C]; a column may sum to less than the number of examples of its class.
      rng: the generator.

    Returns:
      m disjoint lists of indices, class by class.
    """
    parts: list[list[np.ndarray]] = [[] for _ in counts]
    for place, label in enumerate(classes):
        examples = rng.permutation(np.flatnonzero(labels == label))
        ends = np.cumsum(counts[:, place])
        for own, part in zip(parts, np.split(examples[: ends[-1]], ends[:-1]), strict=True):
            own.append(part)
    return [np.concatenate(own) for own in parts]


def count_classes(labels: np.ndarray, parts: list[np.ndarray], num_classes: int) -> np.ndarray:
    """Number of examples of each class that each client holds, [m, num_classes]."""
    return np.array([np.bincount(labels[part], minlength=num_classes) for part in parts])


def deal_alike(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Deal a second set (the official test set) with the clients' class proportions of the first.

    Each class is dealt in proportion to the clients' numbers of examples of it in the first set. Examples of a class
    that no client holds are left out.

    Args:
      labels: labels of the second set, [T].
      counts: class counts of the clients in the first set, [m, num_classes].
      rng: the generator.
    """
    classes = np.unique(labels)
    classes = classes[counts[:, classes].sum(axis=0) > 0]
    if not len(classes):
        return [np.zeros(0, np.int64) for _ in counts]
    table = [apportion(counts[:, label], int((labels == label).sum()), rng) for label in classes]
    return deal(labels, classes, np.stack(table, axis=1), rng)


class ClientClusters(NamedTuple):
    """True clusters of a split, which differ in concept: each has its own permutation of the labels.

    Every client holds iid examples. A client of cluster c labels class y as ``labels[c, y]``: a correct prediction for
    one cluster is wrong for another, for every input.

    Reference: Sattler, Müller and Samek 2020, "Clustered Federated Learning" (permuted labels).

    Attributes:
      member: [m] in 0 .. k - 1, the cluster of each client; clusters differ in size by at most 1.
      labels: [k, num_classes] int32, each cluster's label of each class: distinct permutations.
    """

    member: np.ndarray
    labels: np.ndarray


def draw_clusters(m: int, k: int, num_classes: int, rng: np.random.Generator) -> ClientClusters:
    """Draw the clusters and each one's permutation of the labels.

    Raises:
      JaxpflError: for k outside 1 .. m, or above the number of permutations of the classes.
    """
    most = min(m, math.factorial(num_classes))
    if not 1 <= k <= most:
        limit = f"the {m} clients" if most == m else f"the {most} permutations of {num_classes} classes"
        raise JaxpflError(f"clusters must be 1 to {most} ({limit}), got {k}")
    member = rng.permutation(np.arange(m) % k)
    permutations: dict[tuple[int, ...], None] = {}  # in the order in which they are drawn
    while len(permutations) < k:
        permutations[tuple(rng.permutation(num_classes).tolist())] = None
    return ClientClusters(member, np.array(list(permutations), np.int32))


def choose_users(users: np.ndarray, m: int | None, g: int, rng: np.random.Generator) -> np.ndarray:
    """Users of each client: disjoint groups of g.

    Args:
      users: [U] distinct users.
      m: clients; as many as there are groups of g unless given. Surplus users, chosen at random, are left out.
      g: users of each client.
      rng: the generator.

    Returns:
      [m, g], users ascending in each row. If every user is a client of its own, they are in order.

    Raises:
      JaxpflError: if g or m * g exceeds the number of users.
    """
    if len(users) < g:
        raise JaxpflError(f"users per client must be at most the {len(users)} users there are, got {g}")
    m = len(users) // g if m is None else m
    if m * g > len(users):
        raise JaxpflError(
            f"{m} clients of {g} users need {m * g} users, but there are {len(users)}: use at most {len(users) // g}"
        )
    if g == 1 and m == len(users):
        return np.sort(users)[:, None]
    return np.sort(rng.permutation(np.sort(users))[: m * g].reshape(m, g), axis=1)


def examples_of(users: np.ndarray, groups: np.ndarray) -> list[Indices]:
    """Indices of each client's examples.

    Args:
      users: [N] user of each example.
      groups: [m, g] users of each client, possibly without examples.
    """
    order = np.argsort(users, kind="stable")
    known, starts = np.unique(users[order], return_index=True)
    own = dict(zip(known.tolist(), np.split(order, starts[1:]), strict=True))
    nothing = np.zeros(0, np.int64)
    return [np.sort(np.concatenate([own.get(user, nothing) for user in group])) for group in groups.tolist()]
