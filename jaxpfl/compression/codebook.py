r"""A vector through a codebook: each entry becomes the nearest of k numbers, found by Lloyd's algorithm. Lossy.

A vector of at most k distinct numbers is returned to the bit. The message is the run-length one, whose table is then
the codebook.

Reference: Zhao et al., section III (k = 3 and 4).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpfl.compression import run_length
from jaxpfl.compression.compressed import Compressed
from jaxpfl.errors import JaxpflError
from jaxpfl.types import Array

STEPS = 20
"""Steps of Lloyd's algorithm unless told; in one dimension with few centers they settle within that."""


def compress(x: Array, k: int, steps: int = STEPS) -> Compressed:
    """Each entry of x [d] replaced by the nearest of k centers.

    Raises:
      JaxpflError: for k below 1.
    """
    value = nearest(x, centers(x, k, steps))
    return Compressed(value, run_length.count_bits(value))


def centers(x: Array, k: int, steps: int = STEPS) -> Array:
    """The codebook, [k] in ascending order: Lloyd's algorithm from k distinct entries, evenly spaced in rank.

    Raises:
      JaxpflError: for k below 1.
    """
    if k < 1:
        raise JaxpflError(f"k must be at least 1, got {k}")
    ordered = jnp.sort(x)
    new = jnp.append(True, ordered[1:] != ordered[:-1])
    distinct = new.sum()
    # The r-th distinct number stands where r of them have been counted.
    wanted = jnp.arange(k) * distinct // k + 1
    start = ordered[jnp.searchsorted(jnp.cumsum(new), wanted)]

    def step(_: int, at: Array) -> Array:
        member = _place(x, at)[:, None] == jnp.arange(k)
        # A mean of deviations: equal entries give their number itself, not a rounded mean of it.
        apart = jnp.where(member, x[:, None] - at, 0).sum(axis=0)
        return at + apart / jnp.maximum(member.sum(axis=0), 1).astype(x.dtype)

    return jax.lax.fori_loop(0, steps, step, start)


def nearest(x: Array, centers: Array) -> Array:
    """The nearest of ascending centers [k] to each entry; the lower of two as near."""
    return centers[_place(x, centers)]


def _place(x: Array, centers: Array) -> Array:
    low, high = centers[:-1], centers[1:]
    # Between neighbouring numbers the middle is rounded to one of them, which must not be the higher.
    below = jnp.minimum(low / 2 + high / 2, jnp.nextafter(high, jnp.full_like(high, -jnp.inf)))
    return jnp.searchsorted(jnp.maximum(low, below), x)
