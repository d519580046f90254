"""Local training without collaboration: the baseline for every federated method."""

from __future__ import annotations

import jax

from jaxpfl.algorithms.parts.hyper import SgdHyper
from jaxpfl.algorithms.parts.local_work import LocalWork, gradients, sgd
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Server, Upload
from jaxpfl.core.types import Key, Metrics, PyTree, Splits
from jaxpfl.models import Task


def local(task: Task, work: LocalWork) -> Algorithm:
    """Local training: each client trains alone on its own data, and nothing is exchanged.

    The personalized model is the client's own theta_i, which has its own random initialization. There is no global
    model.
    """

    def init(key: Key, hp: SgdHyper, ctx: ClientContext, message: Message) -> PyTree:
        return task.init(jax.random.fold_in(key, ctx.client_id))

    def update(
        key: Key, hp: SgdHyper, ctx: ClientContext, message: Message, theta: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        rate = hp.lr * hp.decay(ctx.round, work.steps)
        theta, metrics = sgd(work, task, key, ctx, splits.train, theta, rate=rate, weight_decay=hp.weight_decay)
        return theta, Upload(total=(), weight=()), metrics

    client = Client(
        init=init,
        update=update,
        personalize=lambda key, hp, ctx, message, theta, splits: theta,
        predict=lambda hp, theta, x: task.model.apply(theta, x),
        gradients=gradients(work.steps),
    )
    server = Server(
        init=lambda key, hp, ctx: (),
        broadcast=lambda key, hp, ctx, state: Message(()),
        update=lambda key, hp, ctx, state, reduced: (state, {}),
    )
    return Algorithm((client,), server, work.steps)
