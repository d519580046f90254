r"""What a prior is: a population distribution P(Gamma) of the clients' models, as a few pure functions.

The statistical framework: theta_i ~ P(Gamma), client i's data ~ p(. | theta_i). The client minimises

.. math:: f_i(\theta_i) - \log p(\theta_i; \Gamma)

with f_i the negative log likelihood of its data, and Gamma is estimated from all clients. A personalised method is then
mostly a choice of the prior. Gamma is a NamedTuple of arrays, with means that are trees like theta; what is static, or
a hyper-parameter, is closed over.

Reference: Ozkara et al. 2023, "A Statistical Framework for Personalized Federated Learning and Estimation".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from jaxpfl import trees
from jaxpfl.types import Array, Key, Metrics, PyTree, Scalar


class Examples(NamedTuple):
    """Examples of a client, on which a prior may compare models by what they predict.

    Attributes:
      apply: parameters -> logits [b, classes] of these examples.
      valid: [b] bool, which of them are real.
    """

    apply: Callable[[PyTree], Array]
    valid: Array

    @property
    def size(self) -> Array:
        """The number of real examples, at least one, []."""
        return trees.valid_count(self.valid)

    def sum(self, values: Array) -> Array:
        """The sum of per-example values [b] over the real examples."""
        return trees.valid_sum(self.valid, values)

    def mean(self, values: Array) -> Array:
        """Their mean."""
        return trees.valid_mean(self.valid, values)


class Rates(NamedTuple):
    """Step sizes of a gradient message: of the means (or the global model), and of the scale."""

    location: Scalar
    scale: Scalar


class Penalty(Protocol):
    def __call__(self, gamma: Any, theta: PyTree, on: Examples | None = None, /) -> Array: ...


class Descend(Protocol):
    def __call__(self, rates: Rates, gamma: Any, theta: PyTree, on: Examples | None = None, /) -> Any: ...


class Prior(NamedTuple):
    """A population distribution of models.

    Implements: Ozkara et al. 2023, equation (8); Ozkara et al. 2023, equation (9).

    Attributes:
      init: ``theta -> gamma``, centred on a model, at the scale that the prior was built with.
      center: ``gamma -> theta``, a model in the middle of the population: where a client starts.
      penalty: ``(gamma, theta, on) -> []``, minus the log density of theta with its whole normaliser, so that it may be
        minimised over gamma too. ``on`` is for priors on predictions; others ignore it.
      report: ``gamma -> metrics``, scalars worth watching.
      descend: ``(rates, gamma, theta, on) -> gamma``, what one client with model theta makes of gamma in one step; the
        server averages what its clients made. Keeps every floor. None for priors that are estimated from all models
        at once.
      fit: ``(gamma, thetas [C, ...], valid [C]) -> gamma``, the estimate from models side by side (moments, or EM that
        starts from gamma); gamma itself where none is valid. None for priors on predictions.
      sample: ``(key, gamma) -> theta``. None where there is no density of theta to draw from.
      project: ``gamma -> gamma``, back above every floor, below which noise on an average can take it.
      prox: ``(step, gamma, theta) -> theta``, the proximal step on the penalty: the t that minimises, or a t that
        lowers, ``step penalty(t) + |t - theta|^2 / 2``. It is stable for every step, where a step along the gradient
        needs one below two over the curvature. None where there is no closed form.
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


def moved(rate: Scalar, old: PyTree, new: PyTree) -> PyTree:
    """``old + rate (new - old)`` for trees."""
    return jax.tree.map(lambda a, b: a + (rate * (b - a)).astype(a.dtype), old, new)


def mean_square(difference: PyTree) -> Array:
    """``|difference|^2 / d``, []."""
    return optax.tree.norm(difference, squared=True) / optax.tree.size(difference)


def weighted_mean(weights: Array, stacked: PyTree) -> PyTree:
    """``sum_i w_i a_i / sum_i w_i``: weights [C] that are not all zero, leaves [C, ...] -> [...]."""
    share = weights / weights.sum()
    return jax.tree.map(lambda a: jnp.tensordot(share.astype(a.dtype), a, axes=1), stacked)


def as_float(value: Scalar) -> Array:
    """The value as an array of the default float type."""
    return jnp.asarray(value, jnp.result_type(float))
