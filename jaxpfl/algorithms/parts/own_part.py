"""Models of two parts, such as one that the server averages and one that stays with the client."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxpfl.algorithms.parts.averaging import increment, mean_server
from jaxpfl.algorithms.parts.hyper import SgdHyper
from jaxpfl.algorithms.parts.local_work import LocalWork, gradients, sgd
from jaxpfl.algorithms.parts.server_optimizer import trained_part, with_server_optimizer
from jaxpfl.core import trees
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Upload
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Splits
from jaxpfl.models import Task
from jaxpfl.support.errors import JaxpflError

Split = Callable[[PyTree], tuple[PyTree, PyTree]]
"""Maps a model's parameters to the client's own part and the shared one, which `trees.merge` puts together."""
Update = Callable[[Key, PyTree, ClientContext, Message, PyTree, Splits], tuple[PyTree, Upload, Metrics]]


def head_and_body(method: str, task: Task) -> Split:
    """Split of the task's model into the personal head and the shared body.

    Raises:
      JaxpflError: for a model without a head, or without a body.
    """
    is_head = task.model.head
    if is_head is None:
        raise JaxpflError(f"{method} needs a model that names its head (Model.head): this one names none")

    def split(params: PyTree) -> tuple[PyTree, PyTree]:
        return trees.split_by_path(params, is_head)

    head, body = map(jax.tree.leaves, split(jax.eval_shape(task.init, jax.random.key(0))))
    if not head:
        raise JaxpflError(f"{method} needs a model with a head: Model.head accepts none of its parameters")
    if not body:
        raise JaxpflError(f"{method} needs a model with a body to share: this one's head is the whole model")
    return split


def of_part(task: Task, rest: PyTree) -> Task:
    """Task of one part of its model's parameters, the other fixed.

    Args:
      task: of the whole model.
      rest: the other part, as `trees.split_by_path` leaves it.
    """
    model = task.model

    def apply(part: PyTree, x: PyTree, key: Key | None = None, train: bool = False) -> Array:
        return model.apply(trees.merge(part, rest), x, key=key, train=train)

    # Running statistics are of the whole model: one that has any refuses to be trained in parts.
    return task._replace(model=model._replace(apply=apply, statistics=None))


def trained_together(task: Task, work: LocalWork, split: Split) -> Update:
    """Client update by tau SGD steps on both parts; the upload is weighted by the number of training examples."""

    def update(
        key: Key, hp: SgdHyper, ctx: ClientContext, message: Message, own: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        rate = hp.lr * hp.decay(ctx.round, work.steps)
        start = trees.merge(own, message.shared)
        params, metrics = sgd(work, task, key, ctx, splits.train, start, rate=rate, weight_decay=hp.weight_decay)
        new_own, new_shared = split(params)
        return new_own, increment(new_shared, message.shared, work.weight(splits.train)), metrics

    return update


def keeping_own_part(task: Task, work: LocalWork, split: Split, update: Update, local_steps: int) -> Algorithm:
    """Algorithm whose clients keep their personal parts, and whose server averages the shared ones.

    A personal part is the client's whole state; all start alike, as in the code of FedRep's, LG-FedAvg's and FedBN's
    authors.

    Args:
      update: as `Client.update`; the message is the shared part.
      local_steps: the steps of ``update``.
    """
    client = Client(
        init=lambda key, hp, ctx, message: split(task.init(key))[0],
        update=update,
        personalize=lambda key, hp, ctx, message, own, splits: trees.merge(own, message.shared),
        predict=lambda hp, params, x: task.model.apply(params, x),
        gradients=gradients(local_steps),
    )
    server = mean_server(lambda key: split(task.init(key))[1])
    increments = trained_part(task, lambda params: split(params)[1])
    algorithm = Algorithm((client,), server, local_steps, increments=increments)
    return with_server_optimizer(algorithm, work.server_optimizer)
