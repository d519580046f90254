"""Apportionment of integers in given proportions, and dealing examples by a table of counts, in integer arithmetic."""

from __future__ import annotations

import numpy as np

_SCALE = 2**36


def integer_weights(weights: np.ndarray) -> np.ndarray:
    """Weights in [0, 1] as integers up to 2**36, so that later computations are exact."""
    return np.floor(weights * _SCALE).astype(np.int64)


def apportion(weights: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
    """Apportion ``total`` in proportion to integer weights, by largest remainders, ties at random.

    Args:
      weights: [k] integers >= 0, not all zero.
      total: to be apportioned; total * the largest weight must stay below 2**63.
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
      labels: of the second set, [T].
      counts: [m, num_classes] of the first set.
      rng: the generator.
    """
    classes = np.unique(labels)
    classes = classes[counts[:, classes].sum(axis=0) > 0]
    if not len(classes):
        return [np.zeros(0, np.int64) for _ in counts]
    table = [apportion(counts[:, label], int((labels == label).sum()), rng) for label in classes]
    return deal(labels, classes, np.stack(table, axis=1), rng)
