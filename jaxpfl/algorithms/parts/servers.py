r"""Servers: averaging of the clients' model updates, FedNova, server optimizers, and models stored for new clients.

**FedNova** (`normalized`). Let :math:`\Delta_i` be the model update of client i after :math:`\tau_i` SGD steps, and let
:math:`p_i` be its weight, divided by the sum of all weights. :math:`\tau_i` is smaller for a straggler and, if work is
in epochs, for a client with few examples. The server adds

.. math:: \Bigl( \sum_i p_i \tau_i \Bigr) \sum_i p_i \frac{\Delta_i}{\tau_i}

instead of :math:`\sum_i p_i \Delta_i`. That sum would in effect also weight clients by their numbers of steps, and
training would converge to the minimizer of another objective. If all clients take the same number of steps, the two
expressions are equal. Weight decay is treated as part of the gradient.

Reference: Wang et al. 2020, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
https://arxiv.org/abs/2007.07481, equation (10) for SGD without momentum.

**Server optimizers** (`with_server_optimizer`). With the model update :math:`\Delta_i` and the weight w_i of each
client i in the cohort S, the server's step is

.. math:: x \leftarrow x + \operatorname{step}(-\bar\Delta), \qquad
   \bar\Delta = \frac{\sum_{i \in S} w_i \Delta_i}{\sum_{i \in S} w_i}

``sgd`` with ``server_lr`` = 1 is plain averaging, :math:`x + \bar\Delta`. Other server optimizers, such as FedAvgM and
FedAdam, are in `optimizers`.

**Models stored for new clients** (`keeping_models`). Let mu_r be the global model after r rounds, and let S be the
number of slots of the store. The model mu_r is stored if r is a multiple of a stride k_r. The stride is the smallest
power of two with at most S multiples in 0 ... r (including 0):

.. math:: k_r = \min\{2^j : r < 2^j S\}, \qquad \text{mu}_r \text{ is stored if } k_r \mid r

Once every slot is used, a new model replaces the earliest model whose round is not a multiple of the stride. After the
stride has doubled, the models are thinned from the earliest on: the later models remain k_r / 2 rounds apart until they
are replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpfl.algorithms.parts.local_work import LocalWork, steps_within
from jaxpfl.algorithms.parts.optimizers import Optimizer, normalizes, resolve
from jaxpfl.core import trees
from jaxpfl.core.protocol import (
    Algorithm,
    Client,
    ClientContext,
    Message,
    Reduced,
    Reduction,
    Server,
    ServerContext,
    Stacked,
    Upload,
    check_same,
    wrapped_client,
    wrapped_server,
)
from jaxpfl.core.types import Array, ClientData, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task
from jaxpfl.support.errors import JaxpflError, warn


def averaging_server(task: Task) -> Server:
    """Make the server that averages one global model (see `mean_server`)."""
    return mean_server(task.init, lambda hp, mu, x: task.model.apply(mu, x))


def mean_server(
    init: Callable[[Key], PyTree], predict_global: Callable[[PyTree, PyTree, PyTree], Array] | None = None
) -> Server:
    """Make the server with ``mu <- mu + sum_i weight_i (w_i - mu) / sum_i weight_i``, for uploads from `increment`.

    Args:
      init: function that initializes mu from a random key; mu is a model, a part of a model, or several models.
      predict_global: the function `Server.predict_global`; None if mu is not one whole model.
    """

    def update(key: Key, hp: PyTree, ctx: ServerContext, mu: PyTree, reduced: Reduced) -> tuple[PyTree, Metrics]:
        check_same("Upload.total", reduced.total, mu, like="Message.shared", dtypes=False)
        return optax.apply_updates(mu, reduced.mean()), {}

    return Server(
        init=lambda key, hp, ctx: init(key),
        broadcast=lambda key, hp, ctx, mu: Message(mu),
        update=update,
        predict_global=predict_global,
    )


def increment(new: PyTree, old: PyTree, weight: Scalar | None = None) -> Upload:
    """Make an upload of the model update ``new - old`` with the given weight; None means weight 1."""
    change = optax.tree.sub(new, old)
    if weight is None:
        return Upload(change, jnp.ones(()))
    return Upload(optax.tree.scale(weight, change), weight)


def share_of_all(reduced: Reduced, ctx: ServerContext) -> Array:
    """Fraction |S| / m of all m clients that contribute, [], where S is the set of these clients.

    If u is the mean update of the clients in S, the mean over ALL m clients changes by this fraction times u.
    """
    return reduced.contributors.astype(jnp.result_type(float)) / ctx.num_clients


class Normalized(NamedTuple):
    """A client's weighted upload: the model update divided by the number of local steps, and this number, []."""

    change: PyTree
    steps: PyTree


