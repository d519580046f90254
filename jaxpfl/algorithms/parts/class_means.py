"""Mean features of each class over a client's examples, and distances to such means.

K is the number of classes, and F the number of features.
"""

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
    """Mean features of each class.

    Attributes:
      means: mean features, [K, F]; zero for a class without examples.
      counts: number of examples of each class, [K].
    """

    means: Array
    counts: Array


def refuse_other_tasks(method: str, why: str, task: Task) -> None:
    """Refuse a task without classes.

    Args:
      method: the method's name.
      why: reason why the method needs classes, a phrase that follows the method's name in the error.
      task: the task to check.

    Raises:
      JaxpflError: if the task has no classes.
    """
    if not task.has_classes:
        raise JaxpflError(f"{method} {why}, but the task {task.kind!r} has no classes")


def counts(classes: int, data: ClientData) -> Array:
    """Number of a client's examples of each class, [K]."""

    def chunk_counts(x: PyTree, y: Array, valid: Array) -> Array:
        return (jax.nn.one_hot(y, classes) * valid[:, None]).sum(axis=0)

    return passes.total(chunk_counts, data)


def client_means(features: Callable[[PyTree], Array], classes: int, data: ClientData) -> ClassMeans:
    """Compute the mean features of each class over all examples of a client.

    Args:
      features: function from inputs [n, ...] to features [n, F].
      classes: K, the number of classes.
      data: the client's examples.
    """

    def sums(x: PyTree, y: Array, valid: Array) -> tuple[Array, Array]:
        of_class = jax.nn.one_hot(y, classes) * valid[:, None]
        rows = jnp.where(valid[:, None], features(x), 0)
        return of_class.T @ rows, of_class.sum(axis=0)

    totals, counts = passes.total(sums, data)
    return ClassMeans(totals / jnp.maximum(counts, 1)[:, None], counts)


def squared_distances(rows: Array, y: Array, means: Array, known: Array) -> Array:
    """Squared distance from each example's features to its class mean, divided by F, [b]; zero if the class has no
    mean.

    Args:
      rows: features of b examples, [b, F].
      y: labels, [b].
      means: class means, [K, F].
      known: indicator of the known means, [K]: 1 for classes that have a mean and 0 for others.
    """
    # Products with one-hot vectors replace gathers, because the gradient of a gather is a scatter, slow on a CPU.
    of_class = jax.nn.one_hot(y, len(means), dtype=rows.dtype)
    squares = ((rows - of_class @ means) ** 2).mean(axis=1)
    return squares * (of_class @ known)
