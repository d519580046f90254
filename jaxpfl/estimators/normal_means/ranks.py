"""Ranks of the clients' means, with their uncertainty.

Ranks of posterior means are too sure of themselves. Here all means are drawn together from their posteriors, again and
again, and ranked in each draw; clients that share an atom share the mean of their ranks.

Reference: Laird and Louis 1989, "Empirical Bayes ranking methods".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxpfl.core import checks
from jaxpfl.core.types import Array, Key
from jaxpfl.estimators import inputs


class Ranks(NamedTuple):
    """Posterior expectation and equal-tailed interval of every client's rank, 1 for the least mean, [m] each."""

    expected: Array
    low: Array
    high: Array


class Sampled(Protocol):
    """Answer that draws from all clients' posteriors together, as those of `ebnm`, `ebbinomial` and `ebpoisson` do."""

    def sample(self, key: Key, /) -> Array:
        """One draw of every client's parameter, [m]."""
        ...


def ranks(found: Sampled, key: Key, *, draws: int = 1000, level: float = 0.95) -> Ranks:
    """Rank the clients of an answer by draws from their posteriors; arguments and errors as those of `ranks_of`."""
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
        return (below + up_to + 1).astype(theta.dtype) / 2

    drawn = jax.lax.map(one, jax.random.split(key, draws))
    tails = jnp.array([(1 - level) / 2, (1 + level) / 2])
    low, high = jnp.quantile(drawn, tails, axis=0, method="nearest")
    expected = jnp.clip(drawn.mean(axis=0), drawn.min(axis=0), drawn.max(axis=0))  # but for rounding it is within
    return Ranks(expected, low, high)
