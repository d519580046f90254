"""Partitions with random class proportions (Dirichlet) or random sizes (log-normal), equal on every platform.

N is the number of examples, C the number of classes, and m the number of clients.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from jaxpfl.data import portable
from jaxpfl.data.partition.deals import Indices, apportion, deal, integer_weights
from jaxpfl.support.errors import JaxpflError

_TRIES = 1000


def dirichlet_per_client(
    labels: np.ndarray, m: int, alpha: float, num_classes: int, rng: np.random.Generator
) -> list[Indices]:
    """Draw clients of equal size whose class proportions come from Dir(alpha, ..., alpha) (Hsu et al. 2019).

    Clients take turns in random order. In each turn, a client draws one example without replacement: first a class,
    with the client's proportions renormalized over the classes that have examples left, and then an example of that
    class. All examples are used, and clients' sizes differ by at most 1. In the last turns few classes have examples
    left, so clients must take what remains. The realized proportions are therefore flatter than the drawn proportions,
    especially for a small alpha. (Hsu et al. draw from Dir(alpha' p) with given class proportions p. If p is uniform,
    alpha' equals alpha times the number of classes.)

    Args:
      labels: class of each example, [N] in 0 .. num_classes - 1. Classes without examples are ignored.
      m: number of clients, at most N.
      alpha: concentration, > 0. With a large value, clients are nearly iid; with a small value, most examples of a
        client are from one class.
      num_classes: number of classes.
      rng: random generator.

    Raises:
      JaxpflError: if there are more clients than examples.
    """
    _check_enough(len(labels), m)
    classes = np.unique(labels)
    log_weights = portable.log_gamma(rng, alpha, m * len(classes)).reshape(m, len(classes))
    sizes = np.full(m, len(labels) // m)
    sizes[rng.permutation(m)[: len(labels) % m]] += 1
    turns = rng.permutation(np.repeat(np.arange(m), sizes))
    counts = _draw_in_turn(log_weights, turns, np.bincount(labels, minlength=num_classes)[classes], rng)
    return deal(labels, classes, counts, rng)


def dirichlet_per_class(
    labels: np.ndarray, m: int, alpha: float, least: int, num_classes: int, rng: np.random.Generator
) -> list[Indices]:
    """Divide each class among the clients in proportions from Dir(alpha, ..., alpha); sizes are very unequal.

    This is the split of Yurochkin et al. 2019 with the two customary changes of Lin et al. 2020: a client that already
    has N / m examples gets no examples of the following classes, and the draw is repeated until every client has
    ``least`` examples. Classes are dealt in random order. All examples are used.

    Args:
      labels: class of each example, [N] in 0 .. num_classes - 1.
      m: number of clients, at most N.
      alpha: concentration, > 0.
      least: minimum number of examples per client (10 in Lin et al.); if 0, the first draw is accepted.
      num_classes: number of classes.
      rng: random generator.

    Raises:
      JaxpflError: if m or m * least exceeds N, if ``least`` is negative, or if none of 1000 draws is accepted.
    """
    _check_enough(len(labels), m)
    if least < 0 or m * least > len(labels):
        raise JaxpflError(
            f"min_examples (--min-examples) must be from 0 to {len(labels) // m} "
            f"for {m} clients and {len(labels)} examples, got {least}"
        )
    classes = np.unique(labels)
    totals = np.bincount(labels, minlength=num_classes)[classes]
    for _ in range(_TRIES):
        counts = _split_classes(totals, m, alpha, rng)
        if counts.sum(axis=1).min() >= least:
            return deal(labels, classes, counts, rng)
    raise JaxpflError(
        f"none of {_TRIES} Dirichlet splits gave each of {m} clients at least {least} examples: "
        "use a larger alpha, fewer clients or a smaller min_examples (--min-examples)"
    )


def lognormal(labels: np.ndarray, m: int, sigma: float, rng: np.random.Generator) -> list[Indices]:
    """Draw iid clients of log-normal size: proportional to exp(sigma z) with z standard normal, and at least 1.

    Args:
      labels: class of each example, [N]; only the number of labels matters.
      m: number of clients, at most N.
      sigma: standard deviation of the logarithm of the sizes, >= 0; 0 gives equal sizes.
      rng: random generator.

    Raises:
      JaxpflError: if there are more clients than examples.
    """
    sizes = lognormal_sizes(len(labels), m, sigma, rng)
    return np.split(rng.permutation(len(labels)), np.cumsum(sizes)[:-1])


def lognormal_by_class(
    labels: np.ndarray, held: np.ndarray, sigma: float, least: int, num_classes: int, rng: np.random.Generator
) -> list[Indices]:
    """Draw clients that hold given classes and have log-normal sizes.

    Every client first gets ``least`` examples, as evenly from its classes as possible. The rest of each class is
    divided among its holders in proportion to exp(sigma z), with z standard normal for each client. All examples are
    used. (Li et al. 2020, "Federated Optimization in Heterogeneous Networks", split MNIST like this, with two classes
    per client and sigma = 2.)

    Args:
      labels: class of each example, [N] in 0 .. num_classes - 1.
      held: distinct classes of each client, [m, k].
      sigma: standard deviation of the logarithm of a client's weight exp(sigma z), >= 0.
      least: minimum number of examples per client.
      num_classes: number of classes.
      rng: random generator.

    Raises:
      JaxpflError: if a class has too few examples for its holders.
    """
    (m, k), totals = held.shape, np.bincount(labels, minlength=num_classes)
    classes, counts = np.unique(held), np.zeros((m, num_classes), np.int64)
    np.put_along_axis(counts, held, least // k + (np.arange(k) < least % k), axis=1)
    z = portable.normal(rng, m)
    weights = np.maximum(integer_weights(portable.exp(sigma * (z - z.max()))), 1)
    for label in classes:
        holders = np.flatnonzero((held == label).any(axis=1))
        left = int(totals[label] - counts[:, label].sum())
        if left < 0:
            raise JaxpflError(
                f"class {label} has {totals[label]} examples, too few for {len(holders)} clients that hold it: use "
                "fewer clients, fewer classes per client or a smaller min_examples (--min-examples)"
            )
        counts[holders, label] += apportion(weights[holders], left, rng)
    return deal(labels, classes, counts[:, classes], rng)


def lognormal_sizes(total: int, m: int, sigma: float, rng: np.random.Generator) -> np.ndarray:
    """Draw m log-normal sizes [m] int64 with the sum ``total``, as in `lognormal`."""
    _check_enough(total, m)
    z = portable.normal(rng, m)
    sizes = apportion(integer_weights(portable.exp(sigma * (z - z.max()))), total, rng)
    for client in np.flatnonzero(sizes == 0):
        sizes[client] = 1
        sizes[np.argmax(sizes)] -= 1
    return sizes


def _draw_in_turn(log_weights: np.ndarray, turns: np.ndarray, left: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw the class of one example per turn, without replacement; return each client's number of each class, [m, C].

    Args:
      log_weights: logarithms of unnormalized class proportions of each client, [m, C].
      turns: client that draws in each turn, [N].
      left: number of examples of each class, N in total, [C].
      rng: random generator.
    """
    m, num_classes = log_weights.shape
    counts = np.zeros((m, num_classes), np.int64)
    alive = np.flatnonzero(left)
    left = left.tolist()
    ladders: list[list[float] | None] = [None] * m  # cumulative weights of the remaining classes, by client
    for client, u in zip(turns.tolist(), portable.uniform(rng, len(turns)).tolist(), strict=True):
        ladder = ladders[client]
        if ladder is None:
            ladder = np.add.accumulate(portable.proportions(log_weights[client, alive])).tolist()
            ladders[client] = ladder
        label = int(alive[min(bisect_right(ladder, u * ladder[-1]), len(ladder) - 1)])
        counts[client, label] += 1
        left[label] -= 1
        if left[label] == 0:
            alive = alive[alive != label]
            ladders = [None] * m
    return counts


def _split_classes(totals: np.ndarray, m: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Draw once, as in `dirichlet_per_class`, how many examples of each class each client gets, [m, C]."""
    n = int(totals.sum())
    counts = np.zeros((m, len(totals)), np.int64)
    sizes = np.zeros(m, np.int64)
    for place in rng.permutation(len(totals)):
        log_weights = portable.log_gamma(rng, alpha, m)
        open_ = np.flatnonzero(sizes * m < n)
        ladder = np.add.accumulate(portable.proportions(log_weights[open_]))
        ends = np.floor(ladder * totals[place]).astype(np.int64)
        ends[-1] = totals[place]  # rounding must not leave out examples
        counts[open_, place] = np.diff(np.minimum(ends, totals[place]), prepend=0)
        sizes += counts[:, place]
    return counts


def _check_enough(n: int, m: int) -> None:
    if m > n:
        raise JaxpflError(f"{n} examples are too few for {m} clients: use at most {n} clients")
