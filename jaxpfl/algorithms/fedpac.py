r"""FedPAC: features are aligned to class means, and each personal head is a combination of the cohort's heads.

The server keeps the shared body phi, the mean feature c_y of each of the K classes, and a head h_i for every client. A
client i of the cohort S takes ``head_steps`` steps on its head with the body fixed. The client then takes tau local
steps on the body, with the new head fixed, to minimize

.. math:: \frac1{|B|} \sum_{(x, y) \in B} \Big[ \ell(x, y) + \lambda \frac1F \|f_\phi(x) - c_y\|^2 \Big]

where the second term is zero for a class that has no mean yet. The server averages the bodies, weighted by the clients'
numbers of examples. For each class, the server also averages the clients' mean features, weighted by the clients'
numbers of examples of the class.

Let :math:`p_{ik}` be the fraction of client i's n_i examples that belong to class k. Let :math:`\bar f_{ik}` and
:math:`\overline{\|f\|^2}_{ik}` be the means of the features and of their squared norms over the client's examples of
class k, computed with the body that the client received. The client also sends

.. math:: V_i = \frac1{n_i} \Big( \sum_k p_{ik} \overline{\|f\|^2}_{ik} - \sum_k p_{ik}^2 \|\bar f_{ik}\|^2 \Big),
   \qquad m_{ik} = p_{ik} \bar f_{ik}

The client's new head is the combination :math:`\sum_j a_{ij} h_j` of the cohort's heads. The weights a_ij of this
combination, written a_j below, solve the quadratic program

.. math:: \min_a \; \sum_{j \in S} a_j^2 V_j + \sum_{j, l \in S} a_j a_l \sum_k (m_{ik} - m_{jk})^T (m_{ik} - m_{lk}),
   \qquad a \ge 0, \; \sum_j a_j = 1

This program is solved exactly by principal pivoting. A ten-thousandth of the mean diagonal entry of the program's
matrix is added to the matrix's diagonal, so that the solution is unique even if a client's V is zero. Clients outside
the cohort keep their heads. As in the authors' code, the feature distance is computed for each example and is a mean
over the F features.

The method performs poorly in small cohorts, because it then combines heads of clients with different data. In every
round, a client makes three passes over all its examples to compute its statistics.

Reference: Xu, Tong and Huang 2023, "Personalized Federated Learning with Feature Alignment and Classifier
Collaboration", https://arxiv.org/abs/2306.11867.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxpfl.algorithms.parts import class_means
from jaxpfl.algorithms.parts.hyper import SgdHyper, hyper
from jaxpfl.algorithms.parts.local_work import Batch, Descent, LocalWork, run_steps, sgd, steps_within
from jaxpfl.algorithms.parts.split_models import head_and_body, part_task
from jaxpfl.core import trees
from jaxpfl.core.protocol import (
    Algorithm,
    Client,
    ClientContext,
    Gradients,
    Message,
    Reduction,
    Server,
    ServerContext,
    Stacked,
    Upload,
)
from jaxpfl.core.types import Array, ClientData, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.data import passes
from jaxpfl.models import Task
from jaxpfl.models.features import halves
from jaxpfl.support.errors import JaxpflError

RIDGE = 1e-4
"""Number added to the diagonal of the quadratic program, relative to the diagonal's mean."""
_ROUNDING = 8
"""Tolerance for violations of the quadratic program's constraints, in units of the rounding error."""


@struct.dataclass
class FedPACHyper(SgdHyper):
    """Hyper-parameters of FedPAC; the authors' code has learning rates of 0.1 for the head and 0.01 for the body."""

    lr_head: Scalar = hyper(0.1, "learning rate of the head's steps", positive=True, is_rate=True)
    lam: Scalar = hyper(1.0, "lambda, weight of the distance of features to the mean of their class")


class Shared(NamedTuple):
    """Message to all clients: the body, class means [K, F], and ``known`` [K], which is 1 for a class that has a mean
    and 0 otherwise.
    """

    body: PyTree
    means: Array
    known: Array


class State(NamedTuple):
    """State of the server: the message to all clients, and the heads of all clients (leaves [m, ...])."""

    shared: Shared
    heads: PyTree


