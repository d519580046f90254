"""Residual networks for small images, with group or batch normalisation.

References: He et al. 2016, "Deep Residual Learning for Image Recognition" (the networks); Hsieh et al. 2020, "The
Non-IID Data Quagmire of Decentralized Machine Learning" (group normalisation in place of batch normalisation); Reddi et
al. 2021, "Adaptive Federated Optimization" (ResNet-18 with two groups in each normalisation).
"""

from __future__ import annotations

import jax
from flax import linen as nn

from jaxpfl.core.types import Array
from jaxpfl.models.base import Model, from_linen
from jaxpfl.models.images import batch_minor, check_image_shape
from jaxpfl.models.layers import Conv, FeatureDense, is_head
from jaxpfl.models.normalisation import BatchNorm, GroupNorm, is_norm
from jaxpfl.support.errors import JaxpflError


class Block(nn.Module):
    """``relu(norm(conv3x3(relu(norm(conv3x3(x))))) + shortcut(x))``: [C, H, W, N] -> [features, h, w, N].

    The first convolution has the stride, h = ceil(H / stride). The shortcut is x itself if shapes agree, else a
    normalised 1 x 1 convolution.
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
    """A convolution, stages of residual blocks, the mean over places, a dense layer: [N, H, W, C] -> [N, num_classes].

    Each stage but the first halves the image. Inputs may be [N, H, W] for one channel.

    Attributes:
      num_classes: K.
      widths: the channels of each stage.
      blocks: blocks in each stage.
      batch: whether the normalisation is that of batches; of groups by default.
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
    """Side of the smallest images, of which the last stage sees a single pixel."""
    return 2 ** (len(widths) - 1)


def resnet(num_classes: int, depth: int = 8, *, batch: bool = False) -> Model:
    """CIFAR family of He et al. (section 4.2): 6 n + 2 layers, n blocks in each of three stages of 16, 32, 64.

    If shapes differ, the shortcut is a normalised 1 x 1 convolution. 78,042 parameters at depth 8 and 272,474 at depth
    20, for three channels and ten classes. With ``batch`` normalised by batches.
    """
    if depth < 8 or depth % 6 != 2:
        raise JaxpflError(f"a ResNet for CIFAR has 6 n + 2 layers (8, 14, 20, ...), got {depth}; see also 'resnet18'")
    return from_linen(ResNet(num_classes, CIFAR_WIDTHS, (depth - 2) // 6, batch), is_head, is_norm)


def resnet18(num_classes: int) -> Model:
    """ResNet-18 for small images: the first convolution is 3 x 3, without stride or pooling, as is usual for CIFAR.

    11,173,962 parameters for three channels and ten classes.
    """
    return from_linen(ResNet(num_classes, RESNET18_WIDTHS, 2), is_head, is_norm)
