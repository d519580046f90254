"""Clients' arrays of one type and shape, checked and joined all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from jaxpfl.core import types as store
from jaxpfl.core.types import ClientData
from jaxpfl.data.labels import checked_labels
from jaxpfl.data.precision import narrowed
from jaxpfl.data.sources.base import check_finite
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError

Examples: TypeAlias = tuple[Any, Any]
"""One client's inputs [n_i, ...] and labels [n_i] (or [n_i, d]); anything that `np.asarray` takes. Inputs may also be a
dictionary or NamedTuple of such arrays (not a list or tuple, which `np.asarray` converts to one array)."""


def stores_alike(splits: Sequence[Sequence[Examples]], ids: np.ndarray) -> list[ClientData] | None:
    """Store of each split, where the arrays of all clients are of one type and shape and all is well.

    Args:
      splits: of training first; a client's examples each, or none at all.
      ids: [m].

    Returns:
      None for other arrays, for clients without training examples, and where an example is refused: what is wrong, and
      of which client, is left to a look at one client after the other.
    """
    sizes, kinds = np.zeros((len(splits), len(ids)), np.int64), set()
    for row, own in zip(sizes, splits, strict=True):
        for i, one in enumerate(own):
            if type(one) is not tuple or len(one) != 2:
                return None
            x, y = one
            plain = type(x) is np.ndarray and type(y) is np.ndarray and x.ndim > 0 and y.ndim in (1, 2)
            if not plain or len(x) != len(y):
                return None
            kinds.add((x.dtype, x.shape[1:], y.dtype, y.shape[1:]))
            row[i] = len(y)
    if len(kinds) != 1 or not sizes[0].all():
        return None
    ((x_type, x_shape, y_type, y_shape),) = kinds
    check_memory(sizes, ids, 4 * int(np.prod(x_shape) + np.prod(y_shape)))
    found: list[ClientData] = []
    try:
        for own, size in zip(splits, sizes, strict=True):
            x, y = (_joined(own, 0, x_type, x_shape), _joined(own, 1, y_type, y_shape))
            wide = found[0].examples.x.dtype == np.float64 if found else None
            x, y = stored_leaf(x, "inputs", wide), checked_labels(y, "labels")
            found.append(ClientData.stacked(store.Examples(x, y), size))
    except JaxpflError:
        return None
    return found


def _joined(own: Sequence[Examples], part: int, kind: Any, shape: tuple[int, ...]) -> np.ndarray:
    kind = np.float32 if kind == np.float16 else kind
    if not own:
        return np.zeros((0, *shape), kind)
    return np.concatenate([one[part] for one in own], dtype=kind)


def stored_leaf(x: np.ndarray, whose: str, wide: bool | None = None) -> np.ndarray:
    """Convert one array of inputs to int32, or as `narrowed` does."""
    if np.issubdtype(x.dtype, np.integer) or x.dtype == bool:
        if x.dtype != bool and x.size and (x.min() < -(2**31) or x.max() >= 2**31):
            raise JaxpflError(f"{whose}: integer inputs must fit in 32 bits, got {x.min()} to {x.max()}")
        return x.astype(np.int32, copy=False)
    if not np.issubdtype(x.dtype, np.floating):
        raise JaxpflError(f"{whose}: inputs must be real numbers, got {x.dtype}")
    x = x if x.dtype == np.float32 else narrowed(x, wide=wide)
    check_finite(x, whose)
    return x


def check_memory(sizes: np.ndarray, ids: np.ndarray, one: int) -> None:
    """Refuse examples that would not fit in memory, before anything is allocated.

    Args:
      sizes: [splits, m], the clients' numbers of examples.
      ids: [m].
      one: bytes of an example.
    """
    of_client = sizes.sum(axis=0, dtype=np.int64)
    largest = int(of_client.argmax())
    host_memory.check(
        one * int(of_client.sum()),
        f"{of_client.sum()} examples of {len(ids)} clients (client {ids[largest]} has {of_client[largest]} of them) "
        "need",
        "take fewer examples, or fewer clients",
    )