class Sent(NamedTuple):
    """A client's upload, or a tree of the same form with the averaging weights of the upload's parts.

    The weight of the body is the client's weight, the weights of the means are the class counts [K], and the other
    parts have weight 1.

    Attributes:
      body: change of the body.
      head: change of the head.
      means: changes of the class means, [K, F].
      variance: V_i in the module's formula, [].
      moments: m_ik in the module's formula for every class k, [K, F].
    """

    body: PyTree
    head: PyTree
    means: PyTree
    variance: PyTree
    moments: PyTree


def weights(variances: Array, moments: Array, valid: Array) -> Array:
    """Compute the weights a_ij with which client i combines the head of client j, for the C clients in a cohort, [C,
    C].

    The head of a client without an upload has weight zero.

    Args:
      variances: V_i in the module's formula for every client i, [C].
      moments: m_ik in the module's formula for every client i and class k, [C, K, F].
      valid: mask of the clients with an upload, [C] bool.
    """

    def client_weights(own: Array) -> Array:
        apart = (own - moments).reshape(len(moments), -1)
        matrix = jnp.diag(variances) + apart @ apart.T
        diagonal = jnp.where(valid, jnp.diagonal(matrix), 0).sum() / trees.valid_count(valid)
        return least_on_simplex(matrix + RIDGE * diagonal * jnp.eye(len(moments)), valid)

    return jax.vmap(client_weights)(moments)


def least_on_simplex(matrix: Array, valid: Array) -> Array:
    """Minimize ``a^T Q a`` over vectors a >= 0 with C entries that sum to 1 and are zero where ``valid`` is false.

    The solution is a = y / sum(y), where y >= 0 and the slacks ``s = Q y - 1`` satisfy ``s >= 0`` and ``s y = 0`` for
    each entry. The method is Murty's principal pivoting, which terminates for every positive definite Q. Each entry of
    y is either fixed at zero or free; at first all entries are fixed. While an entry of y or s is negative, the first
    such entry is switched between the fixed set and the free set.

    Args:
      matrix: Q, [C, C], symmetric and positive definite.
      valid: mask of the entries of a that may be positive, [C] bool.

    Returns:
      The vector a, [C]; all zero if ``valid`` is false everywhere.
    """
    size = len(matrix)
    # Q is scaled to a unit diagonal, so that a single rounding tolerance suits all entries.
    scale = jnp.where(valid, jax.lax.rsqrt(jnp.diagonal(matrix)), 1)
    scaled = jnp.where(valid[:, None] & valid, matrix * scale[:, None] * scale, jnp.eye(size))
    one = jnp.where(valid, scale, 0)
    slight = _ROUNDING * size * jnp.finfo(matrix.dtype).eps * jnp.max(one)

    def solved(free: Array) -> tuple[Array, Array]:
        """Solve for the y whose entries outside the free set are zero, and for the slacks s."""
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
        return carry[1].any() & (carry[2] < 20 * size)  # stops if rounding makes the pivots cycle

    nothing = jnp.zeros(size, bool)
    free, _, _ = jax.lax.while_loop(going_on, changed, (nothing, wrong(nothing), jnp.int32(0)))
    y = jnp.maximum(solved(free)[0], 0) * scale
    return y / jnp.where(y.sum() > 0, y.sum(), 1)


