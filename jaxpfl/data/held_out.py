"""Choice of the examples of one client that are held out for testing or validation."""

from __future__ import annotations

import numpy as np


def number_held(n: int, share: float) -> int:
    """Number of n examples to hold out: round(share * n), but at least one and not all where share > 0 and n >= 2."""
    return 0 if share == 0.0 or n < 2 else min(max(int(share * n + 0.5), 1), n - 1)


def hold_out(labels: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Mask of one client's examples to hold out, [n] bool, class by class as evenly as the counts allow.

    Of the examples held out (`number_held`) each class gives floor(share * its count); the rest come from the classes
    with the largest remainders, ties at random.
    """
    held, total = np.zeros(len(labels), bool), number_held(len(labels), share)
    if not total:
        return held
    classes, counts = np.unique(labels, return_counts=True)
    quotas = _quotas(counts, share, total, rng.permutation(len(classes)))
    for label, quota in zip(classes, quotas, strict=True):
        held[rng.permutation(np.flatnonzero(labels == label))[:quota]] = True
    return held


def hold_out_last(users: np.ndarray, share: float) -> np.ndarray:
    """Mask of one client's last examples of each of its users, [n] bool, by the shares of `hold_out`.

    Args:
      users: of the client's examples in their order, [n].
      share: as in `hold_out`.
    """
    held, total = np.zeros(len(users), bool), number_held(len(users), share)
    names, counts = np.unique(users, return_counts=True)
    for name, quota in zip(names, _quotas(counts, share, total, np.arange(len(names))), strict=True):
        own = np.flatnonzero(users == name)
        held[own[len(own) - quota :]] = True
    return held


def _quotas(counts: np.ndarray, share: float, total: int, order: np.ndarray) -> np.ndarray:
    """Numbers to hold out of each group: floor(share * its count), and one more where remainders are largest.

    Args:
      counts: of the groups' examples, [k].
      share: to hold out.
      total: of them.
      order: of the groups, [k], in which equal remainders are taken.
    """
    quotas = np.floor(share * counts).astype(int)
    remainders = share * counts - quotas
    # Rounding in floating point, or the cut to n - 1, can leave a difference of either sign.
    for place in order[np.argsort(-remainders[order], kind="stable")][: max(total - quotas.sum(), 0)]:
        quotas[place] += 1
    return quotas
