"""Clients in bins of nearly equal estimates and errors: a small table on which a likelihood is nearly that of all.

A bin stands for its clients by their mean estimate and mean error, so that a smooth function is wrong by its second
derivatives times the bins' variances. Fits start from it; no result is left at that.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxpfl.core.types import Array

MANY = 2**14
"""Clients beyond which a fit starts from bins."""
ESTIMATES, ERRORS = 256, 16


def binned(x: Array, s: Array, w: Array, estimates: int = ESTIMATES, errors: int = ERRORS) -> tuple[Array, ...]:
    """Mean estimates, mean errors and total weights of the bins, [estimates * errors] each.

    Bins are of equal length in asinh(x), so that the far ones are wide, and in log(s).

    Args:
      x, s, w: estimates, errors above zero, and weights of the clients, [m] each, in units in which s is about one.
    """
    place = _place(jnp.arcsinh(x), estimates) * errors + _place(jnp.log(s), errors)
    empty = jnp.zeros(estimates * errors, x.dtype)
    weight, of_x, of_s = (empty.at[place].add(w * of) for of in (jnp.ones_like(x), x, s))
    full = weight > 0
    total = jnp.where(full, weight, 1)
    return jnp.where(full, of_x / total, 0), jnp.where(full, of_s / total, 1), weight


def _place(at: Array, number: int) -> Array:
    low, high = at.min(), at.max()
    share = (at - low) / jnp.where(high > low, high - low, 1)
    return jnp.minimum((number * jnp.nan_to_num(share)).astype(jnp.int32), number - 1)
