"""Clients in shares with about equally many examples."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


def deal(sizes: np.ndarray, room: Sequence[int]) -> list[np.ndarray]:
    """Deal clients to shares: each goes to the share with the least so far that has room, large ones first.

    This is Graham's rule of the longest processing time first, with a limit on the clients of a share. Examples may be
    of several kinds; a client's size, and a share's load, is then its largest part of any kind's total.

    Args:
      sizes: [m, kinds], the clients' numbers of examples.
      room: the most clients of each share, m or more in all.

    Returns:
      The clients of each share, ascending.
    """
    sizes = np.asarray(sizes, np.float64)
    parts = sizes / np.maximum(sizes.sum(axis=0), 1)
    loads = [np.zeros(sizes.shape[1]) for _ in room]
    members: list[list[int]] = [[] for _ in room]
    open_shares = [(0.0, share) for share, most in enumerate(room) if most]
    for client in np.argsort(-parts.max(axis=1), kind="stable"):
        _, share = heapq.heappop(open_shares)
        members[share].append(int(client))
        loads[share] += parts[client]
        if len(members[share]) < room[share]:
            heapq.heappush(open_shares, (float(loads[share].max()), share))
    return [np.sort(np.asarray(own, np.int64)) for own in members]


def held(sizes: np.ndarray, members: Sequence[np.ndarray]) -> int:
    """Examples that shares hold in stores as long as the largest one's, of all kinds together."""
    totals = np.array([sizes[own].sum(axis=0, dtype=np.int64) for own in members])
    return int(totals.max(axis=0).sum()) * len(members)
