"""Layers and normalizations as flax.linen modules, initialized as in PyTorch.

Kernels and biases are initialized uniformly on (-1/sqrt(fan_in), 1/sqrt(fan_in)), PyTorch's default. Inputs are
converted to the parameters' dtype, so layers with float64 parameters compute in float64.

Group and layer normalization are functions of a single example, with ordinary parameters. Batch normalization (Ioffe
and Szegedy 2015, "Batch Normalization") also has running statistics; see `modules`. If batches are small or clients
have few classes, these statistics differ between clients (Hsieh et al. 2020, "The Non-IID Data Quagmire of
Decentralized Machine Learning", who use group normalization instead).

Arrays have N examples, F features or C channels, and images of H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from jaxpfl.core.types import Array, Key
from jaxpfl.models import conv_kernel, convolution
from jaxpfl.support.errors import JaxpflError


def uniform_fan_in(fan_in: int) -> Callable[..., Array]:
    """Return the initializer ``(key, shape) -> U(-b, b)`` with b = 1/sqrt(fan_in).

    The numbers are always drawn in float32, so that float64 runs start from the same models.
    """
    bound = fan_in**-0.5

    def init(key: Key, shape: Sequence[int], dtype: Any = None) -> Array:
        drawn = jax.random.uniform(key, tuple(shape), jnp.float32, -bound, bound)
        return drawn.astype(dtype or jnp.result_type(float))

    return init


NARROW = 4  # largest number of outputs with a separate product for each (measured on a CPU at 2 to 10 outputs)


def dense(x: Array, kernel: Array) -> Array:
    """Product ``x kernel`` with K columns, [N, K], of inputs [N, F] and a kernel [F, K].

    With few outputs (as in softmax regression on two classes), ``vmap`` over clients gives batched products that are
    too small for XLA's CPU kernels. Separate products for each column are compiled to vector loops, which are four
    times as fast.
    """
    return _column_products(x, kernel) if kernel.shape[1] <= NARROW else x @ kernel


@jax.custom_vjp
def _column_products(x: Array, kernel: Array) -> Array:
    return _columns(x, kernel)


# Forward rules call the function without the custom rule, so that ``jvp`` of a gradient works.
def _columns(x: Array, kernel: Array) -> Array:
    return jnp.stack([x @ kernel[:, j] for j in range(kernel.shape[1])], axis=-1)


def _columns_fwd(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _columns(x, kernel), (x, kernel)


def _columns_bwd(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    outputs = range(kernel.shape[1])
    d_x = sum((g[:, j, None] * kernel[None, :, j] for j in outputs), jnp.zeros((), g.dtype))
    return d_x, jnp.stack([g[:, j] @ x for j in outputs], axis=-1)


_column_products.defvjp(_columns_fwd, _columns_bwd)


class Dense(nn.Module):
    """Dense layer ``x kernel + bias`` with outputs [N, features], for inputs [N, F] and a kernel [F, features]."""

    features: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel, bias = _dense_parameters(self, x.shape[1], self.features)
        return dense(x.astype(kernel.dtype), kernel) + bias


class FeatureDense(nn.Module):
    """`Dense` layer for transposed arrays: inputs [F, N] and outputs [features, N]. The parameters are the same."""

    features: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel, bias = _dense_parameters(self, x.shape[0], self.features)
        return convolution.project(kernel, x.astype(kernel.dtype)) + bias[:, None]


def _dense_parameters(module: nn.Module, inputs: int, features: int) -> tuple[Array, Array]:
    """Kernel [inputs, features] and bias [features] of a dense layer."""
    init = uniform_fan_in(inputs)
    return module.param("kernel", init, (inputs, features)), module.param("bias", init, (features,))


class Conv(nn.Module):
    """Convolution of inputs [C, H, W, N] to outputs [features, h, w, N], with h and w as in `convolution.conv`.

    The parameters are the same as in ``flax.linen.Conv``: kernel [size, size, C, features] and bias [features]. The
    bias can be left out if a normalization with its own bias follows.
    """

    features: int
    size: int = 5
    stride: int = 1
    padding: Literal["VALID", "SAME"] = "VALID"
    bias: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel = _conv_kernel(self, x.shape[0], self.size, self.features)
        y = conv_kernel.conv(x.astype(kernel.dtype), kernel, stride=self.stride, padding=self.padding)
        return y + _conv_bias(self, kernel)[:, None, None, None] if self.bias else y


class ConvPool(nn.Module):
    """Convolution, 2x2 max-pool and relu.

    Inputs [C, H, W, N] give outputs [features, (H-size+1)//2, (W-size+1)//2, N].

    The parameters are the same as in `Conv`; `convolution.conv_pool` explains why bias and relu follow the pooling.
    """

    features: int
    size: int = 5

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel = _conv_kernel(self, x.shape[0], self.size, self.features)
        return conv_kernel.conv_pool(x.astype(kernel.dtype), kernel, _conv_bias(self, kernel))


def _conv_kernel(module: nn.Module, channels: int, size: int, features: int) -> Array:
    return module.param("kernel", uniform_fan_in(size * size * channels), (size, size, channels, features))


def _conv_bias(module: nn.Module, kernel: Array) -> Array:
    size, _, channels, features = kernel.shape
    return module.param("bias", uniform_fan_in(size * size * channels), (features,))


def check_widths(hidden: Sequence[int]) -> tuple[int, ...]:
    """Check that there is at least one hidden layer and that all widths are positive, and return the widths."""
    if not hidden or min(hidden) < 1:
        raise JaxpflError(f"hidden widths must be one or more positive numbers, got {tuple(hidden)}")
    return tuple(hidden)


def is_head(path: tuple[str, ...]) -> bool:
    """Return True for the parameters of the layer named "head", the last layer of every built-in model."""
    return path[0] == "head"


EPSILON = 1e-5
"""Constant added to a variance before division, as in PyTorch."""


def group_norm(x: Array, scale: Array, bias: Array, groups: int) -> Array:
    """Group normalization (Wu and He 2018) of features-first activations [C, ..., N], with scale [C] and bias [C].

    Each example's channels are divided into ``groups`` groups of C / groups consecutive channels. Each group is shifted
    and scaled to mean 0 and variance 1 over its channels and all positions. Then each channel is multiplied by
    ``scale``, and ``bias`` is added.
    """
    z = x.reshape(groups, -1, x.shape[-1])
    # The variance is computed from centered values: a difference of two moments would lose digits if the mean is large.
    z = z - z.mean(axis=1, keepdims=True)
    z = z * lax.rsqrt(jnp.square(z).mean(axis=1, keepdims=True) + EPSILON)
    per_channel = (-1,) + (1,) * (x.ndim - 1)
    return z.reshape(x.shape) * scale.reshape(per_channel) + bias.reshape(per_channel)


class GroupNorm(nn.Module):
    """`group_norm` with the parameters of ``flax.linen.GroupNorm``: scale [C], initially 1; bias [C], initially 0."""

    groups: int = 2

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return group_norm(x, *_scale_and_bias(self, x.shape[0]), self.groups)


class LayerNorm(nn.Module):
    """Layer normalization of [N, F]: `group_norm` with one group and the parameters of ``flax.linen.LayerNorm``."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return group_norm(x.T, *_scale_and_bias(self, x.shape[1]), groups=1).T


def batch_norm(x: Array, scale: Array, bias: Array, mean: Array, variance: Array) -> Array:
    """Normalize features-first activations [F, ..., N] by given means [F] and variances [F] of the features."""
    per_feature = (-1,) + (1,) * (x.ndim - 1)
    factor = scale * lax.rsqrt(variance + EPSILON)
    return (x - mean.reshape(per_feature)) * factor.reshape(per_feature) + bias.reshape(per_feature)


class BatchNorm(nn.Module):
    """Batch normalization of features-first activations [F, ..., N], with scale [F] and bias [F], initially 1 and 0.

    In training, each feature is shifted and scaled to mean 0 and variance 1 over all positions of the batch's real
    examples. The running mean and variance, [F], start at 0 and 1, and move by a tenth of the difference toward the
    batch's mean and variance (the biased variance, as in flax). Evaluation uses the running mean and variance instead.
    """

    momentum: float = 0.9
    use_running_average: bool | None = None

    @nn.compact
    def __call__(self, x: Array, use_running_average: bool | None = None, *, mask: Array | None = None) -> Array:
        features, kind = x.shape[0], jnp.result_type(float)
        scale, bias = _scale_and_bias(self, features)
        running_mean = self.variable("batch_stats", "mean", lambda: jnp.zeros(features, kind))
        running_var = self.variable("batch_stats", "var", lambda: jnp.ones(features, kind))
        if nn.merge_param("use_running_average", self.use_running_average, use_running_average):
            return batch_norm(x, scale, bias, running_mean.value, running_var.value)
        axes, per_feature = tuple(range(1, x.ndim)), (-1,) + (1,) * (x.ndim - 1)
        mean = x.mean(axes, where=mask)
        variance = jnp.square(x - mean.reshape(per_feature)).mean(axes, where=mask)
        if not self.is_initializing():
            running_mean.value = self.momentum * running_mean.value + (1 - self.momentum) * mean
            running_var.value = self.momentum * running_var.value + (1 - self.momentum) * variance
        return batch_norm(x, scale, bias, mean, variance)


def _scale_and_bias(module: nn.Module, channels: int) -> tuple[Array, Array]:
    def constant(name: str, value: float) -> Array:
        return module.param(name, lambda key: jnp.full(channels, value, jnp.result_type(float)))

    return constant("scale", 1.0), constant("bias", 0.0)


def is_norm(path: tuple[str, ...]) -> bool:
    """Return True for parameters of layers named "norm...", the normalization layers of the built-in models."""
    return any(name.startswith("norm") for name in path)
