r"""The Laplace prior: most entries of a personal model equal the common one. It gives L1-regularised personalisation.

.. math:: -\log p(\theta; \mu, b) = d \log(2 b) + \frac{|\theta - \mu|_1}{b}

The gradient message steps along the natural gradient (the Fisher information of mu and of b is 1/b^2 for each entry):

.. math:: \mu^+ = \mu + \rho\, b \operatorname{sign}(\theta - \mu), \qquad b^+ = b + \rho' (|\theta - \mu^+|_1 / d - b)

The averaged message rests where mu is a median of the clients' models and b their mean absolute deviation from it. The
print has m log(2 b) for the first term; each of the d entries of each client brings one.

Reference: Ozkara et al. 2023, appendix E.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpfl import trees
from jaxpfl.priors.base import Examples, Prior, Rates, as_float, moved
from jaxpfl.types import Array, Key, Metrics, PyTree, Scalar


class Laplace(NamedTuple):
    """Gamma: the median, a tree like theta, and the mean absolute deviation of each entry, []."""

    mu: PyTree
    b: Array


def prior(*, b_init: Scalar = 0.1, floor: Scalar = 1e-3) -> Prior:
    """The Laplace prior.

    Args:
      b_init: the scale before any estimation.
      floor: the least scale, positive.
    """

    def init(theta: PyTree) -> Laplace:
        return project(Laplace(theta, as_float(b_init)))

    def project(gamma: Laplace) -> Laplace:
        return gamma._replace(b=jnp.maximum(gamma.b, floor))

    def descend(rates: Rates, gamma: Laplace, theta: PyTree, on: Examples | None = None) -> Laplace:
        step = rates.location * gamma.b
        mu = jax.tree.map(lambda m, t: m + (step * jnp.sign(t - m)).astype(m.dtype), gamma.mu, theta)
        b = moved(rates.scale, gamma.b, _mean_absolute(optax.tree.sub(theta, mu)))
        return project(Laplace(mu, b))

    def fit(gamma: Laplace, thetas: PyTree, valid: Array) -> Laplace:
        return trees.where(valid.any(), project(medians(thetas, valid)), gamma)

    def report(gamma: Laplace) -> Metrics:
        return {"b": gamma.b}

    return Prior(init, lambda gamma: gamma.mu, penalty, report, descend, fit, sample, project, prox)


def penalty(gamma: Laplace, theta: PyTree, on: Examples | None = None) -> Array:
    """Minus the log density, [].

    Implements: Ozkara et al. 2023, section 3.
    """
    d = optax.tree.size(theta)
    return d * jnp.log(2 * gamma.b) + d * _mean_absolute(optax.tree.sub(theta, gamma.mu)) / gamma.b


def sample(key: Key, gamma: Laplace) -> PyTree:
    """A model."""
    noise = optax.tree.random_like(key, gamma.mu, sampler=jax.random.laplace)
    return jax.tree.map(lambda m, z: m + (gamma.b * z).astype(m.dtype), gamma.mu, noise)


def prox(step: Scalar, gamma: Laplace, theta: PyTree) -> PyTree:
    """Every entry ``step / b`` nearer to mu's, and equal to it, to the bit, where it is no farther off than that."""
    reach = step / gamma.b

    def nearer(t: Array, m: Array) -> Array:
        apart = t - m
        return m + jnp.sign(apart) * jnp.maximum(jnp.abs(apart) - reach.astype(t.dtype), 0)

    return jax.tree.map(nearer, theta, gamma.mu)


def medians(thetas: PyTree, valid: Array) -> Laplace:
    """The maximum-likelihood estimate from models side by side, leaves [C, ...], of which some are valid, [C]."""

    def median(leaf: Array) -> Array:
        rows = valid.reshape(-1, *[1] * (leaf.ndim - 1))
        return jnp.where(valid.any(), jnp.nanmedian(jnp.where(rows, leaf, jnp.nan), axis=0), 0)

    mu = jax.tree.map(median, thetas)
    deviations = jax.vmap(lambda theta: _mean_absolute(optax.tree.sub(theta, mu)))(thetas)
    return Laplace(mu, jnp.where(valid, deviations, 0).sum() / jnp.maximum(valid.sum(), 1))


def _mean_absolute(difference: PyTree) -> Array:
    # JAX's derivative of |x| at 0 is 1: where theta = mu, as at the start, it would pull to one side.
    absolute = jax.tree.map(lambda a: jnp.sum(a * jnp.sign(a)), difference)
    return jax.tree.reduce(jnp.add, absolute) / optax.tree.size(difference)
