"""What IFCA and FedEM share: k models of one task side by side, leaves [k, ...], that start apart."""

from __future__ import annotations

import jax
from jax.interpreters.partial_eval import dce_jaxpr

from jaxpfl.algorithms.parts.local_work import Batch, LocalWork
from jaxpfl.errors import JaxpflError
from jaxpfl.models import Task
from jaxpfl.types import Array, Key, PyTree


def check(method: str, option: str, k: int, task: Task, work: LocalWork) -> None:
    """Refuses what k models cannot serve.

    Raises:
      JaxpflError: for fewer than two clients or models, more models than clients, and models that all start from the
        same parameters (a warm start, say): nothing would ever tell them apart.
    """
    clients = work.num_clients
    if clients < 2:
        raise JaxpflError(f"{method} needs at least 2 clients, got {clients}: alone, nobody is like or unlike another")
    if k < 2:
        raise JaxpflError(f"{method}.{option} must be >= 2, got {k}: with one model it is fedavg")
    if k > clients:
        raise JaxpflError(f"{method}.{option} must be <= {clients}, the number of clients, got {k}")
    start = jax.make_jaxpr(task.init)(jax.random.key(0)).jaxpr
    _, (by_key,) = dce_jaxpr(start, [True] * len(start.outvars))
    if not by_key:
        raise JaxpflError(
            f"{method} needs models that start apart: this one starts from the same parameters every time"
        )


def init(task: Task, key: Key, k: int) -> PyTree:
    """k models, each from an initialisation of its own."""
    return jax.vmap(task.init)(jax.random.split(key, k))


def losses(task: Task, models: PyTree, batch: Batch) -> Array:
    """The loss of every example under every model, [k, b]; anything where the batch is not valid."""

    def of_one(params: PyTree) -> Array:
        return task.loss(task.model.apply(params, batch.x), batch.y)

    # One after the other: all of a client's examples at once are many already.
    return jax.lax.map(of_one, models)


def pick(models: PyTree, index: Array) -> PyTree:
    """The model of that number."""
    return jax.tree.map(lambda a: a[index], models)
