r"""Maximum a posteriori (MAP) personalization with a population prior that all clients estimate together.

Client i keeps theta_i and minimizes

.. math:: f_i(\theta_i) - \lambda \log p(\theta_i; \Gamma)

where f_i is the client's negative log likelihood and p(.; Gamma) is the prior with parameters Gamma, which the server
estimates. By default f_i is a SUM over the client's n_i examples (``scaling="sum"``). Each step divides the objective
by n_i, so that learning rates for a mean loss can be used. With ``scaling="mean"``, f_i is the mean loss, as in the
paper's methods for networks, and the prior's weight relative to the loss is n_i times as large. In the paper lambda is
1.

Gamma is estimated in one of two ways. With ``estimate="gradient"``, the client takes a step on its copy of Gamma after
each step on theta, and the server averages the copies. The average is uniform because each client is one draw from the
population. With ``estimate="fit"``, the clients upload theta_i, and the server estimates Gamma from all theta_i of the
cohort.

A step on theta consists of a gradient step on the loss and a proximal step on the penalty -log p (`Prior.prox`). The
proximal step is stable for priors of any width. If the prior has no closed-form proximal step, or the client optimizer
is not plain SGD, the step is a gradient step on loss and penalty instead. (Other optimizers scale the gradient, so
combining them with an unscaled proximal step would change the fixed point.) The gradient step is stable only if ``lr h
< 2``, where h is the penalty's curvature: ``lambda / (n_i s2)`` for a Gaussian with variance s2.

Reference: Ozkara et al. 2023, "A Statistical Framework for Personalized Federated Learning and Estimation",
https://openreview.net/forum?id=FUiDMCr_W4o.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxpfl.algorithms.parts.hyper import SgdHyper, hyper
from jaxpfl.algorithms.parts.local_work import Batch, Descent, LocalWork, gradients, run_steps
from jaxpfl.algorithms.parts.servers import increment
from jaxpfl.core.protocol import (
    Algorithm,
    Client,
    ClientContext,
    Message,
    Reduced,
    Reduction,
    Server,
    ServerContext,
    Stacked,
    Upload,
)
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task
from jaxpfl.priors import Examples, Prior, Rates, distillation, gaussian, laplace
from jaxpfl.support.errors import unknown_name

ESTIMATES, SCALINGS = ("gradient", "fit"), ("sum", "mean")


@struct.dataclass
class MapHyper(SgdHyper):
    """Hyper-parameters of MAP personalization. The default weight decay is zero, because the prior regularizes the
    models.
    """

    weight_decay: Scalar = hyper(0.0, "added to the personal model's gradient as weight_decay * parameters")
    weight: Scalar = hyper(1.0, "lambda, weight of the prior's penalty")
    lr_location: Scalar = hyper(
        0.1, "learning rate of the prior's mean; decays as lr does", high=1.0, is_step=True, decays=True
    )
    lr_scale: Scalar = hyper(
        0.05, "learning rate of the prior's scale, if gradient steps update it; not decayed", high=1.0, is_step=True
    )
    scale_init: Scalar = hyper(0.1, "initial scale of the prior (a Gaussian's variance)", positive=True)
    scale_floor: Scalar = hyper(0.01, "smallest scale of the prior", positive=True)


@struct.dataclass
class LaplaceHyper(MapHyper):
    """Hyper-parameters of MAP personalization with a Laplace prior.

    The default ``scale_floor`` performed best on held-out examples of three data sets (``benchmarks/defaults.py``).
    With a floor of 0.01, most parameters stay equal to the center's parameters, and the center changes slowly.
    """

    scale_floor: Scalar = hyper(0.3, "smallest scale of the prior", positive=True)
    scale_init: Scalar = hyper(0.3, "initial scale of the prior", positive=True)


@struct.dataclass
class MixtureHyper(MapHyper):
    """Hyper-parameters of MAP personalization with a Gaussian mixture.

    The default ``scale_floor`` performed best on held-out examples of three data sets (``benchmarks/defaults.py``).
    """

    scale_floor: Scalar = hyper(0.1, "smallest variance of a component", positive=True)


def map_gaussian(task: Task, work: LocalWork, *, estimate: str = "gradient", scaling: str = "sum") -> Algorithm:
    """MAP personalization with a Gaussian prior: L2 regularization toward a learned mean mu, with a learned variance.

    The personalized model is the client's own theta_i. The global model is mu.

    Args:
      task, work: task and local work, as in `map_personalization`, which raises the same errors.
      estimate: estimator of the prior: "gradient" for averaged gradient steps of the clients, or "fit" for a fit to the
        uploaded models.
      scaling: definition of a client's loss f_i: the "sum" of its examples' losses, or their "mean".
    """

    def prior(hp: MapHyper) -> Prior:
        return gaussian.prior(s2_init=hp.scale_init, floor=hp.scale_floor)

    return map_personalization(task, work, prior=prior, estimate=estimate, scaling=scaling)


def map_laplace(task: Task, work: LocalWork, *, estimate: str = "gradient", scaling: str = "sum") -> Algorithm:
    """MAP personalization with a Laplace prior: L1 regularization toward a learned median mu, with a learned scale.

    The personalized model is the client's own theta_i. The global model is mu.

    Args:
      task, work: task and local work, as in `map_personalization`, which raises the same errors.
      estimate: estimator of the prior: "gradient" for averaged gradient steps of the clients, or "fit" for a fit to the
        uploaded models.
      scaling: definition of a client's loss f_i: the "sum" of its examples' losses, or their "mean".
    """

    def prior(hp: MapHyper) -> Prior:
        return laplace.prior(b_init=hp.scale_init, floor=hp.scale_floor)

    return map_personalization(task, work, prior=prior, estimate=estimate, scaling=scaling)


def map_personalization(
    task: Task,
    work: LocalWork,
    *,
    prior: Callable[[Any], Prior],
    estimate: str = "gradient",
    scaling: str = "sum",
    each: int = 1,
) -> Algorithm:
    """MAP personalization with any prior.

    The personalized model is the client's own theta_i. The global model is the prior's center.

    Implements: Ozkara et al. 2023, equation (9).

    Args:
      task: the model and its loss, a negative log likelihood of one example.
      work: the local work in a round.
      prior: function that makes the prior from the hyper-parameters, which are a `MapHyper`, possibly with further
        fields.
      estimate: estimator of the prior: "gradient" averages the clients' results of ``Prior.descend``, and "fit" applies
        ``Prior.fit`` to the uploaded models.
      scaling: definition of a client's loss f_i: the "sum" of its examples' losses, or their "mean".
      each: number of gradients that a step computes: one for theta, and one more if ``Prior.descend`` also
        differentiates a model (see `Gradients`).

    Raises:
      JaxpflError: if the estimator or the scaling is unknown.
    """
    for kind, value, known in (("estimate", estimate, ESTIMATES), ("scaling", scaling, SCALINGS)):
        if value not in known:
            raise unknown_name(kind, value, known)
    client = _client(task, work, prior, estimate, scaling, each)
    reduction = Reduction.STACK if estimate == "fit" else Reduction.SUM
    return Algorithm((client,), _server(task, prior), work.steps, reduction)


def _client(
    task: Task, work: LocalWork, make: Callable[[Any], Prior], estimate: str, scaling: str, each: int
) -> Client:
    def update(
        key: Key, hp: MapHyper, ctx: ClientContext, message: Message, theta: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        prior, received, decay = make(hp), message.shared, hp.decay(ctx.round, work.steps)
        rate, proximal = hp.lr * decay, prior.prox if work.optimizer == "sgd" else None
        optimizer = work.descent(rate, hp.weight_decay)
        rates = Rates(hp.lr_location * decay, hp.lr_scale)
        weight = hp.weight / jnp.maximum(splits.train.size, 1) if scaling == "sum" else hp.weight
        descend = prior.descend if estimate == "gradient" else None

        def step(key: Key, carry: tuple[Descent, PyTree], batch: Batch) -> tuple[tuple[Descent, PyTree], Metrics]:
            theta, gamma = carry

            def predicted(params: PyTree) -> Array:
                return distillation.mask_unlabelled(
                    task, task.model.apply(params, batch.x, key=key, train=True), batch.y
                )

            on = Examples(predicted, batch.valid)

            def objective(params: PyTree) -> tuple[Array, tuple[Array, Array]]:
                logits = on.apply(params)
                # A penalty on predictions reuses the predictions of the loss, so that one backward pass suffices.
                seen = on._replace(apply=lambda other: logits if other is params else on.apply(other))
                loss, penalty = batch.mean(task.loss(logits, batch.y)), prior.penalty(gamma, params, seen)
                return loss if proximal is not None else loss + weight * penalty, (loss, penalty)

            gradient, (loss, penalty) = jax.grad(objective, has_aux=True)(theta.params)
            theta = theta.step(optimizer, gradient)
            if proximal is not None:
                theta = theta.replace_params(proximal(rate * weight, gamma, theta.params))
            if descend is not None:
                gamma = descend(rates, gamma, theta.params, on)
            return (theta, gamma), {"train_loss": loss, "penalty": penalty}

        start = (Descent.start(optimizer, theta), received)
        (end, gamma), metrics = run_steps(work, key, ctx, splits.train, step, start, metrics=("train_loss", "penalty"))
        new, old = (gamma, received) if estimate == "gradient" else (end.params, prior.center(received))
        return end.params, increment(new, old), metrics

    return Client(
        init=lambda key, hp, ctx, message: make(hp).center(message.shared),
        update=update,
        personalize=lambda key, hp, ctx, message, theta, splits: theta,
        predict=lambda hp, theta, x: task.model.apply(theta, x),
        gradients=gradients(work.steps, each=each),
    )


def _server(task: Task, make: Callable[[Any], Prior]) -> Server:
    def update(
        key: Key, hp: MapHyper, ctx: ServerContext, gamma: PyTree, uploads: Reduced | Stacked
    ) -> tuple[PyTree, Metrics]:
        prior = make(hp)
        if isinstance(uploads, Stacked):
            assert prior.fit is not None
            thetas = jax.tree.map(jnp.add, prior.center(gamma), uploads.total)
            gamma = prior.fit(gamma, thetas, uploads.valid)
        else:
            # The mean of scales above the floor is above the floor, but noise from privacy or compression can lower it.
            gamma = prior.project(optax.apply_updates(gamma, uploads.mean()))
        return gamma, prior.report(gamma)

    return Server(
        init=lambda key, hp, ctx: make(hp).init(task.init(key)),
        broadcast=lambda key, hp, ctx, gamma: Message(gamma),
        update=update,
        predict_global=lambda hp, gamma, x: task.model.apply(make(hp).center(gamma), x),
    )
