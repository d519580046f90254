r"""Server optimizers: minus the mean model update of the cohort takes the place of a gradient.

.. math:: x \leftarrow x + \operatorname{step}(-\bar\Delta), \qquad
   \bar\Delta = \frac{\sum_{i \in S} w_i \Delta_i}{\sum_{i \in S} w_i}

with :math:`\Delta_i` the update and w_i the weight of client i in the cohort S. ``sgd`` at ``server_lr`` = 1 is plain
averaging, :math:`x + \bar\Delta`; `optimizers` has FedAvgM, FedAdam and others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import optax

from jaxpfl.algorithms.parts.optimizers import Optimizer, normalizes, resolve
from jaxpfl.core import trees
from jaxpfl.core.protocol import Algorithm, Reduced, Reduction, ServerContext, wrapped_server
from jaxpfl.core.types import Key, Metrics, PyTree, Scalar
from jaxpfl.models import Task
from jaxpfl.support.errors import JaxpflError, warn


class Served(NamedTuple):
    """State of a server with a stateful optimizer: the method's own state, and the optimizer state."""

    state: PyTree
    memory: PyTree


def with_server_optimizer(
    algorithm: Algorithm,
    optimizer: Optimizer,
    *,
    acts_on: PyTree = None,
    averaged: Callable[[PyTree], PyTree] = lambda shared: shared,
) -> Algorithm:
    """Replace the mean model update of an algorithm by the optimizer's step on it.

    The server's update receives that step as an increment of weight one. In a round of no weight, the step is zero and
    the optimizer state is kept. The learning rate is the hyper-parameter ``server_lr`` (`AveragingHyper`); one where
    the method has none.

    Args:
      algorithm: one that adds the mean of its uploads (`Reduced.mean`) to what it averages, a tree of the same
        structure; uploads have one weight.
      optimizer: a name with arguments, or a factory; the server's state is then a `Served`. With ``sgd`` it is the
        method's own, and the updates are multiplied by the rate.
      acts_on: a tree prefix of the uploads, true for a model's parameters. The rest is averaged. None for
        ``Algorithm.increments``.
      averaged: the part of the broadcast's ``shared`` that it averages; all of it by default.

    Raises:
      JaxpflError: for a method whose uploads are not summed, or if the optimizer is unknown; when traced, for uploads
        of another structure than the broadcast or of several weights.
    """
    if algorithm.reduction is not Reduction.SUM:
        raise JaxpflError("a server optimizer needs the mean of the uploads: this method keeps them apart")
    acts_on = algorithm.increments if acts_on is None else acts_on
    if optimizer == "sgd":
        return _with_rate(algorithm, acts_on)
    inner, make = algorithm.server, resolve(optimizer)

    def transformation(rate: Scalar) -> optax.GradientTransformation:
        # The rest: minus the gradient, which is the mean itself.
        return optax.partition({True: make(rate), False: optax.scale(-1.0)}, acts_on)

    def start(key: Key, hp: PyTree, ctx: ServerContext, state: PyTree) -> PyTree:
        return transformation(_rate(hp)).init(averaged(inner.broadcast(key, hp, ctx, state).shared))

    def step(
        key: Key, hp: PyTree, ctx: ServerContext, state: PyTree, memory: PyTree, reduced: Reduced
    ) -> tuple[Reduced, PyTree]:
        params, mean = averaged(inner.broadcast(key, hp, ctx, state).shared), reduced.mean()
        if jax.tree.structure(params) != jax.tree.structure(mean) or not _is_scalar(reduced.weight):
            raise JaxpflError("a server optimizer needs uploads that are, with one weight, like what the server sends")
        updates, new_memory = transformation(_rate(hp)).update(optax.tree.scale(-1.0, mean), memory, params)
        updates = jax.tree.map(lambda u, a: u.astype(a.dtype), updates, mean)
        anybody = reduced.weight > 0
        nothing = optax.tree.zeros_like(updates)
        updates, memory = trees.where(anybody, (updates, new_memory), (nothing, memory))
        return Reduced(updates, anybody.astype(reduced.weight.dtype), reduced.contributors), memory

    def init(key: Key, hp: PyTree, ctx: ServerContext) -> Served:
        state = inner.init(key, hp, ctx)
        return Served(state, start(key, hp, ctx, state))

    def update(key: Key, hp: PyTree, ctx: ServerContext, served: Served, reduced: Reduced) -> tuple[Served, Metrics]:
        reduced, memory = step(key, hp, ctx, served.state, served.memory, reduced)
        state, metrics = inner.update(key, hp, ctx, served.state, reduced)
        return Served(state, memory), metrics

    server = wrapped_server(inner, init=init, update=update, state=lambda served: served.state)
    return algorithm._replace(server=server)


def trained_part(task: Task, averaged: Callable[[PyTree], PyTree] = lambda params: params) -> PyTree:
    """`Algorithm.increments` for uploads that are models: false for running statistics.

    Args:
      task: its model.
      averaged: the part of a model's parameters that is uploaded.
    """
    statistics = task.statistics
    if statistics is None:
        return True
    shapes = averaged(jax.eval_shape(task.init, jax.random.key(0)))
    return jax.tree.map_with_path(lambda path, _: not statistics.selects(trees.names(path)), shapes)


def check_rate(optimizer: Optimizer, server_lr: Scalar, *, strict: bool = False) -> None:
    """Warn of a server rate of one or more with an optimizer that normalises; ``strict`` refuses it.

    Such an optimizer moves every parameter by about its rate in each round.

    Raises:
      JaxpflError: also if the optimizer is unknown.
    """
    resolve(optimizer)
    if normalizes(optimizer) and np.max(server_lr) >= 1:
        warn(
            f"server optimizer {optimizer} moves every parameter by about server_lr = {np.max(server_lr):g} in each "
            "round: 0.01 to 0.1 is usual",
            strict=strict,
        )


def _with_rate(algorithm: Algorithm, acts_on: PyTree) -> Algorithm:
    """Plain SGD at the server, on the sum instead of the mean: averaging at a rate of one is exact."""
    inner = algorithm.server

    def update(key: Key, hp: PyTree, ctx: ServerContext, state: PyTree, reduced: Reduced) -> tuple[PyTree, Metrics]:
        def scale(acts: bool, part: PyTree) -> PyTree:
            return jax.tree.map(lambda a: (_rate(hp) * a).astype(a.dtype), part) if acts else part

        total = jax.tree.map(scale, acts_on, reduced.total)
        return inner.update(key, hp, ctx, state, reduced._replace(total=total))

    return algorithm._replace(server=inner._replace(update=update))


def _rate(hp: PyTree) -> Scalar:
    return getattr(hp, "server_lr", 1.0)


def _is_scalar(weight: PyTree) -> bool:
    leaves = jax.tree.leaves(weight)
    return len(leaves) == 1 and leaves[0] is weight and leaves[0].ndim == 0
