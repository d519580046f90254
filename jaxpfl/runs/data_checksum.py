"""CRC-32 of the data that a run is of, as stored in its config."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxpfl.core.trees import checksum
from jaxpfl.core.types import ClientData, Federation


def of_data(*federations: Federation | None) -> int:
    """CRC-32 of the clients with their examples; it does not depend on capacities."""
    return checksum(
        [
            (given.client_ids, [(split.flat(), split.size) for split in given.all_splits])
            for given in federations
            if given is not None
        ]
    )


def is_of(stored: int, *federations: Federation | None) -> bool:
    """True if a stored checksum is of these data: `of_data`, or that of the padded arrays of runs before the store."""
    if stored == of_data(*federations):
        return True
    found = 0
    for given in federations:
        if given is None:
            continue
        found = zlib.crc32(np.ascontiguousarray(given.client_ids).data, found)
        for split in given.all_splits:
            for part in _padded(split):
                found = zlib.crc32(part, found)
    return stored == found


def _padded(data: ClientData) -> Iterator[Any]:
    """Bytes of the padded arrays x, y and mask, one client after the other."""
    ends = np.cumsum(np.asarray(data.size), dtype=np.int64)
    starts = ends - np.asarray(data.size)
    for leaf in jax.tree.leaves(data.flat()):
        zeros = np.zeros((data.capacity, *leaf.shape[1:]), leaf.dtype)
        for start, end in zip(starts, ends, strict=True):
            yield np.ascontiguousarray(leaf[start:end]).data
            yield zeros[end - start :].data
    for start, end in zip(starts, ends, strict=True):
        yield (np.arange(data.capacity) < end - start).data
