"""Multi-layer perceptrons."""

from __future__ import annotations

import jax
from flax import linen as nn

from jaxpfl.errors import JaxpflError
from jaxpfl.models.base import Model, from_linen
from jaxpfl.models.layers import Dense, is_head
from jaxpfl.types import Array


class MLP(nn.Module):
    """Dense layers with relu between them, on flattened inputs: [N, ...] -> [N, num_classes]."""

    num_classes: int
    hidden: tuple[int, ...] = (64,)

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = x.reshape(x.shape[0], -1)
        for i, width in enumerate(self.hidden):
            x = jax.nn.relu(Dense(width, name=f"dense{i}")(x))
        return Dense(self.num_classes, name="head")(x)


def mlp(num_classes: int, hidden: tuple[int, ...] = (64,)) -> Model:
    """A perceptron with the given hidden widths; PersFL's MNIST network (784-100-10) has ``(100,)``."""
    if not hidden or min(hidden) < 1:
        raise JaxpflError(f"hidden widths must be positive and at least one, got {hidden}")
    return from_linen(MLP(num_classes, tuple(hidden)), is_head)
