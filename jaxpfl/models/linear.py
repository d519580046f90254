"""Softmax regression."""

from __future__ import annotations

from flax import linen as nn

from jaxpfl.core.types import Array
from jaxpfl.models.base import Model, from_linen
from jaxpfl.models.layers import Dense, is_head


class Linear(nn.Module):
    """``flatten(x) kernel + bias``: [N, ...] -> [N, num_classes]."""

    num_classes: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return Dense(self.num_classes, name="head")(x.reshape(x.shape[0], -1))


def linear(num_classes: int) -> Model:
    """Softmax regression on flattened inputs. Its head is the whole model."""
    return from_linen(Linear(num_classes), is_head)
