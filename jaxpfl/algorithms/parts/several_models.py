"""Several models: personal models of different architectures, and stacks of k models for one task."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr

from jaxpfl.algorithms.parts.local_work import LocalWork
from jaxpfl.core import trees
from jaxpfl.core.types import Array, ClientData, Key, PyTree
from jaxpfl.data import passes
from jaxpfl.models import Task, build_model
from jaxpfl.support.errors import JaxpflError


def personal_tasks(task: Task, architectures: str) -> list[Task]:
    """Make one task for each group of clients, with the group's model. A client's group is its id modulo the number of
    groups.

    Args:
      task: the global model's task.
      architectures: model names joined by "+", such as ``"same+mlp:32"``; "same" is the task's model. With "" there is
        a single group, with the task's model.

    Raises:
      JaxpflError: if ``architectures`` contains an unknown model name.
    """

    def named(name: str) -> Task:
        if name == "same":
            return task
        every = task.counted is not None
        return task._replace(model=build_model(name, task.num_classes, task.input_shape, every=every))

    return [named(name) for name in (architectures.split("+") if architectures else ["same"])]


def check(method: str, option: str, k: int, task: Task, work: LocalWork) -> None:
    """Check that a method can train k different models.

    Raises:
      JaxpflError: if there are fewer than two models or more models than clients; or if the initialization does not
        depend on the random key (as in a warm start), because k models with equal initial parameters would stay equal.
    """
    if k < 2:
        raise JaxpflError(f"{method}.{option} must be >= 2, got {k}: with one model, {method} is the same as fedavg")
    if k > work.num_clients:
        raise JaxpflError(f"{method}.{option} must be <= {work.num_clients} (the number of clients), got {k}")
    start = jax.make_jaxpr(task.init)(jax.random.key(0)).jaxpr
    _, (by_key,) = dce_jaxpr(start, [True] * len(start.outvars))
    if not by_key:
        raise JaxpflError(
            f"{method} requires models with different initial parameters, but this model's init ignores the random key"
        )


def init(task: Task, key: Key, k: int) -> PyTree:
    """Initialize k models with different keys."""
    return jax.vmap(task.init)(jax.random.split(key, k))


def losses(task: Task, models: PyTree, x: PyTree, y: Array) -> Array:
    """Loss of every example under every model, [k, b]."""

    def model_losses(params: PyTree) -> Array:
        return task.loss(task.model.apply(params, x), y)

    # The models run one after another, because a chunk of examples is already enough parallel work.
    return jax.lax.map(model_losses, models)


def mean_losses(task: Task, models: PyTree, data: ClientData) -> Array:
    """Mean loss of every model over a client's examples, [k]."""

    def sums(x: PyTree, y: Array, valid: Array) -> Array:
        return jax.vmap(trees.valid_sum, in_axes=(None, 0))(valid, losses(task, models, x, y))

    return passes.total(sums, data) / jnp.maximum(data.size, 1)


def pick(models: PyTree, index: Array) -> PyTree:
    """Return the model at an index of a stack of models."""
    return jax.tree.map(lambda a: a[index], models)
