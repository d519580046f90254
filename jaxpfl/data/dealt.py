"""Clients' shares of examples in files, stacked in files of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl import mapped
from jaxpfl.data.stack import with_training
from jaxpfl.types import ClientData, Examples, Federation


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


class Dealt(NamedTuple):
    """A split's examples in files, dealt to m clients.

    Attributes:
      x: inputs [N, ...], float32 or int32 in memory-mapped files.
      y: labels [N] or [N, d].
      places: those of each client's examples.
      labels: [m, num_classes], a client's own names of the classes, or None.
    """

    x: Any
    y: np.ndarray
    places: Sequence[np.ndarray]
    labels: np.ndarray | None


def stack_dealt(train: Dealt, test: Dealt, validation: Dealt, client_ids: np.ndarray, drop_empty: bool) -> Federation:
    """Stack clients' shares of examples in files, in temporary files of their own; as `stack_clients` in all else.

    Args:
      train, test, validation: the clients' examples, which are not checked.
      client_ids: [m].
      drop_empty: leave out clients without training examples, and warn.

    Raises:
      JaxpflError: for clients without training examples (unless ``drop_empty``), and no room for the files.
    """
    kept = with_training(np.array([len(own) for own in train.places]), client_ids, drop_empty)

    def stacked(split: Dealt) -> ClientData:
        own = [places for places, k in zip(split.places, kept, strict=True) if k]
        sizes, places = np.array([len(one) for one in own], np.int64), np.concatenate(own)
        kind = np.float32 if np.issubdtype(split.y.dtype, np.floating) else np.int32
        y = np.asarray(split.y[places])
        if split.labels is not None:
            y = np.asarray(split.labels)[kept][np.repeat(np.arange(len(own)), sizes), y]
        y = y.astype(kind, copy=False)
        x = jax.tree.map(lambda leaf: mapped.gathered(leaf, places), split.x)
        return ClientData.stacked(Examples(x, np.asarray(y)), sizes)

    return Federation(client_ids[kept].astype(np.int32), stacked(train), stacked(validation), stacked(test))
