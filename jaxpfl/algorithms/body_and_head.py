"""What FedPer and FedRep share: a body that the server averages, and a head that never leaves its client."""

from __future__ import annotations

from collections.abc import Callable

import jax
import optax

from jaxpfl import trees
from jaxpfl.algorithms.local_work import LocalWork
from jaxpfl.algorithms.server_optimizer import with_server_optimizer
from jaxpfl.errors import JaxpflError
from jaxpfl.models import Task
from jaxpfl.protocol import Algorithm, Client, ClientContext, Message, Reduced, Server, ServerContext, Upload
from jaxpfl.types import Key, Metrics, PyTree, Splits

Split = Callable[[PyTree], tuple[PyTree, PyTree]]
"""Maps a model's parameters to its head and its body, which `trees.merge` puts together."""
Update = Callable[[Key, PyTree, ClientContext, Message, PyTree, Splits], tuple[PyTree, Upload, Metrics]]


def splitter(method: str, task: Task) -> Split:
    """How to split the task's model.

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


def sharing_bodies(task: Task, work: LocalWork, split: Split, update: Update, local_steps: int) -> Algorithm:
    """The algorithm whose clients keep their heads, and whose server averages the bodies that it is sent.

    A client's head starts from an initialisation of its own; it is the client's whole state.

    Args:
      split: the task's, of `splitter`.
      update: as `Client.update`; the message is the body.
      local_steps: the steps that ``update`` takes.
    """

    def server_update(
        key: Key, hp: PyTree, ctx: ServerContext, body: PyTree, reduced: Reduced
    ) -> tuple[PyTree, Metrics]:
        return optax.apply_updates(body, reduced.mean()), {}

    client = Client(
        init=lambda key, hp, ctx, message: split(task.init(key))[0],
        update=update,
        personalize=lambda key, hp, ctx, message, head, splits: trees.merge(head, message.shared),
        predict=lambda hp, params, x: task.model.apply(params, x),
    )
    server = Server(
        init=lambda key, hp, ctx: split(task.init(key))[1],
        broadcast=lambda key, hp, ctx, body: Message(body),
        update=server_update,
    )
    return with_server_optimizer(Algorithm((client,), server, local_steps), work.server_optimizer)
