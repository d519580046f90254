"""Inputs that are sequences of tokens: their shape, and their embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from jaxpfl.core.types import Array, Key
from jaxpfl.support.errors import JaxpflError


def check_token_shape(network: str, shape: tuple[int, ...]) -> None:
    """Refuse an input shape that is not a sequence [T].

    Raises:
      JaxpflError: naming the network.
    """
    if len(shape) != 1 or not shape[0]:
        raise JaxpflError(f"the model {network!r} needs sequences of tokens [T], got inputs of shape {tuple(shape)}")


def embedding(vocabulary: int, width: int) -> nn.Embed:
    """Embedding of tokens, N(0, 1) at first; one outside the vocabulary is NaN, so that its client diverges."""
    dtype = jnp.result_type(float)
    return nn.Embed(vocabulary, width, embedding_init=_normal, param_dtype=dtype, name="embedding")


def _normal(key: Key, shape: Sequence[int], dtype: Any) -> Array:
    """Initialiser N(0, 1), the same numbers in every type."""
    return nn.initializers.normal(1.0)(key, tuple(shape), jnp.float32).astype(dtype)
