"""Networks for images and flat inputs: softmax regression, perceptrons, LeNets and ResNets.

Images are accepted as [H, W] or [H, W, C]. Inside the networks, the batch is the last dimension, as in `convolution`.
The residual networks are from He et al. 2016, "Deep Residual Learning for Image Recognition", but with group
normalization (two groups) instead of batch normalization, unless ``batch`` is set.

N is the number of examples in a batch, H x W the size of an image, and C the number of its channels.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxpfl.core.types import Array
from jaxpfl.models.base import Affine, Model, from_linen
from jaxpfl.models.convolution import max_pool
from jaxpfl.models.layers import (
    BatchNorm,
    Conv,
    ConvPool,
    Dense,
    FeatureDense,
    GroupNorm,
    LayerNorm,
    check_widths,
    is_head,
    is_norm,
)
from jaxpfl.support.errors import JaxpflError


def check_image_shape(network: str, shape: tuple[int, ...], minimum: int) -> None:
    """Check that an input shape is [H, W] or [H, W, C] with H and W of at least ``minimum``."""
    if len(shape) not in (2, 3) or min(shape[:2]) < minimum:
        raise JaxpflError(
            f"this {network} requires images [H, W] or [H, W, C] of at least {minimum} x {minimum}, got {tuple(shape)}"
        )


def batch_minor(x: Array) -> Array:
    """Transpose [N, H, W, C], or [N, H, W] for one channel, to [C, H, W, N], the layout of `convolution`."""
    if x.ndim == 3:
        x = x[..., None]
    return jnp.transpose(x, (3, 1, 2, 0))


class Linear(nn.Module):
    """Linear model ``flatten(x) kernel + bias`` with logits [N, num_classes], for inputs [N, ...]."""

    num_classes: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return Dense(self.num_classes, name="head")(x.reshape(x.shape[0], -1))


def linear(num_classes: int) -> Model:
    """Build softmax regression on flattened inputs; the head is the whole model."""
    model = from_linen(Linear(num_classes), is_head)
    return model._replace(apply=Affine(model.apply))


class MLP(nn.Module):
    """Dense layers with relu between them. Inputs [N, ...] are flattened, and outputs are logits [N, num_classes].

    If ``norm`` is "layer" (Ba et al. 2016, "Layer Normalization") or "batch", each hidden layer is normalized before
    its relu.
    """

    num_classes: int
    hidden: tuple[int, ...] = (64,)
    norm: Literal["layer", "batch"] | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = x.reshape(x.shape[0], -1)
        for i, width in enumerate(self.hidden):
            x = Dense(width, name=f"dense{i}")(x)
            if self.norm == "batch":
                x = BatchNorm(name=f"norm{i}")(x.T).T
            elif self.norm == "layer":
                x = LayerNorm(name=f"norm{i}")(x)
            x = jax.nn.relu(x)
        return Dense(self.num_classes, name="head")(x)


def mlp(num_classes: int, hidden: tuple[int, ...] = (64,), norm: Literal["layer", "batch"] | None = None) -> Model:
    """Build a perceptron with the given hidden widths, such as ``(100,)`` for PersFL's MNIST network."""
    return from_linen(MLP(num_classes, check_widths(hidden), norm), is_head, norm and is_norm)


class CNN(nn.Module):
    """Convolution, relu and max-pool for each of `filters`, and then dense layers with relu.

    Inputs are [N, H, W, C], or [N, H, W] for one channel. Outputs are logits [N, num_classes]. Inside the network, the
    batch is the last dimension. As in PyTorch, features are flattened in the order (C, H, W).

    If ``norm`` is "group" (two groups) or "batch", a normalization replaces the bias of each convolution.
    """

    num_classes: int
    filters: tuple[int, ...] = (6, 16)
    hidden: tuple[int, ...] = (120, 84)
    norm: Literal["group", "batch"] | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        norm = BatchNorm if self.norm == "batch" else GroupNorm
        check_image_shape("CNN", x.shape[1:], SMALLEST_FOR_CNN)
        x = batch_minor(x)
        for i, features in enumerate(self.filters):
            if self.norm is not None:
                x = Conv(features, bias=False, name=f"conv{i}")(x)
                x = max_pool(jax.nn.relu(norm(name=f"norm{i}")(x)))
            else:
                x = ConvPool(features, name=f"conv{i}")(x)
        x = x.reshape(-1, x.shape[-1])
        for i, width in enumerate(self.hidden):
            x = jax.nn.relu(FeatureDense(width, name=f"dense{i}")(x))
        return FeatureDense(self.num_classes, name="head")(x).T


