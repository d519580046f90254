"""Recurrent network for next-token prediction: characters of Shakespeare, words of Reddit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from jaxpfl.core.types import Array
from jaxpfl.models.base import Model, from_linen
from jaxpfl.models.layers import Dense, check_widths, is_head, uniform_fan_in
from jaxpfl.models.token_inputs import check_token_shape, embedding


class Recurrent(nn.Module):
    r"""Gated recurrent units (Cho et al. 2014) over time, from a zero state: [T, N, E] -> states [T, N, features].

    .. math::
       r &= \sigma(x A_0 + c_0 + h B_0) \\
       z &= \sigma(x A_1 + c_1 + h B_1) \\
       n &= \tanh(x A_2 + c_2 + r \odot (h B_2 + c_3)) \\
       h &\leftarrow (1 - z) \odot n + z \odot h

    as in ``flax.linen.GRUCell``. Parameters: A = input [3, E, features], B = recurrent [3, features, features] and
    c = bias [4, features], initialised as in PyTorch.
    """

    features: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        width, init = self.features, uniform_fan_in(self.features)
        kernel = self.param("input", init, (3, x.shape[2], width))
        recurrent = self.param("recurrent", init, (3, width, width))
        bias = self.param("bias", init, (4, width))
        # Unstacked before the loop: with clients on several devices JAX 0.10 cannot backpropagate through ``lax.scan``
        # to an array that came from outside ``shard_map``. (Hence no ``flax.linen.RNN`` either.)
        a, b, c = ([array[i] for i in range(len(array))] for array in (kernel, recurrent, bias))

        def step(h: Array, x: Array) -> tuple[Array, Array]:
            # A product for each gate, the input's in the loop: on a CPU that takes a tenth to two fifths less time
            # than one product for the three gates, or one for all times (measured at width 128).
            r = jax.nn.sigmoid(x @ a[0] + c[0] + h @ b[0])
            z = jax.nn.sigmoid(x @ a[1] + c[1] + h @ b[1])
            n = jnp.tanh(x @ a[2] + c[2] + r * (h @ b[2] + c[3]))
            h = (1 - z) * n + z * h
            return h, h

        return lax.scan(step, jnp.zeros((x.shape[1], width), kernel.dtype), x.astype(kernel.dtype))[1]


class GRU(nn.Module):
    """Embedding, gated recurrent units, and a dense layer on the last state: [N, T] integers -> [N, num_classes].

    With ``every`` the layer is on each state: [N, T, num_classes]. A token outside the vocabulary is embedded as NaN,
    so that its client is reported as diverged.

    Attributes:
      num_classes: K.
      vocabulary: number of tokens.
      hidden: the width of each recurrent layer.
      embedding: the width of a token's embedding; 8 in McMahan et al. 2017.
      every: predictions at each position, in place of the last.
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
    """A GRU that reads tokens; by default these are also the classes, as in next-token prediction.

    ``hidden = (256, 256)`` has the widths of the two LSTM layers that McMahan et al. 2017 ("Communication-Efficient
    Learning of Deep Networks from Decentralized Data") trained on Shakespeare. Padding is a token like any other. With
    ``every`` there are logits at each position, [N, T, K], in place of the last.
    """
    vocabulary = num_classes if vocabulary is None else vocabulary
    module = GRU(num_classes, vocabulary, check_widths(hidden), every=every)
    return from_linen(module, is_head)._replace(vocabulary=vocabulary)
