"""Multi-layer perceptrons."""

from __future__ import annotations

import jax
from flax import linen as nn

from jaxpfl.core.types import Array
from jaxpfl.models.base import Model, from_linen
from jaxpfl.models.layers import Dense, check_widths, is_head
from jaxpfl.models.normalisation import BatchNorm, LayerNorm, is_norm


class MLP(nn.Module):
    """Dense layers with relu between them, on flattened inputs: [N, ...] -> [N, num_classes].

    With `normalise` each hidden layer is normalised before its relu (Ba et al. 2016, "Layer Normalization"), with
    ``batch`` by batch normalisation.
    """

    num_classes: int
    hidden: tuple[int, ...] = (64,)
    normalise: bool = False
    batch: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = x.reshape(x.shape[0], -1)
        for i, width in enumerate(self.hidden):
            x = Dense(width, name=f"dense{i}")(x)
            if self.batch:
                x = BatchNorm(name=f"norm{i}")(x.T).T
            elif self.normalise:
                x = LayerNorm(name=f"norm{i}")(x)
            x = jax.nn.relu(x)
        return Dense(self.num_classes, name="head")(x)


def mlp(num_classes: int, hidden: tuple[int, ...] = (64,)) -> Model:
    """A perceptron with the given hidden widths; PersFL's MNIST network (784-100-10) has ``(100,)``."""
    return from_linen(MLP(num_classes, check_widths(hidden)), is_head)


def mlp_ln(num_classes: int, hidden: tuple[int, ...] = (64,)) -> Model:
    """`mlp` with layer normalisation in each hidden layer."""
    return from_linen(MLP(num_classes, check_widths(hidden), normalise=True), is_head, is_norm)


def mlp_bn(num_classes: int, hidden: tuple[int, ...] = (64,)) -> Model:
    """`mlp` with batch normalisation in each hidden layer."""
    return from_linen(MLP(num_classes, check_widths(hidden), batch=True), is_head, is_norm)
