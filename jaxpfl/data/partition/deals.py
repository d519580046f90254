"""Partitions by class or user: iid, classes per client, shards, superclasses, natural users, and label permutations.

Only `Generator.permutation` and `Generator.integers` are used, because they return the same numbers on every platform.
Fractional shares are rounded in integer arithmetic, for the same reason.

N is the number of examples, C the number of classes, and U the number of users.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np

from jaxpfl.support.errors import JaxpflError

Indices: TypeAlias = np.ndarray
"""Indices of one client's examples in a source's arrays, [n_i] int64."""


def iid(labels: np.ndarray, m: int, rng: np.random.Generator) -> list[Indices]:
    """Shuffle all examples and deal them evenly: clients' sizes differ by at most 1.

    Args:
      labels: class of each example, [N]; only the number of labels matters.
      m: number of clients; if above N, some clients get no example.
      rng: random generator.
    """
    return list(np.array_split(rng.permutation(len(labels)), m))


def deal_classes(classes: np.ndarray, m: int, k: int, rng: np.random.Generator, what: str = "classes") -> np.ndarray:
    """Deal k distinct classes to each client, [m, k], so that nearly equally many clients get each class.

    In a deck of m k cards, each of the C classes occurs floor(m k / C) or floor(m k / C) + 1 times. The deck is
    shuffled, and k cards are dealt to each client. A client that got a class twice swaps one of the two cards with a
    client that lacks the class. If no swap is possible, the deck is dealt again. After 20 attempts, the deck is dealt
    greedily, which always succeeds but mixes the classes less.

    Raises:
      JaxpflError: if there are fewer than k classes, or more than m k.
    """
    if k > len(classes):
        raise JaxpflError(f"{what} per client must be from 1 to {len(classes)} (the number of {what}), got {k}")
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
    """Split each class's examples evenly among its holders, the clients that hold the class.

    Args:
      labels: class of each example, [N].
      held: classes of each client, [m, k]; padded with -1 for a client with fewer than k classes.
      rng: random generator. If a class does not divide evenly, holders drawn at random get one more example.
      allow_none: whether a class may have fewer examples than holders, as in a small test set. Some holders then get no
        example.

    Raises:
      JaxpflError: if a class has fewer examples than holders, unless ``allow_none``.
    """
    parts: list[list[Indices]] = [[] for _ in held]
    for label in np.unique(held[held >= 0]):
        holders = rng.permutation(np.flatnonzero((held == label).any(axis=1)))
        examples = rng.permutation(np.flatnonzero(labels == label))
        if len(examples) < len(holders) and not allow_none:
            raise JaxpflError(
                f"class {label} has {len(examples)} examples, too few for {len(holders)} clients that hold it: "
                "use fewer clients or fewer classes per client"
            )
        for client, part in zip(holders, np.array_split(examples, len(holders)), strict=True):
            parts[client].append(part)
    return [np.concatenate(own) for own in parts]


def shards(labels: np.ndarray, m: int, s: int, rng: np.random.Generator) -> list[Indices]:
    """Sort the examples by label, cut them into m * s shards, and deal s shards to each client.

    This is the "pathological" non-iid split of McMahan et al. 2017, with 200 shards of 300 digits and 2 shards for each
    of 100 clients. All examples are used, and shards differ in size by at most 1. Within a label the order is random.

    Args:
      labels: class of each example, [N].
      m: number of clients.
      s: number of shards per client.
      rng: random generator.

    Raises:
      JaxpflError: if there are more shards than examples.
    """
    if m * s > len(labels):
        raise JaxpflError(f"{m} clients with {s} shards each require {m * s} examples, but there are {len(labels)}")
    shuffled = rng.permutation(len(labels))
    by_label = np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], m * s)
    hands = rng.permutation(m * s).reshape(m, s)
    return [np.concatenate([by_label[shard] for shard in hand]) for hand in hands]


def deal_superclasses(superclasses: np.ndarray, m: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Deal k distinct superclasses to each client, which then holds all classes of these superclasses.

    As in `deal_classes`, all superclasses go to nearly the same number of clients.

    Args:
      superclasses: superclass of each class, [num_classes].
      m: number of clients.
      k: number of superclasses per client.
      rng: random generator.

    Returns:
      Classes of each client for `split_by_class`: [m, largest number of classes of a client], padded with -1.

    Raises:
      JaxpflError: as in `deal_classes`.
    """
    hands = deal_classes(np.unique(superclasses), m, k, rng, "superclasses")
    held = [np.flatnonzero(np.isin(superclasses, hand)) for hand in hands]
    widest = max(map(len, held))
    return np.array([np.pad(classes, (0, widest - len(classes)), constant_values=-1) for classes in held])


def _repair(hands: np.ndarray, num_classes: int, rng: np.random.Generator) -> bool:
    """Swap classes between clients, in place, until no client holds a class twice; return False if this fails.

    Row i of ``hands`` [m, k] has the k classes that were dealt to client i. Every swap decreases the number of
    duplicates, so the loop terminates. False means that a duplicate remains and no swap removes it.
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
            # A few random guesses nearly always find a partner; if not, search all slots.
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
    """Deal copies[c] copies of each class c to m clients, so that each client holds k distinct classes, [m, k].

    Classes are dealt in random order. The copies of a class go to different clients: first to the client that still
    lacks the most classes, with ties broken at random. If any such deal exists, this method finds one (theorem of Gale
    and Ryser).
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
    """Convert weights in [0, 1] to integers up to 2**36, so that later computations are exact."""
    return np.floor(weights * _SCALE).astype(np.int64)