def fedpac(task: Task, work: LocalWork, *, head_steps: int = 5) -> Algorithm:
    """FedPAC: features aligned to class means, and personal heads that combine the heads of similar clients.

    The personalized model is the shared body with the client's combined head. There is no global model.

    The server receives each upload individually, and does not use a server optimizer. A new client receives the mean of
    all heads.

    Args:
      task: a classification task, whose model is split into body and head.
      work: the local work on the body in a round.
      head_steps: number of steps on the head before the steps on the body, at least 1; one epoch in the paper.

    Raises:
      JaxpflError: if the task has no classes, the model has no head or no body, ``head_steps`` is below one, or
        examples are mixed (mixup).
    """
    class_means.refuse_other_tasks("fedpac", "aligns features by classes", task)
    work.refuse_mixing("fedpac")
    if head_steps < 1:
        raise JaxpflError(f"fedpac.head_steps must be >= 1, got {head_steps}")
    split, parts = head_and_body("fedpac", task), halves("fedpac", task)
    of_head = replace(work, steps=head_steps, epochs=None)

    def statistics(params: PyTree, data: ClientData) -> tuple[Array, Array]:
        """Compute V_i and m_ik in the module's formula for one client i and every class k."""
        means, counts = class_means.client_means(lambda x: parts.features(params, x), task.num_classes, data)

        def squares(x: PyTree, y: Array, valid: Array) -> Array:
            return (jnp.where(valid[:, None], parts.features(params, x), 0) ** 2).sum()

        n = jnp.maximum(counts.sum(), 1)
        moments = counts[:, None] / n * means
        return (passes.total(squares, data) / n - (moments**2).sum()) / n, moments

    def update(
        key: Key, hp: FedPACHyper, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        shared, received, data = message.shared, message.per_client, splits.train
        decay = hp.decay(ctx.round, work.steps)
        variance, moments = statistics(trees.merge(received, shared.body), data)
        given = of_head, part_task(task, shared.body), jax.random.fold_in(key, head_steps), ctx, data, received
        head, _ = sgd(*given, rate=hp.lr_head * decay, weight_decay=hp.weight_decay, steps=head_steps)
        optimizer = work.descent(hp.lr * decay, hp.weight_decay)

        def objective(body: PyTree, key: Key, batch: Batch) -> tuple[Array, Metrics]:
            params = trees.merge(head, body)
            rows = parts.features(params, batch.x, key, True)
            loss = batch.mean(task.loss(parts.head(params, rows), batch.y))
            distance = batch.mean(class_means.squared_distances(rows, batch.y, shared.means, shared.known))
            return loss + hp.lam * distance, {"train_loss": loss, "mean_distance": distance}

        def step(key: Key, at: Descent, batch: Batch) -> tuple[Descent, Metrics]:
            gradient, metrics = jax.grad(objective, has_aux=True)(at.params, key, batch)
            return at.step(optimizer, gradient), metrics

        start, names = Descent.start(optimizer, shared.body), ("train_loss", "mean_distance")
        end, metrics = run_steps(work, key, ctx, data, step, start, metrics=names)
        new = trees.merge(head, end.params)
        means, counts = class_means.client_means(lambda x: parts.features(new, x), task.num_classes, data)
        changes = optax.tree.sub(end.params, shared.body), optax.tree.sub(head, received), means - shared.means
        weight = Sent(work.weight(data), jnp.ones(()), counts, jnp.ones(()), jnp.ones(()))
        return state, Upload(trees.prefix_multiply(Sent(*changes, variance, moments), weight), weight), metrics

    def server_init(key: Key, hp: FedPACHyper, ctx: ServerContext) -> State:
        head, body = split(task.init(key))
        heads = jax.tree.map(lambda a: jnp.broadcast_to(a, (ctx.num_clients, *a.shape)), head)
        return State(Shared(body, jnp.zeros((task.num_classes, parts.width)), jnp.zeros(task.num_classes)), heads)

    def server_update(
        key: Key, hp: FedPACHyper, ctx: ServerContext, state: State, uploads: Stacked
    ) -> tuple[State, Metrics]:
        summed, sent = uploads.summed(), uploads.total
        mean: Sent = summed.mean()
        shared, own = state.shared, weights(sent.variance, sent.moments, uploads.valid)
        known = jnp.where(summed.weight.means > 0, 1, shared.known)

        def combined(old: Array, change: Array) -> Array:
            heads = trees.take_rows(old, uploads.rows) + change
            return old.at[uploads.rows].set(jnp.tensordot(own, heads, axes=1).astype(old.dtype), mode="drop")

        body, means = optax.apply_updates(shared.body, mean.body), shared.means + mean.means
        return State(Shared(body, means, known), jax.tree.map(combined, state.heads, sent.head)), {}

    client = Client(
        init=lambda key, hp, ctx, message: (),
        update=update,
        personalize=lambda key, hp, ctx, message, state, splits: trees.merge(message.per_client, message.shared.body),
        predict=lambda hp, params, x: task.model.apply(params, x),
        gradients=Gradients(lambda limit, message: steps_within(head_steps, limit) + steps_within(work.steps, limit)),
    )
    server = Server(
        init=server_init,
        broadcast=lambda key, hp, ctx, state: Message(state.shared, state.heads),
        update=server_update,
        welcome=lambda key, hp, ctx, state: Message(state.shared, jax.tree.map(lambda a: a.mean(axis=0), state.heads)),
    )
    increments = Sent(True, True, True, variance=False, moments=False)
    return Algorithm((client,), server, work.steps, Reduction.STACK, increments=increments)
