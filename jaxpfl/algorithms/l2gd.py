r"""L2GD: loopless gradient descent for personal models that are pulled to their mean, by the toss of a common coin.

It minimises :math:`\frac1m \sum_i f_i(\theta_i) + \frac{\lambda}{2m} \sum_i |\theta_i - \bar\theta|^2`, with
:math:`\bar\theta` the mean of all personal models. In an iteration either all clients aggregate, with probability p, or
all take a local step:

.. math::
   \theta_i &\leftarrow \theta_i - \frac{\eta \lambda}{m p} (\theta_i - \bar\theta), \\
   \theta_i &\leftarrow \theta_i - \frac{\eta}{m (1 - p)} \nabla f_i(\theta_i)

``lr`` is eta / m, the rate of one client. A round is one toss: one aggregation step, or tau local steps (fewer for a
straggler). Its probability is such that p is what it is above, the share of aggregations among all iterations:

.. math:: q = \frac{p \tau}{1 - p + p \tau}, \qquad \text{q = p for } \tau = 1

so there are (1 - p) / p local steps for each aggregation whatever tau is, and the objective is the same. The server
tosses the coin as it broadcasts: whoever is in the cohort does the same.

The server keeps the mean of ALL clients' models: a client uploads by how much its model has moved, and the server adds
|S| / m of the cohort's mean move, so that the mean is exact where only a few take part. (A client that drops out has
moved without the server's knowing.) The paper sends models only where an aggregation follows local steps; here every
round is an exchange, and the bytes counted are an upper bound.

Weight decay is added to the gradients of the data.

Reference: Hanzely and Richtarik 2020, "Federated Learning of a Mixture of Global and Local Models".
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxpfl.algorithms.parts.averaging import increment, share_of_all
from jaxpfl.algorithms.parts.hyper import SgdHyper, hyper
from jaxpfl.algorithms.parts.local_work import Batch, LocalWork, batch_loss, run_steps, sgd, taken
from jaxpfl.models import Task
from jaxpfl.protocol import Algorithm, Client, ClientContext, Gradients, Message, Reduced, Server, ServerContext, Upload
from jaxpfl.types import Array, Key, Metrics, PyTree, Scalar, Splits


@struct.dataclass
class L2GDHyper(SgdHyper):
    """L2GD's hyper-parameters; ``lr`` is the paper's eta / m. An aggregation step moves a client by the share
    ``lr lam / p`` of its way to the mean: 1 is at the mean, above 2 the clients are thrown apart. lambda and p are the
    best on examples set apart of three data sets (``benchmarks/defaults.py``): with more frequent aggregations a client
    spends its rounds on being averaged."""

    lam: Scalar = hyper(0.1, "lambda, weight of the pull to the mean of the personal models")
    p: Scalar = hyper(0.02, "share of aggregations among all iterations", low=1e-3, high=0.999)


class Toss(NamedTuple):
    """What the server sends: the mean of all personal models, and whether this round aggregates, [] bool."""

    mean: PyTree
    aggregate: Array


def probability(p: Scalar, local_steps: int) -> Scalar:
    """q, the probability that a round aggregates, where its alternative is so many local steps."""
    return p * local_steps / (1 - p + p * local_steps)


def l2gd(task: Task, work: LocalWork) -> Algorithm:
    """L2GD. Models: personalised theta_i, the client's own; global, the mean of all theta_i.

    The clients' optimiser makes the local steps. There is nothing for a server optimiser to do: the server only keeps
    account of the mean. A client that was never trained starts from the mean and takes local steps in all its rounds.
    """
    loss = batch_loss(task)

    def update(
        key: Key, hp: L2GDHyper, ctx: ClientContext, message: Message, theta: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        received: Toss = message.shared
        rate = hp.lr * hp.decay(ctx.round, work.steps)

        def aggregation() -> tuple[PyTree, Metrics]:
            def measure(key: Key, carry: tuple[()], batch: Batch) -> tuple[tuple[()], Metrics]:
                return carry, {"train_loss": loss(theta, key, batch)}

            # One mini-batch is looked at, so that every round has a loss to show.
            _, metrics = run_steps(work, key, ctx, splits.train, measure, (), metrics=("train_loss",), steps=1)
            pull = rate * hp.lam / hp.p
            return jax.tree.map(lambda t, mean: t - pull * (t - mean), theta, received.mean), metrics

        def local_steps() -> tuple[PyTree, Metrics]:
            given = (work, task, key, ctx, splits.train)
            return sgd(*given, theta, rate=rate / (1 - hp.p), weight_decay=hp.weight_decay)

        new, metrics = jax.lax.cond(received.aggregate, aggregation, local_steps)
        return new, increment(new, theta), metrics

    def broadcast(key: Key, hp: L2GDHyper, ctx: ServerContext, mean: PyTree) -> Message:
        return Message(Toss(mean, jax.random.bernoulli(key, probability(hp.p, work.steps))))

    def server_update(
        key: Key, hp: L2GDHyper, ctx: ServerContext, mean: PyTree, reduced: Reduced
    ) -> tuple[PyTree, Metrics]:
        change = optax.tree.scale(share_of_all(reduced, ctx), reduced.mean())
        return optax.apply_updates(mean, change), {}

    client = Client(
        init=lambda key, hp, ctx, message: message.shared.mean,
        update=update,
        personalize=lambda key, hp, ctx, message, theta, splits: theta,
        predict=lambda hp, theta, x: task.model.apply(theta, x),
        gradients=Gradients(lambda limit, message: jnp.where(message.shared.aggregate, 0, taken(work.steps, limit))),
    )
    server = Server(
        init=lambda key, hp, ctx: task.init(key),
        broadcast=broadcast,
        update=server_update,
        # One toss for all rounds of a newcomer's would have it never take a step, or never be drawn to the mean.
        welcome=lambda key, hp, ctx, mean: Message(Toss(mean, jnp.array(False))),
        predict_global=lambda hp, mean, x: task.model.apply(mean, x),
    )
    return Algorithm((client,), server, work.steps)
