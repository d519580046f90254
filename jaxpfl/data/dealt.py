"""Clients' shares of one data set's examples, stacked all at once; of examples in files, in files of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl.core.types import ClientData, Examples, Federation
from jaxpfl.data.stack import with_training
from jaxpfl.data.uniform import check_memory, stored_leaf
from jaxpfl.support import mapped
from jaxpfl.support.errors import JaxpflError


def chosen(federation: Federation, mask: np.ndarray) -> Federation:
    """The clients of a mask [m], as `Federation.rows`; examples in files are copied to temporary files.

    Raises:
      UnwritableError: if there is no room for the files.
    """

    def of_split(split: ClientData) -> ClientData:
        if not any(mapped.is_mapped(leaf) for leaf in jax.tree.leaves(split.examples)):
            return split.rows(np.flatnonzero(mask))
        start, size = np.asarray(split.start)[mask], np.asarray(split.size)[mask]
        ends = np.cumsum(size, dtype=np.int64)
        places = np.arange(int(size.sum(dtype=np.int64))) + np.repeat(start - (ends - size), size)
        examples = jax.tree.map(lambda leaf: mapped.gathered(leaf, places), split.examples)
        return ClientData.stacked(examples, size).bounded(split.capacity)

    ids, *splits = federation
    return Federation(np.asarray(ids)[mask], *map(of_split, splits))


_STORED = (np.dtype(np.float32), np.dtype(np.int32))


class Dealt(NamedTuple):
    """A split's examples, dealt to m clients.

    Attributes:
      x: inputs [N, ...], float32 (float64 where that loses digits) or int32, in memory or in memory-mapped files.
      y: labels [N] or [N, d].
      places: those of each client's examples.
      labels: [m, num_classes], a client's own names of the classes, or None.
    """

    x: Any
    y: np.ndarray
    places: Sequence[np.ndarray]
    labels: np.ndarray | None


def alike(train: Any, test: Any, name: str) -> tuple[Any, Any]:
    """Finite inputs of training and testing in the types of a store: float32 for both where one of them has it.

    Args:
      train, test: inputs [N, ...] of one data set.
      name: the data set's.

    Raises:
      JaxpflError: for inputs of other shapes or types, integers beyond 32 bits, and numbers that float32 cannot hold.
    """
    if train is test:
        stored = jax.tree.map(lambda leaf: _in_store(leaf, f"data set {name!r}, train"), train)
        return stored, stored
    if jax.tree.structure(train) != jax.tree.structure(test):
        found, given = jax.tree.structure(test), jax.tree.structure(train)
        raise JaxpflError(f"data set {name!r}: test inputs are {found}, those of training {given}")
    pairs = []
    for a, b in zip(jax.tree.leaves(train), jax.tree.leaves(test), strict=True):
        if a.shape[1:] != b.shape[1:]:
            raise JaxpflError(
                f"data set {name!r}: one test input has shape {b.shape[1:]}, those of training {a.shape[1:]}"
            )
        a, b = (
            _in_store(leaf, f"data set {name!r}, {part}") for leaf, part in zip((a, b), ("train", "test"), strict=True)
        )
        kind = a.dtype if a.dtype == b.dtype else np.float64 if np.float64 in (a.dtype, b.dtype) else np.float32
        pairs.append((a.astype(kind, copy=False), b.astype(kind, copy=False)))
    stored = [jax.tree.unflatten(jax.tree.structure(train), leaves) for leaves in zip(*pairs, strict=True)]
    return stored[0], stored[1]


def _in_store(leaf: Any, whose: str) -> Any:
    return leaf if leaf.dtype in _STORED else stored_leaf(leaf, whose)


def stack_dealt(train: Dealt, test: Dealt, validation: Dealt, client_ids: np.ndarray, drop_empty: bool) -> Federation:
    """Stack clients' shares of examples; the same federation as `stack_clients` of them, a split at a time.

    Args:
      train, test, validation: the clients' examples, which are not checked; their inputs are `alike`.
      client_ids: [m].
      drop_empty: leave out clients without training examples, and warn.

    Raises:
      JaxpflError: for clients without training examples (unless ``drop_empty``), and no room for the examples.
    """
    splits = (train, validation, test)
    sizes = np.array([[len(own) for own in split.places] for split in splits], np.int64)
    kept = with_training(sizes[0], client_ids, drop_empty)
    ids, sizes = client_ids[kept].astype(np.int32), sizes[:, kept]
    in_memory = [leaf for leaf in jax.tree.leaves(train.x) if not mapped.is_mapped(leaf)]
    check_memory(sizes, ids, sum(leaf.dtype.itemsize * int(np.prod(leaf.shape[1:])) for leaf in (*in_memory, train.y)))
    real = any(np.issubdtype(split.y.dtype, np.floating) for split in splits if len(split.y))

    def stacked(split: Dealt, sizes: np.ndarray) -> ClientData:
        places = np.concatenate([own for own, k in zip(split.places, kept, strict=True) if k])
        y = np.asarray(split.y[places])
        if split.labels is not None:
            y = np.asarray(split.labels)[kept][np.repeat(np.arange(len(sizes)), sizes), y]
        x = jax.tree.map(lambda leaf: mapped.gathered(leaf, places), split.x)
        return ClientData.stacked(
            Examples(x, np.asarray(y.astype(np.float32 if real else np.int32, copy=False))), sizes
        )

    return Federation(ids, *map(stacked, splits, sizes))
