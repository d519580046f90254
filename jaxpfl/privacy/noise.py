"""Gaussian noise for whole trees."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpfl import trees
from jaxpfl.types import Key, PyTree, Scalar


def gaussian(key: Key, like: PyTree, stddev: Scalar) -> PyTree:
    """Independent N(0, stddev^2) in every entry of a tree of the same shapes and types.

    Drawn by JAX's counter-based generator: reproducible, and no cryptographic generator, so it is for simulation.
    """
    packed = trees.pack(like)
    keys = jax.random.split(key, max(len(packed.vectors), 1))
    drawn = [stddev * jax.random.normal(k, v.shape, v.dtype) for k, v in zip(keys, packed.vectors, strict=False)]
    vectors = tuple(a.astype(v.dtype) for a, v in zip(drawn, packed.vectors, strict=True))
    return trees.Packed(vectors, packed.structure, packed.shapes).unpack()


def add_gaussian(key: Key, tree: PyTree, stddev: Scalar) -> PyTree:
    """The tree with such noise added."""
    return jax.tree.map(jnp.add, tree, gaussian(key, tree, stddev))
