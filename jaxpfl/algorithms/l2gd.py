r"""L2GD: loopless local gradient descent. Each round is, at random, either local training or aggregation.

The objective is :math:`\frac1m \sum_i f_i(\theta_i) + \frac{\lambda}{2m} \sum_i |\theta_i - \bar\theta|^2`, where
:math:`\bar\theta` is the mean of the m personal models, and f_i the loss of client i. The paper's algorithm consists of
iterations with rate eta. In an iteration, all clients take the first of the following steps (aggregation) with
probability p, and otherwise all clients take the second (a local step):

.. math::
   \theta_i &\leftarrow \theta_i - \frac{\eta \lambda}{m p} (\theta_i - \bar\theta), \\
   \theta_i &\leftarrow \theta_i - \frac{\eta}{m (1 - p)} \nabla f_i(\theta_i)

``lr`` is eta / m, the rate of one client. In this implementation, a round is either one aggregation step, with
probability q, or tau local steps (fewer for a straggler). The probability q is chosen so that aggregations are the
fraction p of all iterations:

.. math:: q = \frac{p \tau}{1 - p + p \tau}, \qquad \text{q = p for } \tau = 1

For any tau, there are thus on average (1 - p) / p local steps for each aggregation, and the objective is the same. The
server draws which of the two a round is, and tells the cohort.

The server keeps the mean of ALL clients' models. A client uploads its model update, and the server adds |S| / m times
the mean update of the cohort S. Even under partial participation, the result is therefore the mean of all clients'
models, unless clients drop out. In the paper, clients communicate only when an aggregation follows local steps. Here
they communicate in every round, so the counted bytes are an upper bound on the bytes in the paper. Weight decay is
added to the gradients of f_i.

Reference: Hanzely and Richtarik 2020, "Federated Learning of a Mixture of Global and Local Models",
https://arxiv.org/abs/2002.05516.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxpfl.algorithms.parts.hyper import SgdHyper, hyper
from jaxpfl.algorithms.parts.local_work import Batch, LocalWork, batch_loss, run_steps, sgd, steps_within
from jaxpfl.algorithms.parts.servers import increment, share_of_all
from jaxpfl.core.protocol import (
    Algorithm,
    Client,
    ClientContext,
    Gradients,
    Message,
    Reduced,
    Server,
    ServerContext,
    Upload,
)
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task
from jaxpfl.support.errors import JaxpflError


@struct.dataclass
class L2GDHyper(SgdHyper):
    """Hyper-parameters of L2GD; ``lr`` is the paper's eta / m.

    An aggregation step reduces a model's distance to the mean by the fraction ``lr lam / p``. With a fraction of 1 the
    model becomes the mean; with a fraction above 2 the models diverge. The defaults of lambda and p were the best on
    held-out examples of three data sets (``benchmarks/defaults.py``). With a larger p, few rounds remain for local
    training.
    """

    lam: Scalar = hyper(0.1, "lambda, weight of the pull to the mean of the personal models")
    p: Scalar = hyper(0.02, "fraction of the iterations that are aggregations", low=1e-3, high=0.999)


class Toss(NamedTuple):
    """The server's message: the mean of all personal models, and whether the round aggregates, [] bool."""

    mean: PyTree
    aggregate: Array


def probability(p: Scalar, local_steps: int) -> Scalar:
    """Compute the probability q that a round is an aggregation instead of ``local_steps`` local steps."""
    return p * local_steps / (1 - p + p * local_steps)


def l2gd(task: Task, work: LocalWork) -> Algorithm:
    """L2GD: personal models; each round either trains them or moves them toward their mean, chosen at random.

    The personalized model is the client's own theta_i. The global model is the mean of all theta_i.

    The client optimizer takes the local steps. There is no server optimizer, because the server only tracks the mean.
    New clients start from the mean and take local steps in all their rounds.

    Raises:
      JaxpflError: if local work is in epochs, or clients keep their optimizer states.
    """
    if work.epochs is not None:
        raise JaxpflError("l2gd requires equally many steps of all clients: set local_steps, not local_epochs")
    if work.keeps_optimizer:
        raise JaxpflError("l2gd does not support keep_optimizer: its aggregation rounds take no optimizer steps")
    loss = batch_loss(task)

    def update(
        key: Key, hp: L2GDHyper, ctx: ClientContext, message: Message, theta: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        received: Toss = message.shared
        rate = hp.lr * hp.decay(ctx.round, work.steps)

        def aggregation() -> tuple[PyTree, Metrics]:
            def measure(key: Key, carry: tuple[()], batch: Batch) -> tuple[tuple[()], Metrics]:
                return carry, {"train_loss": loss(theta, key, batch)}

            # The loss on one mini-batch is computed only so that every round reports a training loss.
            _, metrics = run_steps(work, key, ctx, splits.train, measure, (), metrics=("train_loss",), steps=1)
            pull = rate * hp.lam / hp.p
            return jax.tree.map(lambda t, mean: t - pull * (t - mean), theta, received.mean), metrics

        def local_steps() -> tuple[PyTree, Metrics]:
            given = (work, task, key, ctx, splits.train)
            return sgd(*given, theta, rate=rate / (1 - hp.p), weight_decay=hp.weight_decay)

        new, metrics = jax.lax.cond(received.aggregate, aggregation, local_steps)
        return new, increment(new, theta), metrics

    def broadcast(key: Key, hp: L2GDHyper, ctx: ServerContext, mean: PyTree) -> Message:
        return Message(Toss(mean, jax.random.uniform(key, (), jnp.float32) < probability(hp.p, work.steps)))

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
        gradients=Gradients(
            lambda limit, message: jnp.where(message.shared.aggregate, 0, steps_within(work.steps, limit))
        ),
    )
    server = Server(
        init=lambda key, hp, ctx: task.init(key),
        broadcast=broadcast,
        update=server_update,
        # A new client uses one message in all its rounds. If the kind of the round in this message were random, the
        # client might never take a local step.
        welcome=lambda key, hp, ctx, mean: Message(Toss(mean, jnp.array(False))),
        predict_global=lambda hp, mean, x: task.model.apply(mean, x),
    )
    return Algorithm((client,), server, work.steps)
