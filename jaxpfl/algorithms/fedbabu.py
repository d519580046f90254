r"""FedBABU: a body that clients train with a fixed random head, followed by fine-tuning of the whole model.

The server draws the head h once at random, and all clients use it in all rounds. Client i of the cohort S, with loss
f_i and n_i training examples, takes tau local steps on the body alone, starting from the server's body phi:

.. math:: \phi_i \leftarrow \phi_i - \eta \nabla_\phi f_i(\phi_i, h), \qquad
   \phi \leftarrow \phi + \frac{\sum_{i \in S} n_i (\phi_i - \phi)}{\sum_{i \in S} n_i}

Before a client predicts, it fine-tunes (phi, h) by local steps on body and head, as in the paper, or on only one part.
By default the learning rate of fine-tuning is a tenth of the learning rate of training. The authors' code also
fine-tunes with a smaller learning rate.

The method performs poorly without fine-tuning, or if clients have few examples, because the head is trained only in
fine-tuning.

Reference: Oh, Kim and Yun 2022, "FedBABU: Toward Enhanced Representation for Federated Image Classification",
https://arxiv.org/abs/2106.06042.
"""

from __future__ import annotations

from typing import NamedTuple

import optax
from flax import struct

from jaxpfl.algorithms.parts.hyper import AveragingHyper, hyper
from jaxpfl.algorithms.parts.local_work import LocalWork, fine_tuned, fine_tuning, fine_tuning_steps, gradients, sgd
from jaxpfl.algorithms.parts.servers import increment, with_server_optimizer
from jaxpfl.algorithms.parts.split_models import head_and_body, part_task
from jaxpfl.core import trees
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Reduced, Server, ServerContext, Upload
from jaxpfl.core.types import Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task
from jaxpfl.support.errors import unknown_name

PARTS = ("all", "head", "body")


@struct.dataclass
class FedBABUHyper(AveragingHyper):
    """Hyper-parameters of FedBABU."""

    fine_tune_factor: Scalar = hyper(0.1, "learning rate of fine-tuning, relative to the rate of the last round")


class Halves(NamedTuple):
    """State of the server: the fixed head, and the body."""

    head: PyTree
    body: PyTree


def fedbabu(
    task: Task, work: LocalWork, *, fine_tune_steps: int = 60, fine_tune_epochs: int = 0, fine_tune: str = "all"
) -> Algorithm:
    """FedBABU: federated training of the body under a fixed head, then fine-tuning.

    The global model consists of the trained body phi and the random head h. The personalized model is the global model
    after fine-tuning.

    Every message contains the head, because clients keep no state. Uploads contain only the body.

    Args:
      task: task whose model is split into body and head.
      work: the local work in a round.
      fine_tune_steps: number of local steps for personalization.
      fine_tune_epochs: number of passes over the client's own examples, used instead of ``fine_tune_steps`` if it is
        not 0.
      fine_tune: part of the model that fine-tuning changes: "all", "head" or "body".

    Raises:
      JaxpflError: if the model has no head or no body, a number of steps or epochs is negative, or the part is unknown.
    """
    tuning = fine_tuning("fedbabu", work, fine_tune_steps, fine_tune_epochs)
    if fine_tune not in PARTS:
        raise unknown_name("fedbabu.fine_tune", fine_tune, PARTS)
    split = head_and_body("fedbabu", task)

    def update(
        key: Key, hp: FedBABUHyper, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        head, body = split(message.shared)
        rate = hp.lr * hp.decay(ctx.round, work.steps)
        given = (work, part_task(task, head), key, ctx, splits.train)
        new, metrics = sgd(*given, body, rate=rate, weight_decay=hp.weight_decay)
        return state, increment(new, body, work.weight(splits.train)), metrics

    def personalize(
        key: Key, hp: FedBABUHyper, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> PyTree:
        given, factor = (key, hp, ctx, splits.train), hp.fine_tune_factor
        if fine_tune == "all":
            return fine_tuned(tuning, task, *given, message.shared, work.steps, factor)
        head, body = split(message.shared)
        mine, rest = (head, body) if fine_tune == "head" else (body, head)
        tuned = fine_tuned(tuning, part_task(task, rest), *given, mine, work.steps, factor)
        return trees.merge(tuned, rest)

    client = Client(
        init=lambda key, hp, ctx, message: (),
        update=update,
        personalize=personalize,
        predict=lambda hp, params, x: task.model.apply(params, x),
        gradients=gradients(work.steps, personalize=fine_tuning_steps(tuning)),
    )

    def server_init(key: Key, hp: FedBABUHyper, ctx: ServerContext) -> Halves:
        return Halves(*split(task.init(key)))

    def server_update(
        key: Key, hp: FedBABUHyper, ctx: ServerContext, state: Halves, reduced: Reduced
    ) -> tuple[Halves, Metrics]:
        return state._replace(body=optax.apply_updates(state.body, reduced.mean())), {}

    server = Server(
        init=server_init,
        broadcast=lambda key, hp, ctx, state: Message(trees.merge(*state)),
        update=server_update,
        predict_global=lambda hp, state, x: task.model.apply(trees.merge(*state), x),
    )
    algorithm = Algorithm((client,), server, work.steps)
    return with_server_optimizer(algorithm, work.server_optimizer, averaged=lambda shared: split(shared)[1])
