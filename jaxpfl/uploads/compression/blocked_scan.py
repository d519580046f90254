"""Prefix products of an associative operation along one long axis.

They take a few hundred wide steps instead of one per entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array, PyTree, Scalar


def to_blocks(x: Array, fill: Scalar) -> Array:
    """[d] -> [length, blocks], entry i of x at [i % length, i // length], with at least one ``fill`` after the last."""
    length = max(1, math.isqrt(x.shape[0]))
    blocks = x.shape[0] // length + 1
    return jnp.pad(x, (0, length * blocks - x.shape[0]), constant_values=fill).reshape(blocks, length).T


def from_blocks(x: Array, d: int) -> Array:
    """[length, blocks] -> the first d entries."""
    return x.T.reshape(-1)[:d]


def previous(x: Array, before: Scalar) -> Array:
    """Each entry's predecessor; ``before`` for the first entry."""
    ends = jnp.concatenate([jnp.full((1,), before, x.dtype), x[-1, :-1]])
    return jnp.concatenate([ends[None], x[:-1]])


def following(x: Array, after: Scalar) -> Array:
    """Each entry's successor; ``after`` for the last entry."""
    starts = jnp.concatenate([x[0, 1:], jnp.full((1,), after, x.dtype)])
    return jnp.concatenate([x[1:], starts[None]])


def blocked_scan(combine: Callable[..., PyTree], x: PyTree, unit: PyTree, *, reverse: bool = False) -> PyTree:
    """Prefix products ``x_1, x_1 x_2, x_1 x_2 x_3, ...``: of all blocks side by side, then of the blocks' totals.

    Args:
      combine: the associative operation, elementwise; its first argument is the one nearer to the start of the scan.
      x: leaves [length, blocks], from `to_blocks`.
      unit: identity of the operation, leaves [].
      reverse: scan from the last entry to the first.
    """

    def step(carry: PyTree, entry: PyTree) -> tuple[PyTree, PyTree]:
        carry = combine(carry, entry)
        return carry, carry

    def scan(x: PyTree) -> tuple[PyTree, PyTree]:
        start = jax.tree.map(lambda u, a: jnp.full(a.shape[1:], u, a.dtype), unit, x)
        return jax.lax.scan(step, start, x, reverse=reverse)

    whole, inside = scan(x)
    through = scan(whole)[1]

    def shifted(u: Scalar, a: Array) -> Array:
        first = jnp.full((1,), u, a.dtype)
        return jnp.concatenate([a[1:], first] if reverse else [first, a[:-1]])

    before = jax.tree.map(shifted, unit, through)
    return combine(before, inside)
