r"""FedAvg, FedAvg with fine-tuning (FedAvg+) and FedProx: one global model mu by averaging local training.

Client i of the cohort S, with n_i training examples, trains w_i from mu; then

.. math:: \mu \leftarrow \mu + \frac{\sum_{i \in S} n_i (w_i - \mu)}{\sum_{i \in S} n_i}

FedProx averages uniformly. A server optimizer takes minus the mean model update for a gradient
(`parts.server_optimizer`).

References: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data",
https://arxiv.org/abs/1602.05629; Li et al. 2020, "Federated Optimization in Heterogeneous Networks",
https://arxiv.org/abs/1812.06127.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from jaxpfl.algorithms.parts.averaging import averaging_server, increment
from jaxpfl.algorithms.parts.hyper import AveragingHyper, SgdHyper, hyper
from jaxpfl.algorithms.parts.local_work import LocalWork, gradients, sgd
from jaxpfl.algorithms.parts.server_optimizer import with_server_optimizer
from jaxpfl.errors import JaxpflError
from jaxpfl.models import Task
from jaxpfl.protocol import Algorithm, Client, ClientContext, Message, Upload
from jaxpfl.types import Key, Metrics, PyTree, Scalar, Splits


@struct.dataclass
class FedProxHyper(AveragingHyper):
    """Hyper-parameters of FedProx."""

    prox: Scalar = hyper(0.1, "weight of the proximal term (prox/2) |w - mu|^2")


def fedavg(task: Task, work: LocalWork) -> Algorithm:
    """FedAvg: tau local SGD steps from mu, then the mean weighted by the numbers of training examples.

    Models: personalised mu (there is no other); global mu.

    Implements: Divi et al. 2021, equation (4).
    """
    return _averaging(task, work)


def fedavg_ft(task: Task, work: LocalWork, *, fine_tune_steps: int = 60) -> Algorithm:
    """FedAvg+: FedAvg, then ``fine_tune_steps`` SGD steps from mu by each client before it predicts.

    The steps use the learning rate of the last round.
    Models: personalised, mu after the client's own steps; global mu.

    Args:
      task: any model.
      work: the local work in a round.
      fine_tune_steps: local steps of personalisation.

    Raises:
      JaxpflError: for a negative number of steps.
    """
    if fine_tune_steps < 0:
        raise JaxpflError(f"fedavg-ft.fine_tune_steps must be >= 0, got {fine_tune_steps}")
    return _averaging(task, work, fine_tune_steps=fine_tune_steps)


def fedprox(task: Task, work: LocalWork) -> Algorithm:
    """FedProx: local steps on ``f_i(w) + (prox/2) |w - mu|^2`` with mu fixed in the round, then the uniform mean.

    Models: personalised mu; global mu.
    """
    return _averaging(task, work, proximal=True)


def _averaging(task: Task, work: LocalWork, *, fine_tune_steps: int = 0, proximal: bool = False) -> Algorithm:
    def update(
        key: Key, hp: SgdHyper, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        mu = message.shared
        w, metrics = sgd(
            work,
            task,
            key,
            ctx,
            splits.train,
            mu,
            rate=hp.lr * hp.decay(ctx.round, work.steps),
            weight_decay=hp.weight_decay,
            anchor=mu if proximal else None,
            prox=hp.prox if isinstance(hp, FedProxHyper) else 0.0,
            uploaded=True,
        )
        # FedAvg weighs clients by their examples; FedProx's analysis is of the uniform mean.
        return state, increment(w, mu, None if proximal else work.weight(splits.train)), metrics

    def personalize(
        key: Key, hp: SgdHyper, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> PyTree:
        mu = message.shared
        if fine_tune_steps == 0:
            return mu
        rate = hp.lr * hp.decay(jnp.maximum(ctx.round - 1, 0), work.steps)
        w, _ = sgd(
            work,
            task,
            key,
            ctx,
            splits.train,
            mu,
            rate=rate,
            weight_decay=hp.weight_decay,
            steps=fine_tune_steps,
        )
        return w

    client = Client(
        init=lambda key, hp, ctx, message: (),
        update=update,
        personalize=personalize,
        predict=lambda hp, w, x: task.model.apply(w, x),
        gradients=gradients(work.steps, personalize=fine_tune_steps),
    )
    return with_server_optimizer(Algorithm((client,), averaging_server(task), work.steps), work.server_optimizer)
