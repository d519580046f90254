r"""Laplace prior with a median mu and one scale b: L1-regularized personalization, which makes most entries of a model
equal to mu's entries.

.. math:: -\log p(\theta; \mu, b) = d \log(2 b) + \frac{|\theta - \mu|_1}{b}

where theta has d entries. A client's step on the parameters (`Prior.descend`) is a natural-gradient step with the rates
rho for mu and rho' for b (the Fisher information is 1/b^2 for each entry, both for mu and for b):

.. math:: \mu^+ = \mu + \rho\, b \operatorname{sign}(\theta - \mu), \qquad b^+ = b + \rho' (|\theta - \mu^+|_1 / d - b)

On average over clients, these steps leave mu and b unchanged if mu is a median of the clients' models and b is their
mean absolute deviation from mu. The paper's first term is m log(2 b) for m clients; in this module, each of the d
entries of each client contributes a term log(2 b).

Reference: Ozkara et al. 2023, appendix E, https://openreview.net/forum?id=FUiDMCr_W4o.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpfl.core.types import Array, Key, PyTree, Scalar
from jaxpfl.priors.base import Examples, Family, Prior, location_scale


class Laplace(NamedTuple):
    """Parameters of the prior: the median mu, a pytree like theta, and every entry's mean absolute deviation b, []."""

    mu: PyTree
    b: Array


def prior(*, b_init: Scalar = 0.1, floor: Scalar = 1e-3) -> Prior:
    """Make the Laplace prior: the entries of a model are independent, with the medians mu and one common scale b.

    Args:
      b_init: initial scale b.
      floor: positive lower bound on b.
    """
    return location_scale(FAMILY, b_init, floor)


def penalty(gamma: Laplace, theta: PyTree, on: Examples | None = None) -> Array:
    """Minus the log density of theta, [].

    Implements: Ozkara et al. 2023, section 3.
    """
    d = optax.tree.size(theta)
    return d * jnp.log(2 * gamma.b) + d * _mean_absolute(optax.tree.sub(theta, gamma.mu)) / gamma.b


def sample(key: Key, gamma: Laplace) -> PyTree:
    """Draw a random model."""
    noise = optax.tree.random_like(key, gamma.mu, sampler=jax.random.laplace)
    return jax.tree.map(lambda m, z: m + (gamma.b * z).astype(m.dtype), gamma.mu, noise)


def prox(step: Scalar, gamma: Laplace, theta: PyTree) -> PyTree:
    """Proximal step: soft-threshold theta - mu at ``step / b``. Entries within this distance become equal to mu's
    entries.
    """
    reach = step / gamma.b

    def nearer(t: Array, m: Array) -> Array:
        apart = t - m
        return m + jnp.sign(apart) * jnp.maximum(jnp.abs(apart) - reach.astype(t.dtype), 0)

    return jax.tree.map(nearer, theta, gamma.mu)


def median(thetas: PyTree, valid: Array) -> PyTree:
    """Median of each entry over the valid models among C stacked models, arrays [C, ...]; zero if no model is valid."""

    def leaf_median(leaf: Array) -> Array:
        rows = valid.reshape(-1, *[1] * (leaf.ndim - 1))
        return jnp.where(valid.any(), jnp.nanmedian(jnp.where(rows, leaf, jnp.nan), axis=0), 0)

    return jax.tree.map(leaf_median, thetas)


def _toward(rate: Scalar, gamma: Laplace, theta: PyTree) -> PyTree:
    step = rate * gamma.b
    return jax.tree.map(lambda m, t: m + (step * jnp.sign(t - m)).astype(m.dtype), gamma.mu, theta)


def _mean_absolute(difference: PyTree) -> Array:
    # JAX's derivative of |x| at 0 is 1. This derivative would pull theta to one side where theta = mu, as in round 0.
    absolute = jax.tree.map(lambda a: jnp.sum(a * jnp.sign(a)), difference)
    return jax.tree.reduce(jnp.add, absolute) / optax.tree.size(difference)


FAMILY = Family(Laplace, penalty, sample, prox, _toward, median, _mean_absolute)
"""Laplace family for `priors.base.location_scale` and `priors.base.estimate`."""