def apportion(weights: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
    """Divide ``total`` into integers proportional to ``weights``, by largest remainders; break ties at random.

    Args:
      weights: integers >= 0, not all zero, [k].
      total: number to divide; total * the largest weight must stay below 2**63.
      rng: random generator.

    Returns:
      The integers, [k] int64. Their sum is ``total``, and an integer is 0 if its weight is 0.
    """
    whole = int(weights.sum())
    quotas, remainders = np.divmod(weights * total, whole)
    order = rng.permutation(len(weights))
    lacking = total - int(quotas.sum())
    quotas[order[np.argsort(-remainders[order], kind="stable")][:lacking]] += 1
    return quotas


def deal(labels: np.ndarray, classes: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Deal examples by a table of counts: client i gets counts[i, c] random examples of classes[c].

    Args:
      labels: class of each example, [N].
      classes: distinct labels, [C].
      counts: number of examples of each class for each client, [m, C]; the sum of a column may be smaller than the
        number of examples of its class.
      rng: random generator.

    Returns:
      m disjoint arrays of indices, each ordered by class.
    """
    parts: list[list[np.ndarray]] = [[] for _ in counts]
    for place, label in enumerate(classes):
        examples = rng.permutation(np.flatnonzero(labels == label))
        ends = np.cumsum(counts[:, place])
        for own, part in zip(parts, np.split(examples[: ends[-1]], ends[:-1]), strict=True):
            own.append(part)
    return [np.concatenate(own) for own in parts]


def count_classes(labels: np.ndarray, parts: list[np.ndarray], num_classes: int) -> np.ndarray:
    """Count each client's examples of each class, [m, num_classes]."""
    return np.array([np.bincount(labels[part], minlength=num_classes) for part in parts])


def deal_alike(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Deal the official test set so that each class is divided among the clients as in the training set.

    A class of the test set is divided in proportion to the clients' numbers of training examples of that class.
    Examples of a class that no client holds are left out.

    Args:
      labels: labels of the T examples in the test set, [T].
      counts: number of each client's training examples of each class, [m, num_classes].
      rng: random generator.
    """
    classes = np.unique(labels)
    classes = classes[counts[:, classes].sum(axis=0) > 0]
    if not len(classes):
        return [np.zeros(0, np.int64) for _ in counts]
    table = [apportion(counts[:, label], int((labels == label).sum()), rng) for label in classes]
    return deal(labels, classes, np.stack(table, axis=1), rng)


class ClientClusters(NamedTuple):
    """True clusters of clients, each with its own permutation of the labels.

    Every client holds iid examples. A client of cluster c labels class y as ``labels[c, y]``. The same input can
    therefore have different labels in two clusters, and no single model can fit both.

    Reference: Sattler, Müller and Samek 2020, "Clustered Federated Learning" (permuted labels).

    Attributes:
      member: cluster of each client, [m] in 0 .. k - 1; clusters differ in size by at most 1.
      labels: label that each cluster gives to each class, [k, num_classes] int32; the rows are distinct permutations.
    """

    member: np.ndarray
    labels: np.ndarray


def draw_clusters(m: int, k: int, num_classes: int, rng: np.random.Generator) -> ClientClusters:
    """Divide m clients at random into k clusters, and draw a permutation of the labels for each cluster.

    Raises:
      JaxpflError: if k is outside 1 .. m, or above the number of permutations of the classes.
    """
    most = min(m, math.factorial(num_classes))
    if not 1 <= k <= most:
        limit = "clients" if most == m else f"permutations of {num_classes} classes"
        raise JaxpflError(f"clusters must be from 1 to {most} (the number of {limit}), got {k}")
    member = rng.permutation(np.arange(m) % k)
    permutations: dict[tuple[int, ...], None] = {}  # a set that keeps the order of the draws
    while len(permutations) < k:
        permutations[tuple(rng.permutation(num_classes).tolist())] = None
    return ClientClusters(member, np.array(list(permutations), np.int32))


def choose_users(users: np.ndarray, m: int | None, g: int, rng: np.random.Generator) -> np.ndarray:
    """Choose the users of each client: disjoint groups of g users.

    Args:
      users: distinct users, [U].
      m: number of clients; by default, the largest possible number. Surplus users, chosen at random, are left out.
      g: number of users per client.
      rng: random generator.

    Returns:
      The users of each client, [m, g], ascending in each row. If each user becomes one client (g is 1 and no user is
      left out), clients are in ascending order of their users.

    Raises:
      JaxpflError: if g or m * g exceeds the number of users.
    """
    if len(users) < g:
        raise JaxpflError(f"users per client must be at most {len(users)} (the number of users), got {g}")
    m = len(users) // g if m is None else m
    if m * g > len(users):
        raise JaxpflError(
            f"{m} clients (users per client: {g}) require {m * g} users, but there are only {len(users)}: use at most "
            f"{len(users) // g} clients"
        )
    if g == 1 and m == len(users):
        return np.sort(users)[:, None]
    return np.sort(rng.permutation(np.sort(users))[: m * g].reshape(m, g), axis=1)


def examples_of(users: np.ndarray, groups: np.ndarray) -> list[Indices]:
    """Return the indices of each client's examples.

    Args:
      users: user of each example, [N].
      groups: users of each client, [m, g]; users without examples are allowed.
    """
    order = np.argsort(users, kind="stable")
    known, starts = np.unique(users[order], return_index=True)
    own = dict(zip(known.tolist(), np.split(order, starts[1:]), strict=True))
    nothing = np.zeros(0, np.int64)
    return [np.sort(np.concatenate([own.get(user, nothing) for user in group])) for group in groups.tolist()]
