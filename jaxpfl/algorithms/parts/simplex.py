"""Quadratic programs on the probability simplex, small and dense."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array

_ROUNDING = 8
"""Violations up to so many units of rounding count as none."""


def least_on_simplex(matrix: Array, valid: Array) -> Array:
    """Minimise ``a^T Q a`` over a >= 0 with sum 1, a zero where not valid; [C], all zero if nothing is valid.

    a is y / sum(y), y >= 0 with slacks ``s = Q y - 1 >= 0`` and ``s y = 0``. Starting from no positive entry, the first
    one that violates its sign changes sides, until none does (Murty's principal pivoting, which ends for every positive
    definite Q).

    Args:
      matrix: Q, [C, C], symmetric and positive definite.
      valid: [C] bool.
    """
    size = len(matrix)
    # Scaled to a unit diagonal, so that one bound on rounding suits all entries.
    scale = jnp.where(valid, jax.lax.rsqrt(jnp.diagonal(matrix)), 1)
    scaled = jnp.where(valid[:, None] & valid, matrix * scale[:, None] * scale, jnp.eye(size))
    one = jnp.where(valid, scale, 0)
    slight = _ROUNDING * size * jnp.finfo(matrix.dtype).eps * jnp.max(one)

    def solved(free: Array) -> tuple[Array, Array]:
        """y and its slacks, if exactly the free entries may be positive."""
        part = jnp.where(free[:, None] & free, scaled, jnp.eye(size))
        y = jnp.where(free, jnp.linalg.solve(part, jnp.where(free, one, 0)), 0)
        return y, jnp.where(free | ~valid, 0, scaled @ y - one)

    def wrong(free: Array) -> Array:
        y, slack = solved(free)
        return (y < -slight) | (slack < -slight)

    def changed(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        free, violating, steps = carry
        free = free ^ (jnp.arange(size) == jnp.argmax(violating))
        return free, wrong(free), steps + 1

    def going_on(carry: tuple[Array, Array, Array]) -> Array:
        return carry[1].any() & (carry[2] < 20 * size)

    nothing = jnp.zeros(size, bool)
    free, _, _ = jax.lax.while_loop(going_on, changed, (nothing, wrong(nothing), jnp.int32(0)))
    y = jnp.maximum(solved(free)[0], 0) * scale
    return y / jnp.where(y.sum() > 0, y.sum(), 1)
