r"""Knowledge-distillation prior of AdaPeD: personal models whose predictions are close to a global model's.

.. math:: -\log p(\theta; \mu, \psi) = \tfrac12 \log(2\psi) + \frac{1}{2\psi} f(\theta, \mu), \qquad
   f(\theta, \mu) = \operatorname{mean}_x KL(\operatorname{softmax}(b) \,\|\, \operatorname{softmax}(a))

Here ``a`` are the logits of the personal model theta (the student), ``b`` are the logits of the global model mu (the
teacher), and psi is the scale.

The first term, log(2 psi) / 2, replaces the density's true log normalizer. To define that normalizer, let q_x be the
class probabilities that theta predicts for an example x. For n examples, let the joint density of all q_x be
proportional to exp(-f / (2 psi)), relative to the uniform measure on the simplex for each q_x. The log normalizer is

.. math:: \log \prod_x \int e^{-w KL(p_x \| q)} dq = \sum_x [ w H(p_x) + \log B(1 + w p_x) ], \qquad
   w = \frac{1}{2 \psi n}

where p_x is the prediction of mu, H the entropy and B the multivariate beta function. (The paper's appendix H states
this for two classes, with an inverse variance instead of psi, and with a spurious division by w.)

Reference: Ozkara et al. 2023, "A Statistical Framework for Personalized Federated Learning and Estimation",
https://openreview.net/forum?id=FUiDMCr_W4o.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln

from jaxpfl.core.types import Array, Metrics, PyTree, Scalar
from jaxpfl.models import PerExample, Task
from jaxpfl.models.metrics import class_divergence as divergence
from jaxpfl.priors.base import Examples, Prior, Rates, float_array
from jaxpfl.support.errors import JaxpflError, unknown_name


class Shared(NamedTuple):
    """Parameters of the prior: the global model mu, and the scale psi, []."""

    mu: PyTree
    psi: Scalar


def check_task(method: str, task: Task) -> None:
    """Check that a task defines a distance between predictions.

    Raises:
      JaxpflError: if the task has no classes and no `Task.divergence`; the error names the method.
    """
    if task.divergence is None and not task.has_classes:
        raise JaxpflError(
            f"{method} distills predictions, but the task {task.kind!r} defines no distance between them: set "
            "Task.divergence"
        )


def divergence_of(task: Task) -> Callable[[Array, Array, Array], Array]:
    """Return the function ``(teacher, student, labels) -> [n]`` that computes the divergence of predictions.

    The divergence is `Task.divergence` or, if the task has none, the Kullback-Leibler divergence of class
    probabilities. If an example has predictions at several positions, only positions with a label count.
    """
    measure = divergence if task.divergence is None else task.divergence
    return lambda teacher, student, y: measure(mask_unlabelled(task, teacher, y), mask_unlabelled(task, student, y))


def mask_unlabelled(task: Task, predictions: Array, y: Array) -> Array:
    """Set predictions at positions without a label (`Task.counted`) to zero, so that all models agree there."""
    if task.counted is None:
        return predictions
    return jnp.where(task.counted(y)[..., None], predictions, 0)


def scale_gradient(psi: Array, mean_divergence: Array, c: Array) -> Array:
    """Derivative ``1/(2 psi) - c f / (2 psi^2)`` with respect to psi of ``log(2 psi) / 2 + c f / (2 psi)``.

    The derivative is zero at ``psi = c f``, where f is the mean divergence and c is a constant factor.
    """
    return 1 / (2 * psi) - c * mean_divergence / (2 * psi**2)


def _reversed(teacher: Array, student: Array) -> Array:
    return divergence(student, teacher)


def _square(teacher: Array, student: Array) -> Array:
    return ((jax.nn.softmax(teacher) - jax.nn.softmax(student)) ** 2).sum(axis=-1)


DISTANCES: Mapping[str, Callable[[Array, Array], Array]] = {
    "kd": divergence,
    "reversed-kd": _reversed,
    "square": _square,
}
"""Choices of the distance f between the teacher's p and the student's q: ``KL(p || q)``, ``KL(q || p)``,
``|p - q|^2``."""


def log_normalizer(weight: Array, teacher: Array) -> Array:
    """Log normalizer ``log int exp(-w KL(p || q)) dq`` over the simplex of class probabilities q, for each example.

    Implements: Ozkara et al. 2023, equation (57).

    Args:
      weight: factor w on the divergence, [].
      teacher: logits of the teacher's class probabilities p, [n, classes].

    Returns:
      The log normalizer of each example, [n]. At w = 0 it is the log volume of the simplex, ``-log (classes - 1)!``.
    """
    log_p = jax.nn.log_softmax(teacher)
    p = jnp.exp(log_p)
    log_beta = gammaln(1 + weight * p).sum(axis=-1) - gammaln(p.shape[-1] + weight)
    return log_beta - weight * (p * log_p).sum(axis=-1)


def prior(
    *,
    psi_init: Scalar = 3.5,
    floor: Scalar = 0.5,
    c: Scalar = 1.0,
    weight_decay: Scalar = 0.0,
    distance: str = "kd",
    exact: bool = False,
    own: PerExample | None = None,
) -> Prior:
    """Make the prior on predictions, whose parameters clients update as in AdaPeD.

    The parameters are the global model mu and the scale psi (`Shared`). After a step on the personal model theta,
    `Prior.descend` takes a step on mu at the new theta, and then a step on psi at the new mu.

    Implements: Ozkara et al. 2023, equation (11).

    Args:
      psi_init: initial psi.
      floor: positive lower bound on psi.
      c: factor on the divergence in psi's step.
      weight_decay: weight decay of mu; ``weight_decay * mu`` is added to mu's gradient.
      distance: a name in `DISTANCES`.
      exact: whether the penalty contains the true log normalizer (`log_normalizer`) instead of ``log(2 psi) / 2``.
      own: divergence that ``kd`` and ``reversed-kd`` use if predictions are not class logits.

    Raises:
      JaxpflError: if the distance is unknown, if ``exact`` is set and the distance is not "kd", or if ``exact`` or
        "square" is used for a task without class probabilities.
    """
    if distance not in DISTANCES:
        raise unknown_name("distance", distance, DISTANCES)
    if exact and distance != "kd":
        raise JaxpflError(f"exact = true requires distance = kd, got {distance}")
    if own is not None and (exact or distance == "square"):
        asked = "exact = true" if exact else "distance = square"
        raise JaxpflError(f"{asked} requires class probabilities, which this task does not predict")
    measure = DISTANCES[distance]
    if own is not None:
        measure = own if distance == "kd" else lambda teacher, student: own(student, teacher)

    def objective(psi: Scalar, teacher: Array, student: Array, on: Examples, c: Scalar = 1.0) -> Array:
        rows = log_normalizer(1 / (2 * psi * on.size), teacher) if exact else None
        normalizer = jnp.log(2 * psi) / 2 if rows is None else on.sum(rows)
        return normalizer + c * on.mean(measure(teacher, student)) / (2 * psi)

    def penalty(gamma: Shared, theta: PyTree, on: Examples | None = None) -> Array:
        on = _needed(on)
        return objective(gamma.psi, on.apply(gamma.mu), on.apply(theta), on)

    def descend(rates: Rates, gamma: Shared, theta: PyTree, on: Examples | None = None) -> Shared:
        on = _needed(on)
        student = on.apply(theta)
        gradient = jax.grad(lambda mu: objective(gamma.psi, on.apply(mu), student, on))(gamma.mu)
        mu = jax.tree.map(
            lambda w, g: w - (rates.location * (g + weight_decay * w)).astype(w.dtype), gamma.mu, gradient
        )
        slope = jax.grad(objective)(gamma.psi, on.apply(mu), student, on, c)
        return project(Shared(mu, gamma.psi - rates.scale * slope))

    def project(gamma: Shared) -> Shared:
        return gamma._replace(psi=jnp.maximum(gamma.psi, floor))

    def init(theta: PyTree) -> Shared:
        return project(Shared(theta, float_array(psi_init)))

    def report(gamma: Shared) -> Metrics:
        return {"psi": gamma.psi}

    return Prior(init, lambda gamma: gamma.mu, penalty, report, descend, project=project)


def _needed(on: Examples | None) -> Examples:
    if on is None:
        raise JaxpflError("the distillation prior requires examples, to compare predictions, got None")
    return on
