"""Normalisation of one example at a time, with ordinary parameters and no running statistics.

There is no batch normalisation: its running statistics are not parameters (see `from_linen`), and with few examples of
few classes per batch they differ between clients (Hsieh et al. 2020, "The Non-IID Data Quagmire of Decentralized
Machine Learning", who replace it by group normalisation).
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from jaxpfl.types import Array

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


def _scale_and_bias(module: nn.Module, channels: int) -> tuple[Array, Array]:
    def constant(name: str, value: float) -> Array:
        return module.param(name, lambda key: jnp.full(channels, value, jnp.result_type(float)))

    return constant("scale", 1.0), constant("bias", 0.0)


def is_norm(path: tuple[str, ...]) -> bool:
    """True for the parameters of layers named "norm...", the normalisation layers of the models here."""
    return any(name.startswith("norm") for name in path)
