"""Centralized training on the union of all clients' examples: a reference, not a federated method.

The engine trains ONE client that has the training examples of all clients, and evaluates its model on the test examples
of each of the m clients (`Algorithm.pooled`). The rounds form a single training run: the optimizer state is kept
between rounds, and a round's batches continue the previous round's epoch. The cohort, the server optimizer and the
availability of clients have no effect.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxpfl.algorithms.parts.hyper import SgdHyper
from jaxpfl.algorithms.parts.local_work import Descent, LocalWork, gradients, train
from jaxpfl.algorithms.parts.servers import averaging_server, increment
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Upload
from jaxpfl.core.types import Key, Metrics, PyTree, Splits
from jaxpfl.models import Task
from jaxpfl.support.errors import JaxpflError


def pooled(task: Task, work: LocalWork, *, steps: int = 0) -> Algorithm:
    """Centralized training on the union of the clients' training examples, ``steps`` mini-batches in a round.

    Let tau be the number of local steps in a round of a federated method. With the default of tau steps in a round,
    training takes rounds * tau steps in total, as many as a client that takes part in every round of a federated
    method. With ``steps = K * tau``, training processes as many examples as a cohort of K clients. With the same seed,
    the initial model is the same as FedAvg's. The trained model is both the personalized and the global model.

    Args:
      task: the task; any model is supported.
      work: the local work in a round.
      steps: number of mini-batches in a round; 0 for tau.

    Raises:
      JaxpflError: if ``steps`` is negative.
    """
    if steps < 0:
        raise JaxpflError(f"pooled.steps must be >= 0, got {steps}")
    trained = work.sizes[: len(work.sizes) - work.unseen]
    work = dataclasses.replace(
        work, sizes=np.array([np.sum(trained)]), unseen=0, steps=steps or work.steps, epochs=None
    )

    def update(
        key: Key, hp: SgdHyper, ctx: ClientContext, message: Message, memory: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        optimizer = work.descent(hp.lr * hp.decay(ctx.round, work.steps), hp.weight_decay)
        start = Descent(message.shared, memory)
        end, metrics = train(work, task, key, ctx, splits.train, optimizer, start)
        return end.memory, increment(end.params, start.params), metrics

    client = Client(
        init=lambda key, hp, ctx, message: work.descent(hp.lr, hp.weight_decay).init(message.shared),
        update=update,
        personalize=lambda key, hp, ctx, message, memory, splits: message.shared,
        predict=lambda hp, params, x: task.model.apply(params, x),
        gradients=gradients(work.steps),
    )
    return Algorithm((client,), averaging_server(task), work.steps, pooled=True)
