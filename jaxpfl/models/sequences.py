"""Networks for sequences of tokens (characters, words): a recurrent network and a causal transformer.

By default the networks predict the token after the last position; with ``every``, they predict the next token at each
position.

A batch has N sequences of T tokens; K is the number of classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from jaxpfl.core.types import Array, Key
from jaxpfl.models.base import Model, from_linen
from jaxpfl.models.layers import Dense, LayerNorm, check_widths, is_head, is_norm, uniform_fan_in
from jaxpfl.support.errors import JaxpflError


class Recurrent(nn.Module):
    r"""Gated recurrent units (Cho et al. 2014) with initial state 0; inputs [T, N, E] with E numbers per token give
    states [T, N, features].

    .. math::
       r &= \sigma(x A_0 + c_0 + h B_0) \\
       z &= \sigma(x A_1 + c_1 + h B_1) \\
       n &= \tanh(x A_2 + c_2 + r \odot (h B_2 + c_3)) \\
       h &\leftarrow (1 - z) \odot n + z \odot h

    The equations are the same as in ``flax.linen.GRUCell``. The parameters are A = input [3, E, features], B =
    recurrent [3, features, features] and c = bias [4, features], initialized as in PyTorch.
    """

    features: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        width, init = self.features, uniform_fan_in(self.features)
        kernel = self.param("input", init, (3, x.shape[2], width))
        recurrent = self.param("recurrent", init, (3, width, width))
        bias = self.param("bias", init, (4, width))
        # Unstack before the loop: with clients on several devices, JAX 0.10 cannot backpropagate through ``lax.scan``
        # to an array that comes from outside ``shard_map``. (For the same reason there is no ``flax.linen.RNN``.)
        a, b, c = ([array[i] for i in range(len(array))] for array in (kernel, recurrent, bias))

        def step(h: Array, x: Array) -> tuple[Array, Array]:
            # Use one product per gate, also for the input, inside the loop. On a CPU this takes 10 to 40 % less time
            # than one product for all gates, or for all time steps (measured at width 128).
            r = jax.nn.sigmoid(x @ a[0] + c[0] + h @ b[0])
            z = jax.nn.sigmoid(x @ a[1] + c[1] + h @ b[1])
            n = jnp.tanh(x @ a[2] + c[2] + r * (h @ b[2] + c[3]))
            h = (1 - z) * n + z * h
            return h, h

        return lax.scan(step, jnp.zeros((x.shape[1], width), kernel.dtype), x.astype(kernel.dtype))[1]


class GRU(nn.Module):
    """Embedding, gated recurrent units, and a dense layer on the last state.

    Tokens [N, T] give logits [N, num_classes]. With ``every``, the dense layer is applied to each state, and the logits
    are [N, T, num_classes]. A token outside the vocabulary is embedded as NaN, so that its client is reported as
    diverged.

    Attributes:
      num_classes: number of classes K.
      vocabulary: number of tokens.
      hidden: width of each recurrent layer.
      embedding: width of a token's embedding; 8 in McMahan et al. 2017.
      every: whether to predict at each position instead of only the last.
    """

    num_classes: int
    vocabulary: int
    hidden: tuple[int, ...] = (128,)
    embedding: int = 8
    every: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        check_token_shape("gru", x.shape[1:])
        states = embedding(self.vocabulary, self.embedding)(x.T)
        for i, width in enumerate(self.hidden):
            states = Recurrent(width, name=f"gru{i}")(states)
        head = Dense(self.num_classes, name="head")
        if not self.every:
            return head(states[-1])
        states = jnp.moveaxis(states, 0, 1)  # [N, T, width]
        return head(states.reshape(-1, states.shape[-1])).reshape(*states.shape[:2], self.num_classes)


def gru(
    num_classes: int, hidden: tuple[int, ...] = (128,), *, vocabulary: int | None = None, every: bool = False
) -> Model:
    """Build a GRU that reads tokens; by default the classes are the input tokens, as in next-token prediction.

    ``hidden = (256, 256)`` has the widths of the two LSTM layers that McMahan et al. 2017 ("Communication-Efficient
    Learning of Deep Networks from Decentralized Data") trained on Shakespeare. Padding is treated as an ordinary token.
    With ``every``, the model returns logits at each position, [N, T, K], and not only at the last position.
    """
    vocabulary = num_classes if vocabulary is None else vocabulary
    module = GRU(num_classes, vocabulary, check_widths(hidden), every=every)
    return from_linen(module, is_head)._replace(vocabulary=vocabulary)


_BASE = 10_000.0
_HEADS = 4
_WIDER = 4


def rotated(x: Array) -> Array:
    r"""Apply rotary position embeddings to queries or keys of H heads, [N, T, H, d], with d even.

    The pair of entries i and i + d/2 at position t is rotated by the angle :math:`t\, 10000^{-2i/d}`. The product of a
    query and a key then depends only on the distance between their positions.

    Reference: Su et al. 2021, "RoFormer", https://arxiv.org/abs/2104.09864.
    """
    half = x.shape[-1] // 2
    rates = _BASE ** (-jnp.arange(half, dtype=x.dtype) / half)
    angles = (jnp.arange(x.shape[1], dtype=x.dtype)[:, None] * rates)[:, None]  # [T, 1, d/2]
    cos, sin, first, second = jnp.cos(angles), jnp.sin(angles), x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


class Block(nn.Module):
    """Causal attention, followed by a perceptron with gelu and four times the width; both are pre-norm and residual."""

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
    """Embedding, pre-norm blocks of causal attention with rotary positions, a final normalization and a dense layer.

    Tokens [N, T] give logits [N, num_classes] at the last position, or [N, T, num_classes] with ``every``. A token
    outside the vocabulary is embedded as NaN, so that its client is reported as diverged.

    Attributes:
      num_classes: number of classes K.
      vocabulary: number of tokens.
      width: width of embeddings and blocks.
      blocks: number of blocks.
      heads: number of attention heads per block.
      every: whether to predict at each position instead of only the last.
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
    """Build a causal transformer that reads tokens; by default the classes are the input tokens.

    Args:
      num_classes: number of classes K.
      sizes: width, number of blocks, and number of heads (four by default).
      vocabulary: number of tokens; by default, num_classes.
      every: whether to return logits at each position, [N, T, K], instead of only the last.

    Raises:
      JaxpflError: if there are not two or three positive sizes, or if the width is not a multiple of twice the number
        of heads.
    """
    width, blocks, heads = (*sizes, _HEADS)[:3] if len(sizes) in (2, 3) else (0, 0, 0)
    if min(width, blocks, heads) < 1 or width % (2 * heads):
        raise JaxpflError(
            "the transformer takes the numbers width,blocks or width,blocks,heads, where the width is a multiple of "
            f"twice the heads (by default {_HEADS}), got {','.join(map(str, sizes))}"
        )
    vocabulary = num_classes if vocabulary is None else vocabulary
    module = Transformer(num_classes, vocabulary, width, blocks, heads, every)
    return from_linen(module, is_head, is_norm)._replace(vocabulary=vocabulary)


def check_token_shape(network: str, shape: tuple[int, ...]) -> None:
    """Check that an input shape is a sequence [T].

    Raises:
      JaxpflError: if the shape is different; the message names the network.
    """
    if len(shape) != 1 or not shape[0]:
        raise JaxpflError(f"the model {network!r} requires sequences of tokens [T], got inputs of shape {tuple(shape)}")


def embedding(vocabulary: int, width: int) -> nn.Embed:
    """Make an embedding, initially N(0, 1). Tokens outside the vocabulary give NaN, so that the client counts as
    diverged.
    """
    dtype = jnp.result_type(float)
    return nn.Embed(vocabulary, width, embedding_init=_normal, param_dtype=dtype, name="embedding")


def _normal(key: Key, shape: Sequence[int], dtype: Any) -> Array:
    """Initializer N(0, 1), which draws the same numbers for every dtype."""
    return nn.initializers.normal(1.0)(key, tuple(shape), jnp.float32).astype(dtype)
