"""Gaussian noise for whole trees."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxpfl import trees
from jaxpfl.types import Key, PyTree, Scalar

DRAWS = 4
"""Of noise that hides a sum by itself."""


def gaussian(key: Key, like: PyTree, stddev: Scalar, draws: int = DRAWS) -> PyTree:
    """Independent N(0, stddev^2) in every entry of a tree of the same shapes and types.

    A draw in float32 has 2^23 values, none beyond 5.42 standard deviations, so that what lies beyond would give a
    client away: over hundreds of rounds with a probability like a claim's delta. The sum of four reaches 10.8, which no
    run does, and has a value for all that its own rounding can tell apart (Holohan and Braghin 2021, "Secure Random
    Sampling in Differential Privacy"). What rounding itself may tell is not covered (Mironov 2012).

    The generator is JAX's, counter-based: reproducible, and no cryptographic one. Who knows the key can subtract the
    noise: it is for simulation.

    Args:
      draws: of which each entry is the sum: one will do for a client's share of a sum's noise.
    """
    packed = trees.pack(like)
    keys = jax.random.split(key, max(len(packed.vectors), 1))

    def drawn(key: Key, vector: jax.Array) -> jax.Array:
        each = (jax.random.normal(k, vector.shape, vector.dtype) for k in jax.random.split(key, draws))
        return (stddev / math.sqrt(draws) * sum(each)).astype(vector.dtype)

    vectors = tuple(drawn(k, v) for k, v in zip(keys, packed.vectors, strict=False))
    return trees.Packed(vectors, packed.structure, packed.shapes).unpack()


def add_gaussian(key: Key, tree: PyTree, stddev: Scalar, draws: int = DRAWS) -> PyTree:
    """The tree with such noise added."""
    return jax.tree.map(jnp.add, tree, gaussian(key, tree, stddev, draws))