SMALLEST_FOR_CNN = 16
"""Side of the smallest allowed images, which two 5 x 5 convolutions and two pools reduce to a single pixel."""


def cnn(
    num_classes: int,
    filters: tuple[int, int] = (6, 16),
    hidden: tuple[int, ...] = (120, 84),
    norm: Literal["group", "batch"] | None = None,
) -> Model:
    """Build a network of two 5 x 5 convolutions, each followed by relu and max pooling, and then dense layers.

    The default is the network of Ozkara et al. for MNIST, FEMNIST and CIFAR-10. For ten classes, it has 44,426
    parameters for 28 x 28 x 1 images, and 62,006 for 32 x 32 x 3. ``norm`` is applied between a convolution and its
    relu.
    """
    return from_linen(CNN(num_classes, filters, hidden, norm), is_head, norm and is_norm)


class Block(nn.Module):
    """Residual block ``relu(norm(conv3x3(relu(norm(conv3x3(x))))) + shortcut(x))``.

    Inputs [C, H, W, N] give outputs [features, h, w, N]. The first 3 x 3 convolution has the stride ``stride``, so h =
    ceil(H / stride). The shortcut is x itself if its shape is the result's shape, otherwise a normalized 1 x 1
    convolution of x.
    """

    features: int
    stride: int = 1
    batch: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        norm = BatchNorm if self.batch else GroupNorm
        y = Conv(self.features, 3, self.stride, "SAME", bias=False, name="conv0")(x)
        y = jax.nn.relu(norm(name="norm0")(y))
        y = Conv(self.features, 3, padding="SAME", bias=False, name="conv1")(y)
        y = norm(name="norm1")(y)
        if x.shape != y.shape:
            x = Conv(self.features, 1, self.stride, "SAME", bias=False, name="shortcut")(x)
            x = norm(name="norm_shortcut")(x)
        return jax.nn.relu(x + y)


class ResNet(nn.Module):
    """A convolution, stages of residual blocks, average pooling and a dense layer.

    Inputs [N, H, W, C] give logits [N, num_classes]. Each stage except the first halves the image's height and width.
    Inputs can be [N, H, W] for one channel.

    Attributes:
      num_classes: number of classes K.
      widths: number of channels in each stage.
      blocks: number of blocks in each stage.
      batch: whether to use batch normalization instead of group normalization.
    """

    num_classes: int
    widths: tuple[int, ...]
    blocks: int
    batch: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        norm = BatchNorm if self.batch else GroupNorm
        check_image_shape("ResNet", x.shape[1:], smallest_for_resnet(self.widths))
        x = Conv(self.widths[0], 3, padding="SAME", bias=False, name="conv0")(batch_minor(x))
        x = jax.nn.relu(norm(name="norm0")(x))
        for stage, width in enumerate(self.widths):
            for i in range(self.blocks):
                stride = 2 if stage and not i else 1
                x = Block(width, stride, self.batch, name=f"stage{stage}_block{i}")(x)
        return FeatureDense(self.num_classes, name="head")(x.mean(axis=(1, 2))).T


CIFAR_WIDTHS = (16, 32, 64)
RESNET18_WIDTHS = (64, 128, 256, 512)


def smallest_for_resnet(widths: tuple[int, ...]) -> int:
    """Return the side of the smallest allowed images, which the last stage reduces to a single pixel."""
    return 2 ** (len(widths) - 1)


def resnet(num_classes: int, depth: int = 8, *, batch: bool = False) -> Model:
    """Build a ResNet of He et al.'s CIFAR family (section 4.2), with three stages of 16, 32 and 64 channels.

    Each stage has n blocks, where ``depth`` = 6 n + 2. If a block's input and output differ in shape, the shortcut is a
    normalized 1 x 1 convolution. For three channels and ten classes there are 78,042 parameters at depth 8, and 272,474
    at depth 20. ``batch`` selects batch normalization.

    Raises:
      JaxpflError: if no n of at least 1 gives this depth.
    """
    if depth < 8 or depth % 6 != 2:
        raise JaxpflError(f"depth of a CIFAR ResNet must be 8, 14, 20, ... (6 n + 2), got {depth}: or use resnet18")
    return from_linen(ResNet(num_classes, CIFAR_WIDTHS, (depth - 2) // 6, batch), is_head, is_norm)


def resnet18(num_classes: int) -> Model:
    """Build ResNet-18 for small images: as usual for CIFAR, the first convolution is 3 x 3, without stride or pooling.

    The network has 11,173,962 parameters for three channels and ten classes.
    """
    return from_linen(ResNet(num_classes, RESNET18_WIDTHS, 2), is_head, is_norm)
