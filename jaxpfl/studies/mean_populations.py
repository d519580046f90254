"""Populations of the simulated means: what they are, draws from them, and the least error that their clients allow."""

from __future__ import annotations

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core.types import Array, Key
from jaxpfl.estimators.normal_means import NormalMixture, posterior

Truth: TypeAlias = Literal["sparse", "two-point", "efron", "normal", "needles"]

MIXTURES: dict[Truth, tuple[tuple[float, ...], ...]] = {
    "sparse": ((0.95, 0.05), (0.0, 5.0), (0.0, 0.0)),
    "two-point": ((0.5, 0.5), (-2.0, 2.0), (0.0, 0.0)),
    "efron": ((0.9, 0.1), (0.0, -3.0), (0.0, 1.0)),
    "normal": ((1.0,), (0.0,), (1.0,)),
}
"""Weights, means and standard deviations of the components. efron: nine of ten are zero, the others N(-3, 1) (Efron
2008). needles is none of these: its means are fixed, not drawn."""

TRUTHS: tuple[Truth, ...] = (*MIXTURES, "needles")

_REACH, _CELLS = 12.0, 8_001


def mixture(truth: Truth) -> NormalMixture:
    """A population that clients are drawn from."""
    return NormalMixture(*(jnp.array(of) for of in MIXTURES[truth]))


def draw(of_kind: Key, of_theta: Key, population: NormalMixture, clients: int) -> Array:
    """Means of clients drawn from a population, [m]."""
    kind = jax.random.choice(of_kind, len(population.weights), (clients,), p=population.weights)
    return population.means[kind] + population.sds[kind] * jax.random.normal(of_theta, (clients,))


def needles(clients: int, nonzero: int | Array, size: float | Array) -> tuple[Array, NormalMixture]:
    """Means of which exactly ``nonzero`` are ``size`` and the others 0, [m] (Johnstone and Silverman 2004), and their
    distribution.

    An estimator that treats all clients by one function of their x has a total expected squared error of at least m
    times the Bayes risk of that distribution: the error of a function t is the sum over clients of
    E (t(theta_i + e) - theta_i)^2, which depends on the means by their distribution alone.
    """
    share = jnp.asarray(nonzero) / clients
    theta = jnp.where(jnp.arange(clients) < nonzero, size, 0.0)
    two = jnp.stack([jnp.zeros_like(theta[0]), jnp.asarray(size, theta.dtype)])
    return theta, NormalMixture(jnp.stack([1 - share, share]).astype(theta.dtype), two, jnp.zeros_like(two))


def bayes_risk(population: NormalMixture) -> float:
    """Least mean squared error at a unit standard error: the mean posterior variance.

    The mean over x is a sum over an even grid of twelve standard deviations about each component, so that components
    may lie anywhere.
    """
    z = jnp.linspace(-_REACH, _REACH, _CELLS)
    x = population.means[:, None] + jnp.sqrt(1 + population.sds**2)[:, None] * z
    variances = np.asarray(posterior(population, x.ravel(), jnp.ones(x.size)).sd, np.float64).reshape(x.shape) ** 2
    density = np.exp(-(np.asarray(z, np.float64) ** 2) / 2)
    return float(np.asarray(population.weights, np.float64) @ (variances @ (density / density.sum())))
