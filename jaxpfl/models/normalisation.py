"""Normalisation of one example at a time, and of a batch with running statistics.

Group and layer normalisation are functions of the example alone, with ordinary parameters. Batch normalisation (Ioffe
and Szegedy 2015, "Batch Normalization") keeps running statistics besides (`linen_modules`); with few examples of few
classes per batch these differ between clients (Hsieh et al. 2020, "The Non-IID Data Quagmire of Decentralized Machine
Learning", who replace it by group normalisation).
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from jaxpfl.core.types import Array

EPSILON = 1e-5
"""Added to a variance, as in PyTorch."""


def group_norm(x: Array, scale: Array, bias: Array, groups: int) -> Array:
    """Group normalisation (Wu and He 2018) of features-first activations: [C, ..., N], [C], [C] -> [C, ..., N].

    Each example's channels, in ``groups`` runs of C / groups, are shifted and scaled to mean 0 and variance 1 over the
    run and all places; then each channel is scaled by ``scale`` and shifted by ``bias``.
    """
    z = x.reshape(groups, -1, x.shape[-1])
    # Of the centered values: a difference of two moments would cancel if the mean is large.
    z = z - z.mean(axis=1, keepdims=True)
    z = z * lax.rsqrt(jnp.square(z).mean(axis=1, keepdims=True) + EPSILON)
    per_channel = (-1,) + (1,) * (x.ndim - 1)
    return z.reshape(x.shape) * scale.reshape(per_channel) + bias.reshape(per_channel)


class GroupNorm(nn.Module):
    """`group_norm` with the parameters of ``flax.linen.GroupNorm``: scale [C], from one; bias [C], from zero."""

    groups: int = 2

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return group_norm(x, *_scale_and_bias(self, x.shape[0]), self.groups)


class LayerNorm(nn.Module):
    """Layer normalisation of [N, F]: `group_norm` of one group; the parameters of ``flax.linen.LayerNorm``."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return group_norm(x.T, *_scale_and_bias(self, x.shape[1]), groups=1).T


def batch_norm(x: Array, scale: Array, bias: Array, mean: Array, variance: Array) -> Array:
    """Normalisation of features-first activations by a mean and a variance of each feature: [F, ..., N], [F] each."""
    per_feature = (-1,) + (1,) * (x.ndim - 1)
    factor = scale * lax.rsqrt(variance + EPSILON)
    return (x - mean.reshape(per_feature)) * factor.reshape(per_feature) + bias.reshape(per_feature)


class BatchNorm(nn.Module):
    """Batch normalisation of features-first activations [F, ..., N]: scale [F], from one; bias [F], from zero.

    In training a feature is shifted and scaled to mean 0 and variance 1 over all places of the batch's real examples,
    and the running mean and variance, [F], from 0 and 1, move a tenth of the way to the batch's (the biased variance,
    as in flax). In evaluation the running ones take their place.
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
    """True for the parameters of layers named "norm...", the normalisation layers of the models here."""
    return any(name.startswith("norm") for name in path)
