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
        raise JaxpflError(f"{method} {why}: the task {task.kind!r} has none")


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


_ROUNDING = 8
"""Violations up to so many units of rounding count as none."""


def least_on_simplex(matrix: Array, valid: Array) -> Array:
    """Minimise ``a^T Q a`` over a >= 0 with sum 1, a zero where not valid; [C], all zero if nothing is valid.

    a is y / sum(y), y >= 0 with slacks ``s = Q y - 1 >= 0`` and ``s y = 0``. Starting from no positive entry, the first
    one that violates its sign changes sides, until none does (Murty's principal pivoting, which ends for every positive
    definite Q).

    Args:
      matrix: Q, [C, C], symmetric and positive definite.
      valid: [C] bool.
    """
    size = len(matrix)
    # Scaled to a unit diagonal, so that one bound on rounding suits all entries.
    scale = jnp.where(valid, jax.lax.rsqrt(jnp.diagonal(matrix)), 1)
    scaled = jnp.where(valid[:, None] & valid, matrix * scale[:, None] * scale, jnp.eye(size))
    one = jnp.where(valid, scale, 0)
    slight = _ROUNDING * size * jnp.finfo(matrix.dtype).eps * jnp.max(one)

    def solved(free: Array) -> tuple[Array, Array]:
        """y and its slacks, if exactly the free entries may be positive."""
        part = jnp.where(free[:, None] & free, scaled, jnp.eye(size))
        y = jnp.where(free, jnp.linalg.solve(part, jnp.where(free, one, 0)), 0)
        return y, jnp.where(free | ~valid, 0, scaled @ y - one)

    def wrong(free: Array) -> Array:
        y, slack = solved(free)
        return (y < -slight) | (slack < -slight)

    def changed(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        free, violating, steps = carry
        free = free ^ (jnp.arange(size) == jnp.argmax(violating))
        return free, wrong(free), steps + 1

    def going_on(carry: tuple[Array, Array, Array]) -> Array:
        return carry[1].any() & (carry[2] < 20 * size)

    nothing = jnp.zeros(size, bool)
    free, _, _ = jax.lax.while_loop(going_on, changed, (nothing, wrong(nothing), jnp.int32(0)))
    y = jnp.maximum(solved(free)[0], 0) * scale
    return y / jnp.where(y.sum() > 0, y.sum(), 1)
