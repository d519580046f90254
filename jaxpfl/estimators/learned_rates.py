"""Probabilities of being above a threshold, and draws, of clients whose population was learned from them.

They integrate over the `Population` of `learned_bernoulli` or `learned_poisson`, as intervals do: a population that is
taken for known makes ranks too sure, and where the likeliest has no spread all clients equal.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core.types import Array, Key
from jaxpfl.estimators.learned_grid import Population, of_each
from jaxpfl.estimators.rate_answers import check_threshold


def exceedance(of: Population, count: np.ndarray, size: np.ndarray, threshold: float) -> np.ndarray:
    """Posterior probability that a client's probability or rate is more than a threshold, [m].

    Args:
      of: the population.
      count, size: Z_i and n_i, or e_i, [m] each.
      threshold: one for all.

    Raises:
      JaxpflError: for a threshold that is no finite number of at least zero, or above one for probabilities.
    """
    from scipy import special

    check_threshold(threshold, bounded=of.bounded)
    p = of.middle

    def of_some(pair: np.ndarray) -> np.ndarray:
        z, n = pair[0][:, None], pair[1][:, None]
        if of.bounded:
            above = special.betaincc(of.first + z, of.second + n - z, threshold)
        else:
            above = special.gammaincc(of.first + z, (of.second + n) * threshold)
        return (above @ p)[None]

    return of_each(of_some, np.asarray(count, float), np.asarray(size, float))[0]


def sampler(of: Population, count: np.ndarray, size: np.ndarray) -> Callable[[Key], Array]:
    """Draws of all clients together, of one population each time: a key to [m], for `normal_means.ranks_of`.

    Args:
      of, count, size: as those of `exceedance`.
    """
    kind = jnp.result_type(float)
    first, second, z, n = (jnp.asarray(each, kind) for each in (of.first, of.second, count, size))
    log_p = jnp.log(jnp.asarray(of.middle, kind))

    def draw(key: Key) -> Array:
        of_cell, of_clients = jax.random.split(key)
        cell = jax.random.categorical(of_cell, log_p)
        if of.bounded:
            return jax.random.beta(of_clients, first[cell] + z, second[cell] + n - z)
        return jax.random.gamma(of_clients, first[cell] + z) / (second[cell] + n)

    return draw
