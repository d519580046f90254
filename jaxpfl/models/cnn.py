"""The papers' convolutional networks, built from the per-client convolution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxpfl.errors import JaxpflError
from jaxpfl.models.base import Model, from_linen
from jaxpfl.models.layers import ConvPool, FeatureDense, is_head
from jaxpfl.types import Array


class CNN(nn.Module):
    """(conv - relu - maxpool2) for each of `filters`, then dense layers with relu: logits [N, num_classes].

    Inputs are [N, H, W, C], or [N, H, W] for one channel. Inside, the batch is the minor dimension, and the
    features of the dense part come in the order (C, H, W), as PyTorch flattens.
    """

    num_classes: int
    filters: tuple[int, ...] = (6, 16)
    hidden: tuple[int, ...] = (120, 84)
    size: int = 5

    @nn.compact
    def __call__(self, x: Array) -> Array:
        check_image_shape(x.shape[1:], len(self.filters), self.size)
        if x.ndim == 3:
            x = x[..., None]
        x = jnp.transpose(x, (3, 1, 2, 0))
        for i, features in enumerate(self.filters):
            x = ConvPool(features, self.size, name=f"conv{i}")(x)
        x = x.reshape(-1, x.shape[-1])
        for i, width in enumerate(self.hidden):
            x = jax.nn.relu(FeatureDense(width, name=f"dense{i}")(x))
        return FeatureDense(self.num_classes, name="head")(x).T


def check_image_shape(shape: tuple[int, ...], convolutions: int, size: int = 5) -> None:
    """Refuses an input shape [H, W] or [H, W, C] from which the network would leave no pixel."""
    minimum = 1
    for _ in range(convolutions):
        minimum = 2 * minimum + size - 1
    if len(shape) not in (2, 3) or min(shape[:2]) < minimum:
        raise JaxpflError(
            f"this CNN needs images [H, W] or [H, W, C] of at least {minimum} x {minimum}, got {tuple(shape)}"
        )


def cnn(num_classes: int) -> Model:
    """The papers' network for MNIST, FEMNIST and CIFAR-10.

    conv5x5(6) and conv5x5(16), each with relu and maxpool2, then dense layers of 120, 84 and `num_classes`.
    44,426 parameters for 28 x 28 x 1 and ten classes; 62,006 for 32 x 32 x 3.
    """
    return from_linen(CNN(num_classes), is_head)


def cnn_cifar100(num_classes: int = 100) -> Model:
    """The papers' network for CIFAR-100: two conv5x5(64), each with relu and maxpool2, then 384, 192."""
    return from_linen(CNN(num_classes, filters=(64, 64), hidden=(384, 192)), is_head)
