"""Ranks of the clients' means, with their uncertainty.

Ranks of posterior means are too sure of themselves. Here all means are drawn together from their posteriors, again and
again, and ranked in each draw; clients that share an atom share the mean of their ranks.

Reference: Laird and Louis 1989, "Empirical Bayes ranking methods".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl import checks
from jaxpfl.estimators import inputs
from jaxpfl.estimators.normal_means.answer import NormalMeans
from jaxpfl.types import Array, Key


class Ranks(NamedTuple):
    """Posterior expectation and equal-tailed interval of every client's rank, 1 for the least mean, [m] each."""

    expected: Array
    low: Array
    high: Array


def ranks(found: NormalMeans, key: Key, *, draws: int = 1000, level: float = 0.95) -> Ranks:
    """Rank the clients by draws from their posteriors; arguments and errors as `ranks_of`, for the answer of `ebnm`."""
    return ranks_of(found.sample, key, draws=draws, level=level)


def ranks_of(sample: Callable[[Key], Array], key: Key, *, draws: int = 1000, level: float = 0.95) -> Ranks:
    """Rank the clients by draws of all their means.

    Args:
      sample: one draw, [m].
      key: of the draws.
      draws: their number; an expected rank has a standard error of its spread over the root of it.
      level: of the intervals, within (0, 1).

    Raises:
      JaxpflError: for no draws, or a level outside (0, 1).
    """
    checks.count("draws", draws)
    inputs.level(level)

    def one(key: Key) -> Array:
        theta = sample(key)
        order = jnp.sort(theta)
        below, up_to = (jnp.searchsorted(order, theta, side=side) for side in ("left", "right"))
        return (below + up_to + 1) / 2

    drawn = jax.lax.map(one, jax.random.split(key, draws))
    tails = jnp.array([(1 - level) / 2, (1 + level) / 2])
    low, high = jnp.quantile(drawn, tails, axis=0, method="nearest")
    return Ranks(drawn.mean(axis=0), low, high)
