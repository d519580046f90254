r"""Models with shared and personal parameters, which are selected by their paths.

The model of client n has the parameters

.. math:: \theta_n = M x + N z_n

where M and N are 0-1 matrices whose rows have at most one 1. A parameter that is part of x is shared, and a parameter
that is part of z_n is personal. If a parameter is both shared and personal, its two values are added. A parameter that
is neither is fixed at its initial value. `Masks.shared_part` and `Masks.personal_part` apply M^T and N^T, which Zhao et
al. write as inverses. The shared, personal and fixed parts are trees with the model's structure, in which leaves of the
other parts are None.

Reference: Zhao et al., Figure 3.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.algorithms.parts.hyper import SgdHyper
from jaxpfl.algorithms.parts.local_work import LocalWork, gradients, sgd
from jaxpfl.algorithms.parts.servers import increment, mean_server, trained_part, with_server_optimizer
from jaxpfl.core import trees
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Upload
from jaxpfl.core.trees import PathPredicate
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Splits
from jaxpfl.models import Task
from jaxpfl.models.base import leaves_by_path
from jaxpfl.support.errors import JaxpflError, listed

NONE = "none"


class Parts(NamedTuple):
    """Parameters of a model in three parts: shared x, personal z, and fixed."""

    shared: PyTree
    personal: PyTree
    fixed: PyTree

    def model(self) -> PyTree:
        """Return the whole model: the sum of the shared and the personal parameters, and the fixed parameters."""

        def add(*parts: Array | None) -> Array:
            return reduce(jnp.add, [part for part in parts if part is not None])

        return jax.tree.map(add, *self, is_leaf=lambda node: node is None)


class Masks(NamedTuple):
    """Predicates that select the shared and the personal parameters by their paths."""

    shared: PathPredicate
    personal: PathPredicate

    def is_trained(self, path: tuple[str, ...]) -> bool:
        """True if the parameter with this path is shared or personal."""
        return self.shared(path) or self.personal(path)

    def shared_part(self, tree: PyTree) -> PyTree:
        """Select the shared leaves of a tree; the other leaves are None."""
        return trees.split_by_path(tree, self.shared)[0]

    def personal_part(self, tree: PyTree) -> PyTree:
        """Select the personal leaves of a tree; the other leaves are None."""
        return trees.split_by_path(tree, self.personal)[0]

    def split(self, params: PyTree) -> Parts:
        """Split an initial model into its parts; the personal part is zero at leaves that are also shared."""
        trained, fixed = trees.split_by_path(params, self.is_trained)
        shared, rest = trees.split_by_path(trained, self.shared)
        zero = jax.tree.map(jnp.zeros_like, self.personal_part(shared))
        return Parts(shared, trees.merge(self.personal_part(rest), zero), fixed)


def masks(method: str, task: Task, shared: str, personal: str) -> Masks:
    """Make masks from patterns for the paths of parameters, such as ``conv*,dense0/kernel``.

    Args:
      method: the method's name, for errors.
      task: task whose model is split.
      shared, personal: comma-separated shell patterns that match whole paths (``dense0/kernel``; ``*`` also matches
        slashes); ``none`` for no parameter.

    Raises:
      JaxpflError: if a pattern matches no parameter, or no parameter is shared or personal.
    """
    paths = list(leaves_by_path(jax.eval_shape(task.init, jax.random.key(0))))

    def predicate(option: str, text: str) -> PathPredicate:
        patterns = [] if text.strip() == NONE else [pattern.strip() for pattern in text.split(",")]
        for pattern in patterns:
            if not any(fnmatchcase(path, pattern) for path in paths):
                raise JaxpflError(
                    f"{method}.{option} = {pattern!r} matches no parameter; the parameters are {listed(paths, pattern)}"
                )

        # If the model is a single array, its path has no names, and ``paths[0]`` is "parameters".
        return lambda path: any(fnmatchcase("/".join(path) or paths[0], pattern) for pattern in patterns)

    chosen = Masks(predicate("shared", shared), predicate("personal", personal))
    if NONE == shared.strip() == personal.strip():
        raise JaxpflError(f"{method} has nothing to train: shared and personal are both {NONE!r}")
    return chosen


Split = Callable[[PyTree], tuple[PyTree, PyTree]]
"""Function from a model's parameters to (the client's own part, the shared part); `trees.merge` is its inverse."""
Update = Callable[[Key, PyTree, ClientContext, Message, PyTree, Splits], tuple[PyTree, Upload, Metrics]]


def head_and_body(method: str, task: Task) -> Split:
    """Return the function that splits a model's parameters into (head, body).

    Raises:
      JaxpflError: if the model has no head or no body.
    """
    is_head = task.model.head
    if is_head is None:
        raise JaxpflError(f"{method} requires a model that names its head: set Model.head")

    def split(params: PyTree) -> tuple[PyTree, PyTree]:
        return trees.split_by_path(params, is_head)

    head, body = map(jax.tree.leaves, split(jax.eval_shape(task.init, jax.random.key(0))))
    if not head:
        raise JaxpflError(f"{method} requires a model with a head: Model.head matches none of its parameters")
    if not body:
        raise JaxpflError(f"{method} requires a model with a body to share: Model.head matches every parameter")
    return split


def part_task(task: Task, rest: PyTree) -> Task:
    """Make a task that trains only one part of a model's parameters, with the other part fixed.

    Args:
      task: task with the whole model.
      rest: the fixed part, as `trees.split_by_path` returns it.
    """
    model = task.model

    def apply(part: PyTree, x: PyTree, key: Key | None = None, train: bool = False) -> Array:
        return model.apply(trees.merge(part, rest), x, key=key, train=train)

    # Running statistics are declared for the whole model, so a task of one part cannot update them.
    return task._replace(model=model._replace(apply=apply, statistics=None))


def trained_together(task: Task, work: LocalWork, split: Split) -> Update:
    """Return the function `Client.update` that takes local SGD steps on both parts and uploads the shared part."""

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
    """Make an algorithm whose clients keep their personal parts, and whose server averages the shared parts.

    The personal part is the client's only state. All personal parts have the same initial values, as in the authors'
    code of FedRep, LG-FedAvg and FedBN.

    Args:
      task: task whose model is split.
      work: the local work in a round.
      split: function that splits the parameters into the personal and the shared part.
      update: the function `Client.update`, whose message is the shared part.
      local_steps: number of local steps that ``update`` takes.
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
