r"""Servers: averages of the clients' model updates, FedNova's, a server optimizer, and models kept for new clients.

With :math:`\Delta_i` the model update of client i after :math:`\tau_i` SGD steps (fewer of a straggler, or of a client
with few examples where work is in epochs) and :math:`p_i` its share of the weights, the server adds

.. math:: \Bigl( \sum_i p_i \tau_i \Bigr) \sum_i p_i \frac{\Delta_i}{\tau_i}

in place of :math:`\sum_i p_i \Delta_i`, which would weigh clients by their steps too and so converge to the minimiser
of another objective. Where all take as many steps they are the same. Weight decay counts as part of the gradient.

Reference: Wang et al. 2020, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
https://arxiv.org/abs/2007.07481, equation (10) for SGD without momentum.

.. math:: x \leftarrow x + \operatorname{step}(-\bar\Delta), \qquad
   \bar\Delta = \frac{\sum_{i \in S} w_i \Delta_i}{\sum_{i \in S} w_i}

with :math:`\Delta_i` the update and w_i the weight of client i in the cohort S. ``sgd`` at ``server_lr`` = 1 is plain
averaging, :math:`x + \bar\Delta`; `optimizers` has FedAvgM, FedAdam and others.

Of the models mu_0 ... mu_r the server keeps at most S, equally spaced over the rounds so far: the models of rounds
that are multiples of a stride k_r, which doubles whenever S multiples would not reach round r.

.. math:: k_r = \min\{2^j : r < 2^j S\}, \qquad \text{mu}_r \text{ is kept if } k_r \mid r

A new model replaces the earliest one whose round is not a multiple of the stride, once every slot is used. Between two
doublings the early models are k_r apart and the late ones still k_r / 2.
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
    wrapped_client,
    wrapped_server,
)
from jaxpfl.core.protocol_checks import check_same
from jaxpfl.core.types import Array, ClientData, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.models import Task
from jaxpfl.support.errors import JaxpflError, warn


def averaging_server(task: Task) -> Server:
    """Server of one global model, as `mean_server`."""
    return mean_server(task.init, lambda hp, mu, x: task.model.apply(mu, x))


def mean_server(
    init: Callable[[Key], PyTree], predict_global: Callable[[PyTree, PyTree, PyTree], Array] | None = None
) -> Server:
    """Server with ``mu <- mu + sum_i weight_i (w_i - mu) / sum_i weight_i``; uploads are `increment`s.

    Args:
      init: ``key -> mu``: a model, a part of one, or several.
      predict_global: the function `Server.predict_global`; None where mu is not one whole model.
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
    """Upload of the model update ``new - old`` with that weight; without one, of weight 1."""
    change = optax.tree.sub(new, old)
    if weight is None:
        return Upload(change, jnp.ones(()))
    return Upload(optax.tree.scale(weight, change), weight)


def share_of_all(reduced: Reduced, ctx: ServerContext) -> Array:
    """Share |S| / m of contributors: times their mean update, the change of a mean over ALL m clients, []."""
    return reduced.contributors.astype(jnp.result_type(float)) / ctx.num_clients


class Normalized(NamedTuple):
    """A client's weighted upload: its model update per local step, and its number of steps, []."""

    change: PyTree
    steps: PyTree


def normalized(method: str, algorithm: Algorithm, work: LocalWork) -> Algorithm:
    """An algorithm that averages model updates of one weight, by FedNova.

    Args:
      method: its name in an error.
      algorithm: one whose clients take the steps of ``work``.
      work: the local work in a round.

    Raises:
      JaxpflError: for another client optimizer than plain SGD, whose steps do not count the same.
    """
    if work.optimizer != "sgd":
        raise JaxpflError(f"{method}.fednova needs client_optimizer = sgd, got {work.optimizer}")
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
      optimizer: a name with arguments, or a factory; the server's state is then a `WithOptState`. With ``sgd`` it is
        the method's own, and the updates are multiplied by the rate.
      acts_on: a tree prefix of the uploads, true for a model's parameters. The rest is averaged. None for
        ``Algorithm.increments``.
      averaged: the part of the broadcast's ``shared`` that it averages; all of it by default.

    Raises:
      JaxpflError: for a method whose uploads are not summed or whose server has an optimizer, or if the optimizer is
        unknown; when traced, for uploads of another structure than the broadcast or of several weights.
    """
    if algorithm.reduction is not Reduction.SUM:
        raise JaxpflError("a server optimizer needs summed uploads: the server of this method reads each upload")
    if algorithm.has_server_optimizer:
        raise JaxpflError(
            "this algorithm already has a server optimizer, and a second would apply server_lr twice: set "
            "LocalWork.server_optimizer when building it"
        )
    algorithm = algorithm._replace(has_server_optimizer=True)
    acts_on = algorithm.increments if acts_on is None else acts_on
    if optimizer == "sgd":
        return _scale_changes(algorithm, acts_on)
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
            raise JaxpflError("a server optimizer needs uploads of one weight and the structure of the broadcast")
        updates, new_memory = transformation(_rate(hp)).update(optax.tree.scale(-1.0, mean), memory, params)
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


def _scale_changes(algorithm: Algorithm, acts_on: PyTree) -> Algorithm:
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


_EMPTY = -1


class StoredModels(NamedTuple):
    """Past global models, leaves [S, ...], and their numbers of finished rounds, [S] int32; -1 for an empty slot."""

    rounds: Array
    models: PyTree

    @property
    def present(self) -> Array:
        """Mask of used slots, [S] bool."""
        return self.rounds != _EMPTY


class Archive(NamedTuple):
    """State of a server with stored models: the method's own, and the models."""

    state: PyTree
    stored: StoredModels


def begin_store(mu: PyTree, size: int) -> StoredModels:
    """Initial store of ``size`` slots, with mu_0 in the first."""
    rounds = jnp.full(size, _EMPTY, jnp.int32).at[0].set(0)
    return StoredModels(rounds, jax.tree.map(lambda a: jnp.broadcast_to(a, (size, *a.shape)), mu))


def add_model(stored: StoredModels, round: Array, mu: PyTree) -> StoredModels:
    """Store after ``round`` rounds, [] int32, whose global model is mu."""
    rounds = stored.rounds
    quotient = jnp.asarray(round // rounds.shape[0], jnp.uint32)
    stride = jnp.left_shift(1, 32 - jax.lax.clz(quotient).astype(jnp.int32))  # 1 << (how many bits the quotient has)
    free = ~stored.present | (rounds % stride != 0)
    place = jnp.argmin(jnp.where(free, rounds, jnp.iinfo(rounds.dtype).max))  # empty ones first
    kept = round % stride == 0

    def put(pool: Array, new: Array) -> Array:
        return pool.at[place].set(jnp.where(kept, new, pool[place]))

    return StoredModels(put(rounds, round.astype(rounds.dtype)), jax.tree.map(put, stored.models, mu))


def keeping_models(server: Server, size: int) -> Server:
    """Server of one global model that stores ``size`` of them and sends them to new clients.

    New clients receive a `StoredModels` (`Server.welcome`): ``size`` models more, as many as the server holds more.
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
