"""Types shared by every level: one client's data, and the federation of all clients stacked on axis 0.

Notation: m clients; n examples of capacity (the largest client's count, smaller ones are padded); [..., ] a leaf's
shape for ONE client. Stacked, every leaf gets a leading [m].
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

Array: TypeAlias = jax.Array
Key: TypeAlias = jax.Array
"""A typed PRNG key, as made by ``jax.random.key``."""
Device: TypeAlias = Any
"""A ``jax.Device`` (which is a variable to type checkers)."""
PyTree: TypeAlias = Any
Scalar: TypeAlias = Any
"""A Python number or a zero-dimensional array; traced where hyper-parameters are."""
Metrics: TypeAlias = dict[str, Array]


class ClientData(NamedTuple):
    """Examples of one client, padded to a capacity of n.

    Attributes:
      x: inputs, a tree of [n, ...]; zeros where padded.
      y: labels, [n]; zero where padded.
      mask: [n] bool, true for real examples, which come first.
    """

    x: PyTree
    y: Any
    mask: Any

    @property
    def size(self) -> Array:
        """The number of real examples, [] int32 (or [m] when stacked)."""
        return self.mask.sum(axis=-1, dtype=np.int32)


class Splits(NamedTuple):
    """Examples of a client that an algorithm may see. Test examples are not a field, so no algorithm can reach them."""

    train: ClientData
    validation: ClientData


class Federation(NamedTuple):
    """All m clients stacked on axis 0: the data argument of every compiled program.

    Attributes:
      client_ids: [m] int32, distinct; a client's random streams depend on its id, not on its place in the stack.
      train, validation, test: stacked `ClientData`, leaves [m, n_split, ...]; a split may have n_split = 0.
    """

    client_ids: Any
    train: ClientData
    validation: ClientData
    test: ClientData

    @property
    def num_clients(self) -> int:
        return self.client_ids.shape[0]

    @property
    def splits(self) -> Splits:
        return Splits(self.train, self.validation)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example's input (inputs that are one array)."""
        return tuple(self.train.x.shape[2:])
