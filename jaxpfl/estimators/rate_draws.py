"""Repeated draws from the posteriors of many clients under a mixture, for ranks.

The components' shares are summed once for each distinct pair of counts, and a draw looks its component up by bisection:
`RateMixture.sample` computes the shares of all clients anew each time, which for 300 atoms is nearly all of its work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np

from jaxpfl.core.types import Array, Key
from jaxpfl.estimators.rate_answers import RateMixture, shares_of
from jaxpfl.estimators.rate_mixtures import distinct

_MOST_KEPT = 50_000_000
"""Sums that are kept at most, 400 MB in double precision."""


def sampler(found: RateMixture) -> Callable[[Key], Array]:
    """Function of a key with the draws of `RateMixture.sample`; on the host, where values are known."""
    pairs, place, _ = distinct(np.asarray(found.events), np.asarray(found.size))
    count = len(found.prior.weights)
    if pairs.shape[1] * count > _MOST_KEPT:
        return found.sample
    z, n = (jnp.asarray(of, found.mean.dtype) for of in pairs)
    reached, own = jnp.cumsum(shares_of(found.prior, z, n), axis=-1), jnp.asarray(place)

    def kinds(p: Array) -> Array:
        p = p * reached[own, -1]
        low, high = jnp.zeros_like(own), jnp.full_like(own, count - 1)
        for _ in range(math.ceil(math.log2(count))):
            middle = (low + high) // 2
            left = reached[own, middle] < p
            low, high = jnp.where(left, middle + 1, low), jnp.where(left, high, middle)
        return low

    return partial(found.drawn, kinds=kinds)
