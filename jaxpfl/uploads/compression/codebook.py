r"""Codebook quantisation: each entry becomes the nearest of k numbers, found by Lloyd's algorithm. Lossy.

A vector of at most k distinct numbers is returned exactly; as in `run_length`, numbers are equal if their bits are, so
that zero and minus zero are distinct. With more numbers than centers, subnormal ones may count as zero. The message is
the run-length code, whose table is then the codebook.

Reference: Zhao et al., section III (k = 3 and 4).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.compression import run_length
from jaxpfl.uploads.compression.binary_scale import room, times_power
from jaxpfl.uploads.compression.compressed import Compressed

STEPS = 20
"""Default steps of Lloyd's algorithm, enough to converge in one dimension with few centers."""


def compress(x: Array, k: int, steps: int = STEPS) -> Compressed:
    """Quantise x [d]: each entry becomes the nearest of k centers; NaN if x is not finite.

    Implements: Zhao et al., section III, codes.

    Raises:
      JaxpflError: for k below 1.
    """
    value = jnp.where(jnp.isfinite(x).all(), nearest(x, centers(x, k, steps)), jnp.nan)
    return Compressed(value, run_length.count_bits(value))


def centers(x: Array, k: int, steps: int = STEPS) -> Array:
    """Codebook, [k] in ascending order, by Lloyd's algorithm from k distinct entries, evenly spaced in rank.

    Raises:
      JaxpflError: for k below 1.
    """
    if k < 1:
        raise JaxpflError(f"k must be at least 1, got {k}")
    ordered = jnp.sort(_ranks(x))
    new = jnp.append(True, ordered[1:] != ordered[:-1])
    distinct = new.sum()
    # The r-th distinct number is at the place where r of them have been counted.
    wanted = jnp.arange(k) * distinct // k + 1
    start = _numbers(ordered[jnp.searchsorted(jnp.cumsum(new), wanted)], x.dtype)
    e = room(x)  # deviations of huge numbers, and their sums, may be above the largest float
    scaled = times_power(x, -e)

    def step(_: int, at: Array) -> Array:
        member = _place(scaled, at)[:, None] == jnp.arange(k)
        # A mean of deviations: equal entries give their number itself, not a rounded mean of it.
        apart = jnp.where(member, scaled[:, None] - at, 0).sum(axis=0)
        return at + apart / jnp.maximum(member.sum(axis=0), 1).astype(x.dtype)

    found = times_power(jax.lax.fori_loop(0, steps, step, times_power(start, -e)), e)
    return jnp.where(distinct <= k, start, found)


def nearest(x: Array, centers: Array) -> Array:
    """The nearest of ascending centers [k] to each entry; the lower one in a tie."""
    return centers[_place(x, centers)]


def _place(x: Array, centers: Array) -> Array:
    low, high = _ranks(centers[:-1]), _ranks(centers[1:])
    # Between neighbouring numbers the middle is rounded to one of them, which must not be the higher.
    below = jnp.minimum(_ranks(centers[:-1] / 2 + centers[1:] / 2), high - 1)
    return jnp.searchsorted(jnp.maximum(low, below), _ranks(x))


def _ranks(x: Array) -> Array:
    """Integers in the order of the numbers, one per bit pattern: XLA compares subnormal floats as zeros."""
    pattern = jax.lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
    return _mirrored(pattern)


def _numbers(ranks: Array, dtype: jnp.dtype) -> Array:
    """Inverse of `_ranks`."""
    return jax.lax.bitcast_convert_type(_mirrored(ranks), dtype)


def _mirrored(pattern: Array) -> Array:
    """Reverse the order of negative patterns, which grow with the magnitude; its own inverse."""
    return jnp.where(pattern < 0, pattern ^ jnp.iinfo(pattern.dtype).max, pattern)
