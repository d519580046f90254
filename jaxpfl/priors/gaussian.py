r"""The Gaussian prior: personal models about one mean, at one variance. It gives L2-regularised personalisation.

.. math:: -\log p(\theta; \mu, s^2) = \tfrac d2 \log(2 \pi s^2) + \frac{|\theta - \mu|^2}{2 s^2}

The gradient message steps along the natural gradient (the gradient divided by the Fisher information, 1/s2 for each
entry of mu and d/(2 s2^2) for s2):

.. math:: \mu^+ = \mu + \rho (\theta - \mu), \qquad s^{2+} = s^2 + \rho' (|\theta - \mu^+|^2 / d - s^2)

Its fixed points are those of the plain gradient, but a step cannot overshoot at rates up to one, and s2 stays positive;
plain steps on s2 diverge as s2 shrinks. In log s2 it is the same step to first order in the rate.

The joint likelihood of all theta_i and (mu, s2) is unbounded as s2 -> 0 with theta_i -> mu: hence the floor.

Reference: Ozkara et al. 2023, equation (9) and Algorithms 4 and 5.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpfl import trees
from jaxpfl.priors.base import Examples, Prior, Rates, as_float, mean_square, moved, weighted_mean
from jaxpfl.types import Array, Key, Metrics, PyTree, Scalar


class Gaussian(NamedTuple):
    """Gamma: the mean, a tree like theta, and the variance of each entry, []."""

    mu: PyTree
    s2: Array


def prior(*, s2_init: Scalar = 0.1, floor: Scalar = 1e-4) -> Prior:
    """The Gaussian prior.

    Implements: Ozkara et al. 2023, Algorithm 4.

    Args:
      s2_init: the variance before any estimation.
      floor: the least variance, positive.
    """

    def init(theta: PyTree) -> Gaussian:
        return project(Gaussian(theta, as_float(s2_init)))

    def project(gamma: Gaussian) -> Gaussian:
        return gamma._replace(s2=jnp.maximum(gamma.s2, floor))

    def descend(rates: Rates, gamma: Gaussian, theta: PyTree, on: Examples | None = None) -> Gaussian:
        mu = moved(rates.location, gamma.mu, theta)
        s2 = moved(rates.scale, gamma.s2, mean_square(optax.tree.sub(theta, mu)))
        return project(Gaussian(mu, s2))

    def fit(gamma: Gaussian, thetas: PyTree, valid: Array) -> Gaussian:
        return trees.where(valid.any(), project(moments(thetas, valid)), gamma)

    def report(gamma: Gaussian) -> Metrics:
        return {"s2": gamma.s2}

    return Prior(init, lambda gamma: gamma.mu, penalty, report, descend, fit, sample, project, prox)


def penalty(gamma: Gaussian, theta: PyTree, on: Examples | None = None) -> Array:
    """Minus the log density, [].

    Implements: Ozkara et al. 2023, section 3.
    """
    d = optax.tree.size(theta)
    distance = optax.tree.norm(optax.tree.sub(theta, gamma.mu), squared=True)
    return d / 2 * jnp.log(2 * jnp.pi * gamma.s2) + distance / (2 * gamma.s2)


def sample(key: Key, gamma: Gaussian) -> PyTree:
    """A model."""
    noise = optax.tree.random_like(key, gamma.mu)
    return jax.tree.map(lambda m, z: m + (jnp.sqrt(gamma.s2) * z).astype(m.dtype), gamma.mu, noise)


def prox(step: Scalar, gamma: Gaussian, theta: PyTree) -> PyTree:
    """``(s2 theta + step mu) / (s2 + step)``, precise also where theta is very far off."""
    return moved(gamma.s2 / (gamma.s2 + step), gamma.mu, theta)


def moments(thetas: PyTree, valid: Array) -> Gaussian:
    """The maximum-likelihood estimate from models side by side, leaves [C, ...], of which some are valid, [C].

    The mean, and the mean square deviation from it over valid models and entries: zero for one model.
    """
    weights = valid.astype(jnp.result_type(float))
    mu = weighted_mean(jnp.where(valid.any(), weights, 1), thetas)
    squares = jax.vmap(lambda theta: mean_square(optax.tree.sub(theta, mu)))(thetas)
    return Gaussian(mu, jnp.where(valid, squares, 0).sum() / jnp.maximum(valid.sum(), 1))
