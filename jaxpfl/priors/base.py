r"""Interface of a prior: a population distribution P(Gamma) of the clients' models, as pure functions.

In the statistical framework, client i's model theta_i is drawn from P(Gamma), and its data from p(. | theta_i). The
client minimizes

.. math:: f_i(\theta_i) - \log p(\theta_i; \Gamma)

where f_i is the negative log likelihood of the client's data. The population parameters Gamma are estimated from all
clients. Adding a personalized method mostly means writing a new prior. Gamma is a NamedTuple of arrays and of pytrees
with the structure of theta, such as the mean. A prior's functions are closures over its static values and
hyper-parameters.

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
    """A client's mini-batch of b examples, on which priors can compare the predictions of models.

    Attributes:
      apply: ``parameters -> logits [b, classes]`` on these examples.
      valid: mask of the real examples, [b] bool; false for padding.
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
    """Step sizes of `Prior.descend`, for the location (mean or global model) and for the scale."""

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
      init: function ``theta -> gamma`` that returns the initial parameters, centered on a model and with the prior's
        initial scale.
      center: function ``gamma -> theta`` that returns the population's center, the initial model of a client.
      penalty: function ``(gamma, theta, on) -> []`` that returns minus the log density of theta, including the terms
        that depend only on gamma, so that the penalty can be minimized over gamma too. Only priors on predictions use
        the examples ``on``.
      report: function ``gamma -> metrics`` that returns scalars for the logs.
      descend: function ``(rates, gamma, theta, on) -> gamma`` that takes one client's step on gamma, given its model
        theta; scales stay at or above their floor. The server averages the results. None for priors whose parameters
        only ``fit`` can estimate.
      fit: function ``(gamma, thetas [C, ...], valid [C]) -> gamma`` that estimates gamma from the valid ones of C
        models, in closed form or by EM from the given gamma; it returns the given gamma if no model is valid. None for
        priors on predictions.
      sample: function ``(key, gamma) -> theta`` that draws a random model; None for priors on predictions.
      project: function ``gamma -> gamma`` that raises scales to their floor, for example after noise was added to an
        average.
      prox: function ``(step, gamma, theta) -> theta`` that takes a proximal step on the penalty: it returns a model t
        that minimizes, or at least lowers, ``step penalty(t) + |t - theta|^2 / 2``. The proximal step is stable for
        every step size, while a gradient step needs a step size below 2 / curvature. None if there is no closed form.
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
    """Interpolate between two pytrees: ``old + rate (new - old)``."""
    return jax.tree.map(lambda a, b: a + (rate * (b - a)).astype(a.dtype), old, new)


def mean_square(difference: PyTree) -> Array:
    """Mean square ``|difference|^2 / d`` of all d entries of a pytree, []."""
    return optax.tree.norm(difference, squared=True) / optax.tree.size(difference)


def weighted_mean(weights: Array, stacked: PyTree) -> PyTree:
    """Weighted mean ``sum_i w_i a_i / sum_i w_i`` of C stacked arrays a [C, ...], for weights w [C] that are not all
    zero.
    """
    share = weights / weights.sum()
    return jax.tree.map(lambda a: jnp.tensordot(share.astype(a.dtype), a, axes=1), stacked)


def float_array(value: Scalar) -> Array:
    """Convert a value to an array of JAX's default float type."""
    return jnp.asarray(value, jnp.result_type(float))


class Family(NamedTuple):
    """Location-scale family of densities, as pure functions.

    Attributes:
      gamma: NamedTuple class of the two parameters, the location ``mu`` and then the scale. The name of the second
        field is also the name of the scale's metric in reports.
      penalty: the prior's function `Prior.penalty`, which computes the negative logarithm of the density.
      sample: the prior's function `Prior.sample`.
      prox: the prior's function `Prior.prox`.
      descend: function ``(rate, gamma, theta) -> mu`` that takes one natural-gradient step on the location.
      locate: function ``(thetas [C, ...], valid [C]) -> mu`` that returns the maximum-likelihood location of C models;
        the result is arbitrary if no model is valid.
      spread: function ``(theta - mu) -> []``, whose mean over models is the maximum-likelihood scale at location mu.
    """

    gamma: Callable[[PyTree, Any], Any]
    penalty: Penalty
    sample: Callable[[Key, Any], PyTree]
    prox: Callable[[Scalar, Any, PyTree], PyTree]
    descend: Callable[[Scalar, Any, PyTree], PyTree]
    locate: Callable[[PyTree, Array], PyTree]
    spread: Callable[[PyTree], Array]


def location_scale(family: Family, scale_init: Scalar, floor: Scalar) -> Prior:
    """Make the prior of a location-scale family.

    The parameters are updated by the clients' steps (`Prior.descend`) or fitted to all models (`Prior.fit`).

    Args:
      family: the family.
      scale_init: initial scale.
      floor: positive lower bound on the scale.
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
    """Maximum-likelihood estimate of location and scale from the valid models.

    ``thetas`` are C stacked models, a pytree of arrays [C, ...]; the mask ``valid`` [C] marks the valid ones. With a
    single model, the scale is zero.
    """
    mu = family.locate(thetas, valid)
    spreads = jax.vmap(lambda theta: family.spread(optax.tree.sub(theta, mu)))(thetas)
    return family.gamma(mu, trees.valid_mean(valid, spreads))
