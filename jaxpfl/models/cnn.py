"""The papers' convolutional networks, built from the per-client convolution."""

from __future__ import annotations

import functools

import jax
from flax import linen as nn

from jaxpfl.core.types import Array
from jaxpfl.models.base import Model, from_linen
from jaxpfl.models.convolution import max_pool
from jaxpfl.models.images import batch_minor, check_image_shape
from jaxpfl.models.layers import Conv, ConvPool, FeatureDense, is_head
from jaxpfl.models.normalisation import BatchNorm, GroupNorm, is_norm


class CNN(nn.Module):
    """(conv - relu - maxpool2) for each of `filters`, then dense layers with relu: logits [N, num_classes].

    Inputs are [N, H, W, C], or [N, H, W] for one channel. Inside, the batch is the minor dimension, and the
    features of the dense part come in the order (C, H, W), as PyTorch flattens.

    With `normalise` each convolution is followed by a group normalisation in place of its bias, or by a batch
    normalisation where ``batch`` is set.
    """

    num_classes: int
    filters: tuple[int, ...] = (6, 16)
    hidden: tuple[int, ...] = (120, 84)
    size: int = 5
    normalise: bool = False
    batch: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        norm = BatchNorm if self.batch else GroupNorm
        check_image_shape("CNN", x.shape[1:], smallest_for_cnn(len(self.filters), self.size))
        x = batch_minor(x)
        for i, features in enumerate(self.filters):
            if self.normalise:
                x = Conv(features, self.size, bias=False, name=f"conv{i}")(x)
                x = max_pool(jax.nn.relu(norm(name=f"norm{i}")(x)))
            else:
                x = ConvPool(features, self.size, name=f"conv{i}")(x)
        x = x.reshape(-1, x.shape[-1])
        for i, width in enumerate(self.hidden):
            x = jax.nn.relu(FeatureDense(width, name=f"dense{i}")(x))
        return FeatureDense(self.num_classes, name="head")(x).T


def smallest_for_cnn(convolutions: int = 2, size: int = 5) -> int:
    """Side of the smallest images, which the network reduces to a single pixel."""
    return functools.reduce(lambda side, _: 2 * side + size - 1, range(convolutions), 1)


def cnn(num_classes: int) -> Model:
    """The papers' network for MNIST, FEMNIST and CIFAR-10.

    conv5x5(6) and conv5x5(16), each with relu and maxpool2, then dense layers of 120, 84 and `num_classes`.
    44,426 parameters for 28 x 28 x 1 and ten classes; 62,006 for 32 x 32 x 3.
    """
    return from_linen(CNN(num_classes), is_head)


def cnn_fedavg(num_classes: int) -> Model:
    """The network of McMahan et al. 2017 as PFLlib has it: conv5x5(32) and conv5x5(64), then 512.

    Without padding: 582,026 parameters for 28 x 28 x 1 and ten classes.
    """
    return from_linen(CNN(num_classes, filters=(32, 64), hidden=(512,)), is_head)


def cnn_cifar100(num_classes: int = 100) -> Model:
    """The papers' network for CIFAR-100: two conv5x5(64), each with relu and maxpool2, then 384, 192."""
    return from_linen(CNN(num_classes, filters=(64, 64), hidden=(384, 192)), is_head)


def cnn_gn(num_classes: int) -> Model:
    """`cnn` with group normalisation, two groups, between each convolution and its relu: 44,448 parameters."""
    return from_linen(CNN(num_classes, normalise=True), is_head, is_norm)


def cnn_bn(num_classes: int) -> Model:
    """`cnn` with batch normalisation between each convolution and its relu: 44,448 parameters, and 44 statistics."""
    return from_linen(CNN(num_classes, normalise=True, batch=True), is_head, is_norm)
