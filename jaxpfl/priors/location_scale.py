"""Priors of a location, a tree like theta, and one scale of its entries: the common form of Gaussian and Laplace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpfl.core import trees
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar
from jaxpfl.priors.base import Examples, Penalty, Prior, Rates, as_float, moved


class Family(NamedTuple):
    """Location-scale family of densities, as pure functions.

    Attributes:
      gamma: the NamedTuple of the two parameters, location ``mu`` first; the scale's field names it in reports.
      penalty: minus the log density, as `Prior.penalty`.
      sample: as `Prior.sample`.
      prox: as `Prior.prox`.
      descend: ``(rate, gamma, theta) -> mu``, one natural-gradient step on the location.
      locate: ``(thetas [C, ...], valid [C]) -> mu``, the maximum-likelihood location; anything where none is valid.
      spread: ``theta - mu -> []``, whose mean over models is the maximum-likelihood scale at that location.
    """

    gamma: Callable[[PyTree, Any], Any]
    penalty: Penalty
    sample: Callable[[Key, Any], PyTree]
    prox: Callable[[Scalar, Any, PyTree], PyTree]
    descend: Callable[[Scalar, Any, PyTree], PyTree]
    locate: Callable[[PyTree, Array], PyTree]
    spread: Callable[[PyTree], Array]


def prior(family: Family, scale_init: Scalar, floor: Scalar) -> Prior:
    """Prior of a location-scale family, estimated by gradient messages or from all models.

    Args:
      family: its densities.
      scale_init: the scale before any estimation.
      floor: the least scale, positive.
    """

    def project(gamma: Any) -> Any:
        mu, scale = gamma
        return family.gamma(mu, jnp.maximum(scale, floor))

    def init(theta: PyTree) -> Any:
        return project(family.gamma(theta, as_float(scale_init)))

    def descend(rates: Rates, gamma: Any, theta: PyTree, on: Examples | None = None) -> Any:
        mu = family.descend(rates.location, gamma, theta)
        scale = moved(rates.scale, gamma[1], family.spread(optax.tree.sub(theta, mu)))
        return project(family.gamma(mu, scale))

    def fit(gamma: Any, thetas: PyTree, valid: Array) -> Any:
        return trees.where(valid.any(), project(estimate(family, thetas, valid)), gamma)

    def report(gamma: Any) -> Metrics:
        return {gamma._fields[1]: gamma[1]}

    prox = family.prox
    return Prior(init, lambda gamma: gamma.mu, family.penalty, report, descend, fit, family.sample, project, prox)


def estimate(family: Family, thetas: PyTree, valid: Array) -> Any:
    """Maximum-likelihood estimate from models with leaves [C, ...], of which some are valid, [C].

    The scale is that of valid models and entries about the location: zero for one model.
    """
    mu = family.locate(thetas, valid)
    spreads = jax.vmap(lambda theta: family.spread(optax.tree.sub(theta, mu)))(thetas)
    return family.gamma(mu, trees.valid_mean(valid, spreads))
