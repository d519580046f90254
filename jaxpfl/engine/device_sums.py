"""Sums over devices: those of many arrays as one vector, since each array that is sent costs its own latency."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxpfl.core import trees
from jaxpfl.core.types import Array, PyTree

_LIMB_BITS = 11
"""Bits of the three numbers that stand for an int32 in a vector of floats: exact in float32 for up to 2^13 devices."""


def all_summed(tree: PyTree, axis: str) -> PyTree:
    """Sum a tree over the devices of a mesh axis, with the numbers and types of ``jax.lax.psum`` on each leaf.

    Leaves of one floating-point type travel in one vector, and int32 leaves in the same as exact floats. Leaves that
    lie in parts on several devices (`trees.leaves_apart`) are never concatenated.
    """
    leaves, structure = jax.tree.flatten(tree)
    exact = next((leaf.dtype for leaf in leaves if leaf.dtype in (jnp.float32, jnp.float64)), None)
    if exact is None or trees.are_apart():
        return jax.lax.psum(tree, axis)

    def sent(leaf: Array) -> Array:
        if leaf.dtype != jnp.int32:
            return leaf
        low, middle = (leaf >> shift & (1 << _LIMB_BITS) - 1 for shift in (0, _LIMB_BITS))
        return jnp.stack([low, middle, leaf >> 2 * _LIMB_BITS]).astype(exact)

    def received(limbs: Array, like: Any) -> Array:
        if like.dtype != jnp.int32:
            return limbs
        low, middle, high = limbs.astype(jnp.int32)
        return low + (middle << _LIMB_BITS) + (high << 2 * _LIMB_BITS)  # beyond int32 it wraps, as their sum does

    packed = trees.pack([sent(leaf) for leaf in leaves])
    found = jax.lax.psum(packed, axis).unpack()
    return jax.tree.unflatten(structure, list(map(received, found, leaves)))
