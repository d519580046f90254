"""Means of features by class over a client's examples, and quadratic programs on the probability simplex."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array, ClientData, PyTree
from jaxpfl.data import passes
from jaxpfl.models import Task
from jaxpfl.support.errors import JaxpflError


class ClassMeans(NamedTuple):
    """Means of features by class.

    Attributes:
      means: [K, F]; zero for a class without examples.
      counts: [K], numbers of examples.
    """

    means: Array
    counts: Array


def refuse_other_tasks(method: str, why: str, task: Task) -> None:
    """Refuse a task without classes.

    Raises:
      JaxpflError: in one line: the method, its use of classes, and the task.
    """
    if not task.has_classes:
        raise JaxpflError(f"{method} {why}: the task {task.kind!r} has no classes")


def counts(classes: int, data: ClientData) -> Array:
    """Numbers of a client's examples by class, [K]."""

    def chunk_counts(x: PyTree, y: Array, valid: Array) -> Array:
        return (jax.nn.one_hot(y, classes) * valid[:, None]).sum(axis=0)

    return passes.total(chunk_counts, data)


def client_means(features: Callable[[PyTree], Array], classes: int, data: ClientData) -> ClassMeans:
    """Class means over all examples of a client.

    Args:
      features: inputs [c, ...] -> [c, F].
      classes: K.
      data: the client's examples.
    """

    def sums(x: PyTree, y: Array, valid: Array) -> tuple[Array, Array]:
        of_class = jax.nn.one_hot(y, classes) * valid[:, None]
        rows = jnp.where(valid[:, None], features(x), 0)
        return of_class.T @ rows, of_class.sum(axis=0)

    totals, counts = passes.total(sums, data)
    return ClassMeans(totals / jnp.maximum(counts, 1)[:, None], counts)


def squared_distances(rows: Array, y: Array, means: Array, known: Array) -> Array:
    """Squared distance from each row to its class mean, averaged over the features; zero without a class mean, [b].

    Args:
      rows: [b, F].
      y: [b].
      means: [K, F].
      known: [K], 1 for classes that have a mean and 0 for others.
    """
    # One-hot products: a gather's gradient is a scatter, which is slow on a CPU.
    of_class = jax.nn.one_hot(y, len(means), dtype=rows.dtype)
    squares = ((rows - of_class @ means) ** 2).mean(axis=1)
    return squares * (of_class @ known)
