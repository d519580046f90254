"""Local work in epochs: each client takes as many steps as passes over its own training examples need."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxpfl.core.types import Array


class LocalEpochs(NamedTuple):
    """Local work of a round in passes over a client's examples, rounded up to whole mini-batches.

    With n_i examples a client takes ``ceil(epochs n_i / b_i)`` steps of ``b_i = min(batch_size, n_i)`` examples.

    Attributes:
      epochs: E, passes in a round.
      batch_size: b.
      batches: mini-batches of a step.
    """

    epochs: int
    batch_size: int
    batches: int = 1

    def steps(self, size: Array) -> Array:
        """Steps of a client in a round, [] int32; one without examples has one.

        Examples:
          >>> int(LocalEpochs(1, 10).steps(jnp.int32(34)))
          4
        """
        size = jnp.maximum(size, 1)
        used = jnp.minimum(size, self.batch_size)
        return (self.epochs * size + used - 1) // used

    def draws(self, size: Array) -> Array:
        """Mini-batches of a client in a round, [] int32."""
        return self.batches * self.steps(size)

    def on_host(self, sizes: np.ndarray) -> np.ndarray:
        """Steps of clients with these numbers of examples, [m]; on the host."""
        sizes = np.maximum(np.asarray(sizes, np.int64), 1)
        used = np.minimum(sizes, self.batch_size)
        return -(-self.epochs * sizes // used)
