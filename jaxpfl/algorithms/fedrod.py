r"""FedROD: a generic model for balanced classes, and an additional personal head for each client.

Client i has n_ic training examples of class c. The generic model consists of a body phi and a head h, and has the
logits g(x) for an input x. It is trained with the balanced softmax loss, and the server averages it. The personal head
v_i of client i takes the output of phi as input, and has the logits v_i(x). It corrects g for the client's own classes,
and stays with the client. A step updates (phi, h) and v_i with two separate gradients:

.. math::
   (\phi, h) &\leftarrow (\phi, h) - \eta \nabla \operatorname{CE}(g(x) + \log n_i, y), \\
   v_i &\leftarrow v_i - \eta \nabla_v \operatorname{CE}(g(x) + v_i(x), y)

where log n_i is the vector of the log n_ic. In the second line, g and phi have the values from before the step and are
treated as constants. Classes without examples at the client are left out of the first softmax. The server adds the mean
change of (phi, h), weighted by the clients' numbers of examples, to its generic model.

The method performs poorly with few examples, because the balanced loss uses part of the generic model's capacity for
classes that a client does not have.

Reference: Chen and Chao 2022, "On Bridging Generic and Personalized Federated Learning for Image Classification",
https://arxiv.org/abs/2107.00778. This module has the paper's linear personal heads, and not its hypernetwork.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.algorithms.parts import class_means
from jaxpfl.algorithms.parts.hyper import AveragingHyper
from jaxpfl.algorithms.parts.local_work import Batch, Descent, LocalWork, gradients, run_steps
from jaxpfl.algorithms.parts.servers import averaging_server, increment, with_server_optimizer
from jaxpfl.algorithms.parts.split_models import head_and_body
from jaxpfl.core import trees
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Upload
from jaxpfl.core.types import Array, ClientData, Key, Metrics, PyTree, Splits
from jaxpfl.models import Task
from jaxpfl.support.errors import JaxpflError

_NO_EXAMPLE = 1e-30
"""Count that replaces zero examples of a class: the class's probability vanishes, but its log count stays finite, as
label smoothing requires."""


class Personal(NamedTuple):
    """Personalized model: the generic model and the client's own head."""

    generic: PyTree
    head: PyTree


def fedrod(task: Task, work: LocalWork) -> Algorithm:
    """FedROD: a global model trained for balanced classes, and a personal head that adapts it to a client's classes.

    The global model is the generic model, with logits g(x). The personalized model adds the logits v_i(x) of client i's
    personal head to g(x). Personal heads are initialized with zero, so a new client predicts with the generic model.

    Args:
      task: a classification task, whose model is split into body and head.
      work: the local work in a round.

    Raises:
      JaxpflError: if the task has no classes, or the model has no head or no body.
    """
    if not task.has_classes:
        raise JaxpflError(f"fedrod balances classes by their counts, but the task {task.kind!r} has no classes")
    split = head_and_body("fedrod", task)

    def log_counts(data: ClientData) -> Array:
        """Logarithm of each class's number of training examples, for K classes, [K]."""
        return jnp.log(jnp.maximum(class_means.counts(task.num_classes, data), _NO_EXAMPLE))

    def predict(hp: AveragingHyper, personal: Personal, x: PyTree) -> Array:
        _, body = split(personal.generic)
        return task.model.apply(personal.generic, x) + task.model.apply(trees.merge(personal.head, body), x)

    def update(
        key: Key, hp: AveragingHyper, ctx: ClientContext, message: Message, own: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        optimizer = work.descent(hp.lr * hp.decay(ctx.round, work.steps), hp.weight_decay)
        prior = log_counts(splits.train)

        def step(key: Key, at: tuple[Descent, Descent], batch: Batch) -> tuple[tuple[Descent, Descent], Metrics]:
            generic, head = at

            def generic_loss(params: PyTree) -> tuple[Array, Array]:
                logits = task.model.apply(params, batch.x, key=key, train=True)
                return batch.mean(task.loss(logits + prior, batch.y)), logits

            def head_loss(params: PyTree, body: PyTree, logits: Array) -> Array:
                mine = task.model.apply(trees.merge(params, body), batch.x, key=key, train=True)
                return batch.mean(task.loss(logits + mine, batch.y))

            (_, logits), d_generic = jax.value_and_grad(generic_loss, has_aux=True)(generic.params)
            value, d_head = jax.value_and_grad(head_loss)(head.params, split(generic.params)[1], logits)
            return (generic.step(optimizer, d_generic), head.step(optimizer, d_head)), {"train_loss": value}

        start = Descent.start(optimizer, message.shared), Descent.start(optimizer, own)
        (generic, head), metrics = run_steps(work, key, ctx, splits.train, step, start, metrics=("train_loss",))
        return head.params, increment(generic.params, message.shared, work.weight(splits.train)), metrics

    client = Client(
        init=lambda key, hp, ctx, message: jax.tree.map(jnp.zeros_like, split(message.shared)[0]),
        update=update,
        personalize=lambda key, hp, ctx, message, own, splits: Personal(message.shared, own),
        predict=predict,
        gradients=gradients(work.steps, each=2),
    )
    return with_server_optimizer(Algorithm((client,), averaging_server(task), work.steps), work.server_optimizer)
