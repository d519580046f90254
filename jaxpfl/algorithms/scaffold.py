r"""SCAFFOLD: a global model by FedAvg with control variates, which correct client drift.

The server keeps the model x and the control variate c. Client i keeps its variate c_i. All variates start at zero. A
client takes tau local steps on its loss f_i at the rate eta, starting from y = x, and then updates its variate (the
paper's option II):

.. math::
   y &\leftarrow y - \eta [ \nabla f_i(y) - c_i + c ], \\
   c_i^+ &= c_i - c + \frac{x - y}{\tau \eta} = \frac{1}{\tau} \sum_t \nabla f_i(y_t)

Under plain SGD, option II gives the mean of the client's gradients. This module uses this mean for any client optimizer
and number of steps. The server averages uniformly over the cohort S of the m clients,

.. math:: x \leftarrow x + \eta_g \operatorname{mean}_S (y - x), \qquad
   c \leftarrow c + \frac{|S|}{m} \operatorname{mean}_S (c_i^+ - c_i)

so c equals the mean of c_i over all m clients, unless a client drops out after it has updated c_i. eta_g is
``server_lr``. A server optimizer changes x only. Weight decay is part of the gradients, and therefore of the variates.

Reference: Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
https://arxiv.org/abs/1910.06378.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxpfl.algorithms.parts.hyper import AveragingHyper, hyper
from jaxpfl.algorithms.parts.local_work import Batch, Descent, LocalWork, gradients, loss_gradient, run_steps
from jaxpfl.algorithms.parts.servers import increment, share_of_all, with_server_optimizer
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Reduced, Server, ServerContext, Upload
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task


@struct.dataclass
class ScaffoldHyper(AveragingHyper):
    """Hyper-parameters of SCAFFOLD.

    The default learning rate is a fifth of FedAvg's. Unlike a client's gradient, the correction c - c_i does not shrink
    within a round. The steps must therefore be short if the loss is strongly curved or the cohort is small. On MNIST
    with three classes per client and a tenth of the clients in a round, ten steps with rate 0.03 diverge. On digits and
    CIFAR-10 a rate of 0.05 is better. The default was the best on these three data sets together
    (``benchmarks/defaults.py``).
    """

    lr: Scalar = hyper(0.02, "learning rate of the local steps", positive=True, is_rate=True)


class Controlled(NamedTuple):
    """State and message of the server: the model, and the mean of the clients' control variates."""

    model: PyTree
    variate: PyTree


class Path(NamedTuple):
    """State of a client's local steps: the model, the sum of its gradients, and the gradient count, []."""

    at: Descent
    gradients: PyTree
    steps: Array


def scaffold(task: Task, work: LocalWork) -> Algorithm:
    """SCAFFOLD (option II): FedAvg with control variates, which correct client drift.

    The global model is x, which is also every client's personalized model.
    """
    loss = loss_gradient(task)

    def update(
        key: Key, hp: ScaffoldHyper, ctx: ClientContext, message: Message, own: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        received: Controlled = message.shared
        optimizer = work.descent(hp.lr * hp.decay(ctx.round, work.steps), 0.0)
        correction = optax.tree.sub(received.variate, own)

        def step(key: Key, path: Path, batch: Batch) -> tuple[Path, Metrics]:
            value, gradient = loss(path.at.params, key, batch)
            gradient = jax.tree.map(lambda g, w: g + hp.weight_decay * w, gradient, path.at.params)
            at = path.at.step(optimizer, optax.tree.add(gradient, correction))
            return Path(at, optax.tree.add(path.gradients, gradient), path.steps + 1), {"train_loss": value}

        start = Path(Descent.start(optimizer, received.model), optax.tree.zeros_like(own), jnp.zeros(()))
        end, metrics = run_steps(work, key, ctx, splits.train, step, start, metrics=("train_loss",))
        variate = optax.tree.scale(1 / jnp.maximum(end.steps, 1), end.gradients)
        return variate, increment(Controlled(end.at.params, variate), received._replace(variate=own)), metrics

    def server_init(key: Key, hp: ScaffoldHyper, ctx: ServerContext) -> Controlled:
        model = task.init(key)
        return Controlled(model, optax.tree.zeros_like(model))

    def server_update(
        key: Key, hp: ScaffoldHyper, ctx: ServerContext, state: Controlled, reduced: Reduced
    ) -> tuple[Controlled, Metrics]:
        change: Controlled = reduced.mean()
        share = share_of_all(reduced, ctx)
        return Controlled(
            optax.apply_updates(state.model, change.model),
            optax.apply_updates(state.variate, optax.tree.scale(share, change.variate)),
        ), {}

    client = Client(
        init=lambda key, hp, ctx, message: optax.tree.zeros_like(message.shared.model),
        update=update,
        personalize=lambda key, hp, ctx, message, own, splits: message.shared.model,
        predict=lambda hp, x, inputs: task.model.apply(x, inputs),
        gradients=gradients(work.steps),
    )
    server = Server(
        init=server_init,
        broadcast=lambda key, hp, ctx, state: Message(state),
        update=server_update,
        predict_global=lambda hp, state, inputs: task.model.apply(state.model, inputs),
    )
    algorithm = Algorithm((client,), server, work.steps)
    acts_on = Controlled(model=True, variate=False)
    return with_server_optimizer(algorithm, work.server_optimizer, acts_on=acts_on)
