"""Causal transformer of tokens, with a prediction at each position or at the last."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxpfl.core.types import Array
from jaxpfl.models.base import Model, from_linen
from jaxpfl.models.layers import Dense, is_head
from jaxpfl.models.normalisation import LayerNorm, is_norm
from jaxpfl.models.token_inputs import check_token_shape, embedding
from jaxpfl.support.errors import JaxpflError

_BASE = 10_000.0
_HEADS = 4
_WIDER = 4


def rotated(x: Array) -> Array:
    r"""Rotary positions: [N, T, H, d] -> the same shape, d even.

    The pair of entries i and i + d/2 at position t is turned by the angle :math:`t\, 10000^{-2i/d}`, so that the
    product of a query and a key depends on the distance of their positions alone.

    Reference: Su et al. 2021, "RoFormer", https://arxiv.org/abs/2104.09864.
    """
    half = x.shape[-1] // 2
    rates = _BASE ** (-jnp.arange(half, dtype=x.dtype) / half)
    angles = (jnp.arange(x.shape[1], dtype=x.dtype)[:, None] * rates)[:, None]  # [T, 1, d/2]
    cos, sin, first, second = jnp.cos(angles), jnp.sin(angles), x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


class Block(nn.Module):
    """Causal attention, then a perceptron of four times the width with gelu, each on normalised inputs and added."""

    width: int
    heads: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        n, length, width = x.shape

        def dense(name: str, features: int, x: Array) -> Array:
            rows = Dense(features, name=name)(x.reshape(-1, x.shape[-1]))
            return rows.reshape(n, length, features)

        def norm(name: str, x: Array) -> Array:
            return LayerNorm(name=name)(x.reshape(-1, width)).reshape(x.shape)

        normal = norm("norm0", x)
        query, key, value = (
            dense(name, width, normal).reshape(n, length, self.heads, -1) for name in ("query", "key", "value")
        )
        scores = jnp.einsum("nthd,nshd->nhts", rotated(query), rotated(key)) / math.sqrt(width // self.heads)
        before = jnp.tril(jnp.ones((length, length), bool))
        shares = jax.nn.softmax(jnp.where(before, scores, -jnp.inf), axis=-1)
        x = x + dense("out", width, jnp.einsum("nhts,nshd->nthd", shares, value).reshape(n, length, width))
        return x + dense("narrow", width, jax.nn.gelu(dense("wide", _WIDER * width, norm("norm1", x))))


class Transformer(nn.Module):
    """Embedding, pre-norm blocks of causal attention with rotary positions, a last normalisation and a dense layer.

    [N, T] integers -> [N, num_classes] of the last position, or [N, T, num_classes] of each if ``every``. A token
    outside the vocabulary is embedded as NaN, so that its client is reported as diverged.

    Attributes:
      num_classes: K.
      vocabulary: number of tokens.
      width: of embeddings and blocks.
      blocks: number of blocks.
      heads: number of attention heads in each.
      every: predictions at each position.
    """

    num_classes: int
    vocabulary: int
    width: int = 64
    blocks: int = 2
    heads: int = _HEADS
    every: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        check_token_shape("transformer", x.shape[1:])
        states = embedding(self.vocabulary, self.width)(x)
        for i in range(self.blocks):
            states = Block(self.width, self.heads, name=f"block{i}")(states)
        states = states if self.every else states[:, -1:]
        rows = LayerNorm(name="norm")(states.reshape(-1, self.width))
        logits = Dense(self.num_classes, name="head")(rows)
        return logits.reshape(x.shape[0], -1, self.num_classes) if self.every else logits


def transformer(
    num_classes: int, sizes: tuple[int, ...] = (64, 2), *, vocabulary: int | None = None, every: bool = False
) -> Model:
    """A causal transformer that reads tokens; by default these are also the classes, as in next-token prediction.

    Args:
      num_classes: K.
      sizes: the width, the number of blocks, and the number of heads, four unless given.
      vocabulary: number of tokens.
      every: logits at each position, [N, T, K], in place of the last.

    Raises:
      JaxpflError: for other than two or three positive sizes, and a width that is no even multiple of the heads.
    """
    width, blocks, heads = (*sizes, _HEADS)[:3] if len(sizes) in (2, 3) else (0, 0, 0)
    if min(width, blocks, heads) < 1 or width % (2 * heads):
        raise JaxpflError(
            "the transformer's numbers are width,blocks or width,blocks,heads, the width a multiple of twice the heads "
            f"({_HEADS} unless given), got {','.join(map(str, sizes))}"
        )
    vocabulary = num_classes if vocabulary is None else vocabulary
    module = Transformer(num_classes, vocabulary, width, blocks, heads, every)
    return from_linen(module, is_head, is_norm)._replace(vocabulary=vocabulary)
