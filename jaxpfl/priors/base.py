r"""Interface of a prior: a population distribution P(Gamma) of the clients' models, as pure functions.

In the statistical framework theta_i ~ P(Gamma), and client i's data ~ p(. | theta_i). The client minimises

.. math:: f_i(\theta_i) - \log p(\theta_i; \Gamma)

with f_i the negative log likelihood of its data, and the population parameters Gamma are estimated from all clients. A
personalised method is then mostly a choice of the prior. Gamma is a NamedTuple of arrays, with means that are trees
like theta; static values and hyper-parameters are closed over.

Reference: Ozkara et al. 2023, "A Statistical Framework for Personalized Federated Learning and Estimation",
https://openreview.net/forum?id=FUiDMCr_W4o.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from jaxpfl.core import trees
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar


class Examples(NamedTuple):
    """Predictions of any model on a client's mini-batch of b examples, for priors that compare models by them.

    Attributes:
      apply: parameters -> logits [b, classes] of these examples.
      valid: [b] bool, true for real examples, false for padding.
    """

    apply: Callable[[PyTree], Array]
    valid: Array

    @property
    def size(self) -> Array:
        """Number of real examples, at least one, []."""
        return trees.valid_count(self.valid)

    def sum(self, values: Array) -> Array:
        """Sum of per-example values [b] over the real examples, []."""
        return trees.valid_sum(self.valid, values)

    def mean(self, values: Array) -> Array:
        """Mean of per-example values [b] over the real examples, []."""
        return trees.valid_mean(self.valid, values)


class Rates(NamedTuple):
    """Step sizes of a gradient message: for the location (mean or global model), and for the scale."""

    location: Scalar
    scale: Scalar


class Penalty(Protocol):
    def __call__(self, gamma: Any, theta: PyTree, on: Examples | None = None, /) -> Array: ...


class Descend(Protocol):
    def __call__(self, rates: Rates, gamma: Any, theta: PyTree, on: Examples | None = None, /) -> Any: ...


class Prior(NamedTuple):
    """Population distribution of models.

    Implements: Ozkara et al. 2023, equation (8); Ozkara et al. 2023, equation (9).

    Attributes:
      init: ``theta -> gamma``, centred on a model, at the prior's initial scale.
      center: ``gamma -> theta``, the population's center and a client's initial model.
      penalty: ``(gamma, theta, on) -> []``, minus the log density of theta with its full normaliser, so that it may be
        minimised over gamma too. ``on`` is for priors on predictions; others ignore it.
      report: ``gamma -> metrics``, scalars of interest.
      descend: ``(rates, gamma, theta, on) -> gamma``, one client's step on gamma given its model theta, respecting
        every floor; the server averages the results. None for priors that are estimated from all models at once.
      fit: ``(gamma, thetas [C, ...], valid [C]) -> gamma``, the estimate from all models (moments, or EM from gamma);
        gamma itself where none is valid. None for priors on predictions.
      sample: ``(key, gamma) -> theta``. None without a density of theta.
      project: ``gamma -> gamma``, restores every floor after noise on an average.
      prox: ``(step, gamma, theta) -> theta``, the proximal step on the penalty: a minimiser t of, or a t that lowers,
        ``step penalty(t) + |t - theta|^2 / 2``. It is stable for every step size, where a gradient step needs one below
        two over the curvature. None without a closed form.
    """

    init: Callable[[PyTree], Any]
    center: Callable[[Any], PyTree]
    penalty: Penalty
    report: Callable[[Any], Metrics]
    descend: Descend | None = None
    fit: Callable[[Any, PyTree, Array], Any] | None = None
    sample: Callable[[Key, Any], PyTree] | None = None
    project: Callable[[Any], Any] = lambda gamma: gamma
    prox: Callable[[Scalar, Any, PyTree], PyTree] | None = None


def interpolate(rate: Scalar, old: PyTree, new: PyTree) -> PyTree:
    """Interpolation ``old + rate (new - old)`` of trees."""
    return jax.tree.map(lambda a, b: a + (rate * (b - a)).astype(a.dtype), old, new)


def mean_square(difference: PyTree) -> Array:
    """Mean square ``|difference|^2 / d`` over all d entries, []."""
    return optax.tree.norm(difference, squared=True) / optax.tree.size(difference)


def weighted_mean(weights: Array, stacked: PyTree) -> PyTree:
    """Weighted mean ``sum_i w_i a_i / sum_i w_i``: weights [C], not all zero, and leaves [C, ...] -> [...]."""
    share = weights / weights.sum()
    return jax.tree.map(lambda a: jnp.tensordot(share.astype(a.dtype), a, axes=1), stacked)


def float_array(value: Scalar) -> Array:
    """Array of the value in the default float type."""
    return jnp.asarray(value, jnp.result_type(float))


class Family(NamedTuple):
    """Location-scale family of densities, as pure functions.

    Attributes:
      gamma: the NamedTuple of the two parameters, location ``mu`` first; the scale's field names it in reports.
      penalty: minus the log density, as `Prior.penalty`.
      sample: function as `Prior.sample`.
      prox: function as `Prior.prox`.
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


def location_scale(family: Family, scale_init: Scalar, floor: Scalar) -> Prior:
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
        return project(family.gamma(theta, float_array(scale_init)))

    def descend(rates: Rates, gamma: Any, theta: PyTree, on: Examples | None = None) -> Any:
        mu = family.descend(rates.location, gamma, theta)
        scale = interpolate(rates.scale, gamma[1], family.spread(optax.tree.sub(theta, mu)))
        return project(family.gamma(mu, scale))

    def fit(gamma: Any, thetas: PyTree, valid: Array) -> Any:
        return trees.where(valid.any(), project(estimate(family, thetas, valid)), gamma)

    def report(gamma: Any) -> Metrics:
        return {gamma._fields[1]: gamma[1]}

    prox = family.prox
    return Prior(init, lambda gamma: gamma.mu, family.penalty, report, descend, fit, family.sample, project, prox)


def estimate(family: Family, thetas: PyTree, valid: Array) -> Any:
    """Maximum-likelihood estimate from models with leaves [C, ...], of which some are valid, [C].

    The scale is fitted to the valid models' entries about the location: zero for one model.
    """
    mu = family.locate(thetas, valid)
    spreads = jax.vmap(lambda theta: family.spread(optax.tree.sub(theta, mu)))(thetas)
    return family.gamma(mu, trees.valid_mean(valid, spreads))
