r"""Gaussian prior of a mean mu and one variance s^2: L2-regularised personalisation.

.. math:: -\log p(\theta; \mu, s^2) = \tfrac d2 \log(2 \pi s^2) + \frac{|\theta - \mu|^2}{2 s^2}

over the d entries of theta. The gradient message is a natural-gradient step (the gradient divided by the Fisher
information, 1/s2 for each entry of mu and d/(2 s2^2) for s2 = s^2) at the rates rho and rho':

.. math:: \mu^+ = \mu + \rho (\theta - \mu), \qquad s^{2+} = s^2 + \rho' (|\theta - \mu^+|^2 / d - s^2)

It has the same fixed points as the gradient, but at rates up to one it does not overshoot, and s2 stays positive;
gradient steps on s2 diverge as s2 shrinks. In log s2 it is the same step to first order in the rate.

The joint likelihood of all theta_i and (mu, s2) is unbounded as s2 -> 0 with theta_i -> mu: hence the floor.

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
    """Parameters Gamma: the mean mu, a tree like theta, and the variance s2 of each entry, []."""

    mu: PyTree
    s2: Array


def prior(*, s2_init: Scalar = 0.1, floor: Scalar = 1e-4) -> Prior:
    """Population of models with independent Gaussian entries about a mean model mu, all with one variance s2.

    Implements: Ozkara et al. 2023, Algorithm 4.

    Args:
      s2_init: s2 in round 0; mu is then the initial model.
      floor: the least s2, positive.
    """
    return location_scale(FAMILY, s2_init, floor)


def penalty(gamma: Gaussian, theta: PyTree, on: Examples | None = None) -> Array:
    """Minus the log density, [].

    Implements: Ozkara et al. 2023, section 3.
    """
    d = optax.tree.size(theta)
    distance = optax.tree.norm(optax.tree.sub(theta, gamma.mu), squared=True)
    return d / 2 * jnp.log(2 * jnp.pi * gamma.s2) + distance / (2 * gamma.s2)


def sample(key: Key, gamma: Gaussian) -> PyTree:
    """Random model."""
    noise = optax.tree.random_like(key, gamma.mu)
    return jax.tree.map(lambda m, z: m + (jnp.sqrt(gamma.s2) * z).astype(m.dtype), gamma.mu, noise)


def prox(step: Scalar, gamma: Gaussian, theta: PyTree) -> PyTree:
    """Proximal step ``(s2 theta + step mu) / (s2 + step)``, accurate for distant theta too."""
    return interpolate(gamma.s2 / (gamma.s2 + step), gamma.mu, theta)


def mean(thetas: PyTree, valid: Array) -> PyTree:
    """Mean of the valid models [C], leaves [C, ...] -> [...]; of all where none is valid."""
    return weighted_mean(jnp.where(valid.any(), valid.astype(jnp.result_type(float)), 1), thetas)


def _toward(rate: Scalar, gamma: Gaussian, theta: PyTree) -> PyTree:
    return interpolate(rate, gamma.mu, theta)


FAMILY = Family(Gaussian, penalty, sample, prox, _toward, mean, mean_square)
"""Gaussian family for `priors.base.location_scale` and `priors.base.estimate`."""
