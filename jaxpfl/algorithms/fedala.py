r"""FedALA: each client starts a round from a mixture of the global model and its own model, with learned weights.

Client i keeps its model theta_i and a weight W_i in [0, 1] for each parameter of the head, initially 1. In a round the
client mixes the head of the global model theta with its own head, and uses the body of the global model unchanged. The
client learns the weights on mini-batches by the steps

.. math:: \hat\theta_i = \theta_i + (\theta - \theta_i) \odot W_i, \qquad
   W_i \leftarrow \operatorname{clip}_{[0, 1]} ( W_i - \eta_w (\theta - \theta_i) \odot \nabla f_i(\hat\theta_i) )

where f_i is the client's loss and eta_w the learning rate of the weights. Then the client takes tau local steps from
the mixture. The result is the new theta_i, and the client uploads theta_i - theta. The server's mean is weighted by the
numbers of examples.

The paper learns the weights until convergence in a client's first round, and for one pass over 80 % of its examples in
later rounds. Here every round has ``weight_steps`` steps on the weights. If tau is equal to ``weight_steps``, the local
steps use the same mini-batches. A client's own model is its model at the end of its last round in the cohort. Before a
client's first round, its own model is the global model of round 0, so the mixture in round 0 is the global model.

The method performs poorly with small cohorts. A client's own head is then many rounds old, and does not fit the global
body, which has changed meanwhile.

Reference: Zhang et al. 2023, "FedALA: Adaptive Local Aggregation for Personalized Federated Learning",
https://arxiv.org/abs/2212.01197.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxpfl.algorithms.parts.hyper import AveragingHyper, hyper
from jaxpfl.algorithms.parts.local_work import Batch, LocalWork, batch_loss, run_steps, sgd, steps_within
from jaxpfl.algorithms.parts.servers import averaging_server, increment, with_server_optimizer
from jaxpfl.algorithms.parts.split_models import head_and_body
from jaxpfl.core import trees
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Gradients, Message, Upload
from jaxpfl.core.types import ClientData, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task
from jaxpfl.support.errors import JaxpflError


@struct.dataclass
class FedALAHyper(AveragingHyper):
    """Hyper-parameters of FedALA."""

    lr_weights: Scalar = hyper(1.0, "learning rate of the mixture's weights", positive=True, is_step=True)


class Own(NamedTuple):
    """Client state: the head of the client's last model, initially the global head of round 0, and the weights W_i."""

    head: PyTree
    weights: PyTree


def fedala(task: Task, work: LocalWork, *, weight_steps: int = 10) -> Algorithm:
    """FedALA: FedAvg in which each client starts from a learned mixture of the global head and its own head.

    The personalized model is this mixture, with weights W_i that are learned for the current global model. The global
    model is theta.

    Args:
      task: task whose model is split into body and head.
      work: the local work in a round.
      weight_steps: number of steps on the weights W_i, before the local steps and in personalization; at least 1.

    Raises:
      JaxpflError: if the model has no head or no body, or ``weight_steps`` is below one.
    """
    if weight_steps < 1:
        raise JaxpflError(f"fedala.weight_steps must be >= 1, got {weight_steps}")
    split = head_and_body("fedala", task)
    loss = batch_loss(task)

    def mixed(
        key: Key, hp: FedALAHyper, ctx: ClientContext, theta: PyTree, own: Own, data: ClientData
    ) -> tuple[PyTree, PyTree]:
        """Learn the weights W_i of the mixture, and return the mixed model and the weights."""
        head, body = split(theta)
        away = jax.tree.map(jnp.subtract, head, own.head)

        def mixture(weights: PyTree) -> PyTree:
            return jax.tree.map(lambda mine, d, w: mine + d * w, own.head, away, weights)

        def step(key: Key, weights: PyTree, batch: Batch) -> tuple[PyTree, Metrics]:
            gradient = jax.grad(lambda part: loss(trees.merge(part, body), key, batch))(mixture(weights))

            def next_weight(w: jax.Array, d: jax.Array, g: jax.Array) -> jax.Array:
                return jnp.clip(w - hp.lr_weights * d * g, 0, 1)

            return jax.tree.map(next_weight, weights, away, gradient), {}

        weights, _ = run_steps(work, key, ctx, data, step, own.weights, metrics=(), steps=weight_steps)
        return trees.merge(mixture(weights), body), weights

    def update(
        key: Key, hp: FedALAHyper, ctx: ClientContext, message: Message, own: Own, splits: Splits
    ) -> tuple[Own, Upload, Metrics]:
        theta, rate = message.shared, hp.lr * hp.decay(ctx.round, work.steps)
        start, weights = mixed(key, hp, ctx, theta, own, splits.train)
        new, metrics = sgd(work, task, key, ctx, splits.train, start, rate=rate, weight_decay=hp.weight_decay)
        return Own(split(new)[0], weights), increment(new, theta, work.weight(splits.train)), metrics

    def init(key: Key, hp: FedALAHyper, ctx: ClientContext, message: Message) -> Own:
        head = split(message.shared)[0]
        return Own(head, jax.tree.map(jnp.ones_like, head))

    client = Client(
        init=init,
        update=update,
        personalize=lambda key, hp, ctx, message, own, splits: mixed(key, hp, ctx, message.shared, own, splits.train)[
            0
        ],
        predict=lambda hp, params, x: task.model.apply(params, x),
        gradients=Gradients(
            lambda limit, message: steps_within(weight_steps, limit) + steps_within(work.steps, limit),
            personalize=weight_steps,
        ),
    )
    return with_server_optimizer(Algorithm((client,), averaging_server(task), work.steps), work.server_optimizer)