def normalized(method: str, algorithm: Algorithm, work: LocalWork) -> Algorithm:
    """Wrap an averaging algorithm so that it normalizes model updates by FedNova.

    Args:
      method: the method's name, for errors.
      algorithm: algorithm whose uploads are model updates with one weight, and whose clients take the steps of
        ``work``.
      work: the local work in a round.

    Raises:
      JaxpflError: if the client optimizer is not plain SGD, because the steps of other optimizers contribute unequally
        to the update.
    """
    if work.optimizer != "sgd":
        raise JaxpflError(f"{method}.fednova requires client_optimizer = sgd, got {work.optimizer}")
    clients = tuple(_normalized_client(client, work) for client in algorithm.clients)
    increments = Normalized(change=algorithm.increments, steps=False)
    return algorithm._replace(clients=clients, server=_normalized_server(algorithm.server), increments=increments)


def _steps(work: LocalWork, ctx: ClientContext, data: ClientData) -> Array:
    own, limit = work.own_steps, steps_within(work.steps, ctx.step_limit)
    if own is not None:
        limit = jnp.minimum(limit, own.steps(data.size))
    return jnp.maximum(jnp.asarray(limit, jnp.result_type(float)), 1)


def _normalized_client(inner: Client, work: LocalWork) -> Client:
    def update(
        key: Key, hp: PyTree, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        state, upload, metrics = inner.update(key, hp, ctx, message, state, splits)
        steps = _steps(work, ctx, splits.train)
        total = Normalized(optax.tree.scale(1 / steps, upload.total), upload.weight * steps)
        return state, upload._replace(total=total), metrics

    return wrapped_client(inner, update=update)


def _normalized_server(inner: Server) -> Server:
    def update(key: Key, hp: PyTree, ctx: ServerContext, state: PyTree, reduced: Reduced) -> tuple[PyTree, Metrics]:
        total: Normalized = reduced.total
        steps = trees.prefix_divide(total.steps, reduced.weight)
        change = optax.tree.scale(steps, total.change)
        return inner.update(key, hp, ctx, state, reduced._replace(total=change))

    return wrapped_server(inner, init=inner.init, update=update, state=lambda state: state)


class WithOptState(NamedTuple):
    """State of a server with an optimizer: the state of the method's server, and the optimizer state."""

    state: PyTree
    memory: PyTree


def with_server_optimizer(
    algorithm: Algorithm,
    optimizer: Optimizer,
    *,
    acts_on: PyTree = None,
    averaged: Callable[[PyTree], PyTree] = lambda shared: shared,
) -> Algorithm:
    """Wrap an algorithm so that a server optimizer turns the mean model update into a step.

    The method's server receives this step as an increment with weight one. If the total weight of a round is zero, the
    step is zero and the optimizer state does not change. The learning rate is the hyper-parameter ``server_lr``
    (`AveragingHyper`), or 1 if the method has no such hyper-parameter.

    Args:
      algorithm: algorithm whose uploads have one weight, and whose server adds the mean upload (`Reduced.mean`) to a
        tree of the same structure.
      optimizer: a name with arguments, or a factory function. With ``sgd``, the updates are multiplied by the rate, and
        the server keeps no optimizer state. With any other optimizer, the server's state is a `WithOptState`.
      acts_on: tree prefix of the uploads, true for a model's parameters; parts marked false are averaged. If None,
        ``Algorithm.increments`` is used.
      averaged: function that selects the averaged part of `Message.shared`; by default, all of it.

    Raises:
      JaxpflError: if uploads are not summed, the server already has an optimizer, or the optimizer is unknown. An error
        is also raised when a round is traced if uploads have several weights, or a different structure from the
        averaged part of the message.
    """
    if algorithm.reduction is not Reduction.SUM:
        raise JaxpflError("a server optimizer requires summed uploads, but this server uses individual uploads")
    if algorithm.has_server_optimizer:
        raise JaxpflError(
            "this algorithm already has a server optimizer, and a second would apply server_lr twice: instead, set "
            "LocalWork.server_optimizer when you build the algorithm"
        )
    algorithm = algorithm._replace(has_server_optimizer=True)
    acts_on = algorithm.increments if acts_on is None else acts_on
    inner = algorithm.server
    if optimizer == "sgd":  # the sum is scaled: with a rate of one, the result then equals plain averaging exactly

        def scaled(key: Key, hp: PyTree, ctx: ServerContext, state: PyTree, reduced: Reduced) -> tuple[PyTree, Metrics]:
            rate, total = getattr(hp, "server_lr", 1.0), reduced.total
            new = jax.tree.map(lambda a: (rate * a).astype(a.dtype), total)
            total = jax.tree.map(lambda acts, new, old: new if acts else old, acts_on, new, total)
            return inner.update(key, hp, ctx, state, reduced._replace(total=total))

        return algorithm._replace(server=inner._replace(update=scaled))
    make = resolve(optimizer)

    def transformation(hp: PyTree) -> optax.GradientTransformation:
        # The optimizer's gradient is -mean. Scaling this gradient by -1 gives the mean, for the parts that are
        # averaged.
        own = make(getattr(hp, "server_lr", 1.0))
        return optax.partition({True: own, False: optax.scale(-1.0)}, acts_on)

    def start(key: Key, hp: PyTree, ctx: ServerContext, state: PyTree) -> PyTree:
        return transformation(hp).init(averaged(inner.broadcast(key, hp, ctx, state).shared))

    def step(
        key: Key, hp: PyTree, ctx: ServerContext, state: PyTree, memory: PyTree, reduced: Reduced
    ) -> tuple[Reduced, PyTree]:
        params, mean = averaged(inner.broadcast(key, hp, ctx, state).shared), reduced.mean()
        if jax.tree.structure(params) != jax.tree.structure(mean) or not _is_scalar(reduced.weight):
            raise JaxpflError(
                "a server optimizer requires uploads with a single weight and the tree structure of the broadcast"
            )
        updates, new_memory = transformation(hp).update(optax.tree.scale(-1.0, mean), memory, params)
        updates = jax.tree.map(lambda u, a: u.astype(a.dtype), updates, mean)
        anybody = reduced.weight > 0
        nothing = optax.tree.zeros_like(updates)
        updates, memory = trees.where(anybody, (updates, new_memory), (nothing, memory))
        return Reduced(updates, anybody.astype(reduced.weight.dtype), reduced.contributors), memory

    def init(key: Key, hp: PyTree, ctx: ServerContext) -> WithOptState:
        state = inner.init(key, hp, ctx)
        return WithOptState(state, start(key, hp, ctx, state))

    def update(
        key: Key, hp: PyTree, ctx: ServerContext, served: WithOptState, reduced: Reduced
    ) -> tuple[WithOptState, Metrics]:
        reduced, memory = step(key, hp, ctx, served.state, served.memory, reduced)
        state, metrics = inner.update(key, hp, ctx, served.state, reduced)
        return WithOptState(state, memory), metrics

    server = wrapped_server(inner, init=init, update=update, state=lambda served: served.state)
    return algorithm._replace(server=server)


def trained_part(task: Task, averaged: Callable[[PyTree], PyTree] = lambda params: params) -> PyTree:
    """Make the tree `Algorithm.increments` for uploads of a model update: false for running statistics, else true.

    Args:
      task: task with the model.
      averaged: function that selects the uploaded part of a model's parameters.
    """
    statistics = task.statistics
    if statistics is None:
        return True
    shapes = averaged(jax.eval_shape(task.init, jax.random.key(0)))
    return jax.tree.map_with_path(lambda path, _: not statistics.selects(trees.names(path)), shapes)


def check_rate(optimizer: Optimizer, server_lr: Scalar, *, strict: bool = False) -> None:
    """Warn if the server's learning rate is one or more and its optimizer normalizes gradients.

    Such an optimizer moves every parameter by about the learning rate in each round.

    Raises:
      JaxpflError: if the optimizer is unknown. With ``strict``, an error also replaces the warning.
    """
    resolve(optimizer)
    if normalizes(optimizer) and np.max(server_lr) >= 1:
        warn(
            f"server optimizer {optimizer} moves every parameter by about server_lr = {np.max(server_lr):g} in each "
            "round: values from 0.01 to 0.1 are usual",
            strict=strict,
        )


def _is_scalar(weight: PyTree) -> bool:
    leaves = jax.tree.leaves(weight)
    return len(leaves) == 1 and leaves[0] is weight and leaves[0].ndim == 0


_EMPTY = -1


class StoredModels(NamedTuple):
    """Past global models, leaves [S, ...], and their numbers of training rounds, [S] int32; -1 for an empty slot."""

    rounds: Array
    models: PyTree

    @property
    def present(self) -> Array:
        """Mask of used slots, [S] bool."""
        return self.rounds != _EMPTY


class Archive(NamedTuple):
    """State of a server with stored models: the state of the method's server, and the stored models."""

    state: PyTree
    stored: StoredModels


def begin_store(mu: PyTree, size: int) -> StoredModels:
    """Make `StoredModels` with ``size`` slots: the first contains the initial global model, the others are empty."""
    rounds = jnp.full(size, _EMPTY, jnp.int32).at[0].set(0)
    return StoredModels(rounds, jax.tree.map(lambda a: jnp.broadcast_to(a, (size, *a.shape)), mu))


def add_model(stored: StoredModels, round: Array, mu: PyTree) -> StoredModels:
    """Update the store with the global model mu after ``round`` rounds, [] int32."""
    rounds = stored.rounds
    quotient = jnp.asarray(round // rounds.shape[0], jnp.uint32)
    stride = jnp.left_shift(1, 32 - jax.lax.clz(quotient).astype(jnp.int32))  # 1 << (number of bits of the quotient)
    free = ~stored.present | (rounds % stride != 0)
    place = jnp.argmin(jnp.where(free, rounds, jnp.iinfo(rounds.dtype).max))  # empty slots have round -1 and go first
    kept = round % stride == 0

    def put(pool: Array, new: Array) -> Array:
        return pool.at[place].set(jnp.where(kept, new, pool[place]))

    return StoredModels(put(rounds, round.astype(rounds.dtype)), jax.tree.map(put, stored.models, mu))


def keeping_models(server: Server, size: int) -> Server:
    """Wrap the server of one global model so that it stores past models and sends them to new clients.

    The server stores up to ``size`` models in addition to its state. A new client receives them as a `StoredModels`,
    together with the current model (`Server.welcome`).
    """

    def model(key: Key, hp: PyTree, ctx: ServerContext, state: PyTree) -> PyTree:
        return server.broadcast(key, hp, ctx, state).shared

    def init(key: Key, hp: PyTree, ctx: ServerContext) -> Archive:
        state = server.init(key, hp, ctx)
        return Archive(state, begin_store(model(key, hp, ctx, state), size))

    def update(
        key: Key, hp: PyTree, ctx: ServerContext, archive: Archive, reduced: Reduced | Stacked
    ) -> tuple[Archive, Metrics]:
        state, metrics = server.update(key, hp, ctx, archive.state, reduced)
        after = ctx._replace(round=ctx.round + 1)
        return Archive(state, add_model(archive.stored, after.round, model(key, hp, after, state))), metrics

    def welcome(key: Key, hp: PyTree, ctx: ServerContext, archive: Archive) -> Message:
        return Message(model(key, hp, ctx, archive.state), archive.stored)

    wrapped = wrapped_server(server, init=init, update=update, state=lambda archive: archive.state)
    return wrapped._replace(welcome=welcome)
