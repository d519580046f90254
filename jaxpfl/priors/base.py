r"""Interface of a prior: a population distribution P(Gamma) of the clients' models, as pure functions.

In the statistical framework theta_i ~ P(Gamma), and client i's data ~ p(. | theta_i). The client minimises

.. math:: f_i(\theta_i) - \log p(\theta_i; \Gamma)

where f_i is the negative log likelihood of its data. The population parameters Gamma are estimated from all clients. A
new personalised method is thus mostly a new prior. Gamma is a NamedTuple of arrays; its means are pytrees like theta.
Static values and hyper-parameters are closed over.

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
    """Step sizes of the gradient message, for the location (mean or global model) and for the scale."""

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
      init: ``theta -> gamma``, the parameters centred on a model, with the prior's initial scale.
      center: ``gamma -> theta``, the population's center, which is also a client's initial model.
      penalty: ``(gamma, theta, on) -> []``, minus the log density of theta. It includes the full normaliser, so that it
        can be minimised over gamma too. Only priors on predictions use ``on``.
      report: ``gamma -> metrics``, scalars for the logs.
      descend: ``(rates, gamma, theta, on) -> gamma``, one client's step on gamma given its model theta, with every
        floor respected. The server averages the results. None for priors that are estimated from all models at once.
      fit: ``(gamma, thetas [C, ...], valid [C]) -> gamma``, the estimate from all models (by moments, or by EM that
        starts from gamma); gamma itself if no model is valid. None for priors on predictions.
      sample: ``(key, gamma) -> theta``, or None if theta has no density.
      project: ``gamma -> gamma``, restores every floor after noise was added to an average.
      prox: ``(step, gamma, theta) -> theta``, the proximal step on the penalty: a t that minimises, or at least lowers,
        ``step penalty(t) + |t - theta|^2 / 2``. It is stable for every step size, while a gradient step needs a step
        size below two over the curvature. None if there is no closed form.
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
    """Interpolation ``old + rate (new - old)`` between two pytrees."""
    return jax.tree.map(lambda a, b: a + (rate * (b - a)).astype(a.dtype), old, new)


def mean_square(difference: PyTree) -> Array:
    """Mean square ``|difference|^2 / d`` over all d entries, []."""
    return optax.tree.norm(difference, squared=True) / optax.tree.size(difference)


def weighted_mean(weights: Array, stacked: PyTree) -> PyTree:
    """Weighted mean ``sum_i w_i a_i / sum_i w_i``: weights [C], not all zero, and leaves [C, ...] -> [...]."""
    share = weights / weights.sum()
    return jax.tree.map(lambda a: jnp.tensordot(share.astype(a.dtype), a, axes=1), stacked)


def float_array(value: Scalar) -> Array:
    """The value as an array of the default float type."""
    return jnp.asarray(value, jnp.result_type(float))


class Family(NamedTuple):
    """Location-scale family of densities, as pure functions.

    Attributes:
      gamma: NamedTuple class of the two parameters, location ``mu`` first. The name of its second field is the metric's
        name in reports.
      penalty: minus the log density, as `Prior.penalty`.
      sample: function as `Prior.sample`.
      prox: function as `Prior.prox`.
      descend: ``(rate, gamma, theta) -> mu``, one natural-gradient step on the location.
      locate: ``(thetas [C, ...], valid [C]) -> mu``, the maximum-likelihood location; arbitrary if no model is valid.
      spread: ``theta - mu -> []``. Its mean over models is the maximum-likelihood scale at the location mu.
    """

    gamma: Callable[[PyTree, Any], Any]
    penalty: Penalty
    sample: Callable[[Key, Any], PyTree]
    prox: Callable[[Scalar, Any, PyTree], PyTree]
    descend: Callable[[Scalar, Any, PyTree], PyTree]
    locate: Callable[[PyTree, Array], PyTree]
    spread: Callable[[PyTree], Array]


def location_scale(family: Family, scale_init: Scalar, floor: Scalar) -> Prior:
    """Prior of a location-scale family, estimated by gradient messages or from all models at once.

    Args:
      family: densities of the family.
      scale_init: initial scale.
      floor: least scale, positive.
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
    """Maximum-likelihood estimate from models with leaves [C, ...], marked as valid or not by ``valid`` [C] bool.

    The scale is fitted to the deviations from the location, so it is zero for one model.
    """
    mu = family.locate(thetas, valid)
    spreads = jax.vmap(lambda theta: family.spread(optax.tree.sub(theta, mu)))(thetas)
    return family.gamma(mu, trees.valid_mean(valid, spreads))
