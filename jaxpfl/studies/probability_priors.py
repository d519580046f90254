"""Populations of probabilities, with their sampling, mean and variance."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array, Key
from jaxpfl.estimators.bernoulli import Population
from jaxpfl.support.errors import JaxpflError, shown, unknown_name

KINDS = ("beta", "truncnorm", "uniform", "spikes")


class ProbabilityPrior(NamedTuple):
    """A distribution P on [0, 1].

    Attributes:
      name: as given.
      draw: ``(key, m) -> p [m]``.
      population: its mean and variance.
      beta: (alpha, beta) if P is that Beta distribution.
    """

    name: str
    draw: Callable[[Key, int], Array]
    population: Population
    beta: tuple[float, float] | None = None


def parse(text: str) -> ProbabilityPrior:
    """Parse a population: ``beta:ALPHA,BETA``, ``truncnorm:MEAN,STDDEV``, ``uniform`` or ``spikes``.

    ``truncnorm`` is truncated to [0, 1]; ``spikes`` has equal mass at 1/4, 1/2 and 3/4.

    Raises:
      JaxpflError: for an unknown kind, or wrong arguments.
    """
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise unknown_name("prior", kind, KINDS)
    values = _numbers(text, rest)
    if len(values) != (2 if kind in ("beta", "truncnorm") else 0):
        raise JaxpflError(f"prior must be beta:ALPHA,BETA, truncnorm:MEAN,STDDEV, uniform or spikes, got {shown(text)}")
    if kind == "uniform":
        return ProbabilityPrior(text, lambda key, m: jax.random.uniform(key, (m,)), Population(0.5, 1 / 12), (1.0, 1.0))
    if kind == "spikes":
        return ProbabilityPrior(text, lambda key, m: jax.random.randint(key, (m,), 1, 4) / 4, Population(0.5, 1 / 24))
    return _beta(text, *values) if kind == "beta" else _truncated(text, *values)


def _beta(text: str, alpha: float, beta: float) -> ProbabilityPrior:
    if not (0 < alpha < 1e6 and 0 < beta < 1e6):
        raise JaxpflError(f"prior {shown(text)}: ALPHA and BETA must be > 0 and below 1e6")
    total = alpha + beta
    population = Population(alpha / total, alpha * beta / (total**2 * (total + 1)))
    return ProbabilityPrior(text, lambda key, m: jax.random.beta(key, alpha, beta, (m,)), population, (alpha, beta))


def _truncated(text: str, mean: float, stddev: float) -> ProbabilityPrior:
    if not (0 <= mean <= 1 and 0 < stddev < 1e3):
        raise JaxpflError(f"prior {shown(text)}: MEAN must be within [0, 1] and STDDEV > 0 and below 1000")
    low, high = (0 - mean) / stddev, (1 - mean) / stddev

    def draw(key: Key, m: int) -> Array:
        return jnp.clip(mean + stddev * jax.random.truncated_normal(key, low, high, (m,)), 0, 1)

    with jax.enable_x64(True):
        # Moments of the normal distribution truncated to [low, high] (in units of the standard deviation).
        cdf, pdf = jax.scipy.stats.norm.cdf, jax.scipy.stats.norm.pdf
        mass = cdf(high) - cdf(low)
        first = (pdf(low) - pdf(high)) / mass
        second = 1 + (low * pdf(low) - high * pdf(high)) / mass
        population = Population(float(mean + stddev * first), float(stddev**2 * (second - first**2)))
    return ProbabilityPrior(text, draw, population)


def _numbers(text: str, rest: str) -> list[float]:
    try:
        return [float(part) for part in rest.split(",")] if rest else []
    except ValueError:
        raise JaxpflError(f"prior {shown(text)}: {shown(rest)} is no list of numbers") from None
