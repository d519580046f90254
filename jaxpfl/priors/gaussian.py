r"""Gaussian prior with a mean mu and one variance s2 for all entries: L2-regularized personalization.

.. math:: -\log p(\theta; \mu, s_2) = \tfrac d2 \log(2 \pi s_2) + \frac{|\theta - \mu|^2}{2 s_2}

where theta has d entries. A client's step on the parameters (`Prior.descend`) is a natural-gradient step with the rates
rho for mu and rho' for s2. The gradient is divided by the Fisher information, which is 1/s2 for each entry of mu and
d/(2 s2^2) for s2. The result is

.. math:: \mu^+ = \mu + \rho (\theta - \mu), \qquad s_2^+ = s_2 + \rho' (|\theta - \mu^+|^2 / d - s_2)

This step has the same fixed points as a gradient step. At rates up to one the step does not overshoot and s2 stays
positive, whereas gradient steps on s2 diverge as s2 shrinks. A natural-gradient step in log s2 is the same to first
order in the rate.

The joint likelihood of all theta_i and (mu, s2) is unbounded: it diverges if every theta_i tends to mu and s2 to zero.
Therefore s2 has a positive lower bound.

Reference: Ozkara et al. 2023, equation (9) and Algorithms 4 and 5, https://openreview.net/forum?id=FUiDMCr_W4o.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpfl.core.types import Array, Key, PyTree, Scalar
from jaxpfl.priors.base import Examples, Family, Prior, interpolate, location_scale, mean_square, weighted_mean


class Gaussian(NamedTuple):
    """Parameters of the prior: the mean mu, a pytree like theta, and the variance s2 of each entry, []."""

    mu: PyTree
    s2: Array


def prior(*, s2_init: Scalar = 0.1, floor: Scalar = 1e-4) -> Prior:
    """Make the Gaussian prior: the entries of a model are independent, with the means mu and one common variance s2.

    Implements: Ozkara et al. 2023, Algorithm 4.

    Args:
      s2_init: s2 in round 0; mu is then the initial model.
      floor: positive lower bound on s2.
    """
    return location_scale(FAMILY, s2_init, floor)


def penalty(gamma: Gaussian, theta: PyTree, on: Examples | None = None) -> Array:
    """Minus the log density of theta, [].

    Implements: Ozkara et al. 2023, section 3.
    """
    d = optax.tree.size(theta)
    distance = optax.tree.norm(optax.tree.sub(theta, gamma.mu), squared=True)
    return d / 2 * jnp.log(2 * jnp.pi * gamma.s2) + distance / (2 * gamma.s2)


def sample(key: Key, gamma: Gaussian) -> PyTree:
    """Draw a random model."""
    noise = optax.tree.random_like(key, gamma.mu)
    return jax.tree.map(lambda m, z: m + (jnp.sqrt(gamma.s2) * z).astype(m.dtype), gamma.mu, noise)


def prox(step: Scalar, gamma: Gaussian, theta: PyTree) -> PyTree:
    """Proximal step ``(s2 theta + step mu) / (s2 + step)``, computed as an interpolation between mu and theta."""
    return interpolate(gamma.s2 / (gamma.s2 + step), gamma.mu, theta)


def mean(thetas: PyTree, valid: Array) -> PyTree:
    """Mean of the valid models among C stacked models, arrays [C, ...]; the mean of all if no model is valid."""
    return weighted_mean(jnp.where(valid.any(), valid.astype(jnp.result_type(float)), 1), thetas)


def _toward(rate: Scalar, gamma: Gaussian, theta: PyTree) -> PyTree:
    return interpolate(rate, gamma.mu, theta)


FAMILY = Family(Gaussian, penalty, sample, prox, _toward, mean, mean_square)
"""Gaussian family for `priors.base.location_scale` and `priors.base.estimate`."""
