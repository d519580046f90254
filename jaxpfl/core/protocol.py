"""Algorithm protocol: pure functions of ONE client, and of a server that sees only uploads.

The engine owns the client axis: it gathers the cohort, maps the client's functions over it, masks, sums the uploads,
calls the server and scatters the clients' states back. Neither this file nor an algorithm mentions that axis.

Notation in the signatures: ``hp`` is the algorithm's hyper-parameters, a frozen dataclass pytree of traced scalars.

`wrapped_server` and `wrapped_client` forward whatever a wrapper of a method does not change. A wrapper has a state of
its own around the method's, and may put something into messages and hyper-parameters; the method sees neither.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import trees
from jaxpfl.core.types import Array, Federation, Key, Metrics, PyTree, Scalar, Splits


class LocalEpochs(NamedTuple):
    """Local work of a round in passes over a client's examples, rounded up to whole mini-batches.

    With n_i examples a client takes ``ceil(epochs n_i / b_i)`` steps of ``b_i = min(batch_size, n_i)`` examples.

    Attributes:
      epochs: E, passes in a round.
      batch_size: b.
      batches: mini-batches of a step.
    """

    epochs: int
    batch_size: int
    batches: int = 1

    def steps(self, size: Array) -> Array:
        """Steps of a client in a round, [] int32; one without examples has one.

        Examples:
          >>> int(LocalEpochs(1, 10).steps(jnp.int32(34)))
          4
        """
        size = jnp.maximum(size, 1)
        used = jnp.minimum(size, self.batch_size)
        return (self.epochs * size + used - 1) // used

    def draws(self, size: Array) -> Array:
        """Mini-batches of a client in a round, [] int32."""
        return self.batches * self.steps(size)

    def on_host(self, sizes: np.ndarray) -> np.ndarray:
        """Steps of clients with these numbers of examples, [m]; on the host."""
        sizes = np.maximum(np.asarray(sizes, np.int64), 1)
        used = np.minimum(sizes, self.batch_size)
        return -(-self.epochs * sizes // used)


ALL_STEPS = 2**31 - 1
"""``ClientContext.step_limit`` of a client without a limit."""


class ClientContext(NamedTuple):
    """Information of a client about the run.

    Attributes:
      round: [] int32, the number of finished rounds.
      client_id: [] int32.
      participations: [] int32, the client's previous rounds in the cohort.
      step_limit: the most steps that the client may take, at most `ALL_STEPS`: a Python int (the trip count is then
        static) or a traced scalar. In ``personalize``, 0 asks for the personalised model BEFORE any adaptation.
      batch_key: key of the client's mini-batch order; the same in every round, so that rounds continue an epoch.
      idle_rounds: [] int32, the client's previous rounds of training outside the cohort (`Client.idle`).
      staleness: [] int32, rounds that ended between the message and the client's upload; 0 in synchronous rounds. What
        the server would weigh the upload by.
    """

    round: Array
    client_id: Array
    participations: Array
    step_limit: Scalar
    batch_key: Key
    idle_rounds: Scalar = 0
    staleness: Scalar = 0


class ServerContext(NamedTuple):
    """Information of the server: finished rounds ([] int32), m clients, and the expected cohort (public, a float)."""

    round: Scalar
    num_clients: int
    expected_cohort: float


class Message(NamedTuple):
    """Broadcast of the server in a round.

    Attributes:
      shared: the tree that every client receives.
      per_client: individual messages: leaves [m, ...] at the server, [...] at a client. None for none; new clients can
        then be served too.
    """

    shared: PyTree
    per_client: PyTree = None


class Upload(NamedTuple):
    """Upload of a client.

    Attributes:
      total: a tree of increments relative to the message (a model update, say), already multiplied by the weight.
      weight: a tree prefix of ``total`` with leaves [] or [k]. Zero for no contribution.
      failed: [] bool, for a method that handles failures itself: true if the client's work was not finite. The client
        then counts as diverged and keeps its state, but its upload is used (its share of a noise, say). With None, the
        engine detects failures, and a failed client uploads nothing.
      bits: [] int32, the length of the coded upload, where it is compressed (`Algorithm.counts_bits`).
    """

    total: PyTree
    weight: PyTree
    failed: Array | None = None
    bits: Array | None = None


class Reduced(NamedTuple):
    """Sum over the cohort's uploads, and the number of contributing clients ([] int32)."""

    total: PyTree
    weight: PyTree
    contributors: Array

    def mean(self) -> PyTree:
        """Weighted mean ``total / weight``; zero where the weight is zero."""
        return trees.prefix_divide(self.total, self.weight)


class Stacked(NamedTuple):
    """Stack of the cohort's uploads in C slots; zero where not valid.

    Attributes:
      total, weight: the uploads, leaves [C, ...].
      valid: [C] bool, mask of slots with an upload.
      rows: [C] int32, the client's row in stacks over clients (`Message.per_client`); m where not valid, so that
        writing with mode "drop" skips it.
    """

    total: PyTree
    weight: PyTree
    valid: Array
    rows: Array

    @property
    def contributors(self) -> Array:
        """Number of contributing clients, [] int32."""
        return self.valid.sum(dtype=jnp.int32)

    def summed(self) -> Reduced:
        """Result of the reduction SUM."""
        total, weight = jax.tree.map(lambda a: a.sum(axis=0), (self.total, self.weight))
        return Reduced(total, weight, self.contributors)


class Reduction(Enum):
    """Reduction of the cohort's uploads for the server.

    ``SUM``: a `Reduced`, in the memory of one upload. ``STACK``: a `Stacked`, for servers that need individual uploads
    (mixtures, medians, graphs), in the memory of one upload for each slot of the cohort, on every device.
    """

    SUM = "sum"
    STACK = "stack"


class Gradients(NamedTuple):
    """Gradient evaluations of a client's functions, as its method declares them.

    The unit is one backward pass through one model on one mini-batch. An objective with several terms of one model
    counts once, a step on k models k times. Forward passes are not counted: losses that choose a cluster or weigh
    examples, scores, AdaPeD's derivative by psi.

    Attributes:
      update: ``(limit, message) -> [] int32``, the count for a round in the cohort with ``ctx.step_limit`` = limit,
        which is `ALL_STEPS` where there is none: ``jnp.minimum(work.steps, limit)`` steps are taken.
      personalize: count for the whole personalisation, a number; a `LocalEpochs` if it depends on a client's examples.
      idle: ``limit -> [] int32``, the count for a round outside the cohort (`Client.idle`).
    """

    update: Callable[[Scalar, Message], Scalar]
    personalize: int | LocalEpochs = 0
    idle: Callable[[Scalar], Scalar] | None = None


class Client(NamedTuple):
    """Pure functions of one client.

    Attributes:
      init: ``(key, hp, ctx, message) -> state``, from the round-0 broadcast. A stateless client returns ``()``. The key
        is the same for all clients, so that models drawn from it start alike; with ``ctx.client_id`` folded in, it is
        the client's own.
      update: ``(key, hp, ctx, message, state, splits) -> (state, Upload, metrics)``, a round in the cohort. Metrics are
        scalars by name; progress displays show ``train_loss``.
      personalize: ``(key, hp, ctx, message, state, splits) -> personal``, all that ``predict`` needs; does not change
        the state. With ``ctx.step_limit == 0`` it takes no step.
      predict: ``(hp, personal, x [n, ...]) -> logits [n, classes]``.
      idle: ``(key, hp, ctx, state, splits) -> (state, metrics)``, a round of training outside the cohort. None for no
        training there.
      cluster: ``(hp, message, state, splits) -> [] int32``, the client's choice of a cluster. None without such a
        choice.
      gradients: numbers of gradient evaluations. None if undeclared; they are then not reported.
    """

    init: Callable[[Key, PyTree, ClientContext, Message], PyTree]
    update: Callable[[Key, PyTree, ClientContext, Message, PyTree, Splits], tuple[PyTree, Upload, Metrics]]
    personalize: Callable[[Key, PyTree, ClientContext, Message, PyTree, Splits], PyTree]
    predict: Callable[[PyTree, PyTree, PyTree], Array]
    idle: Callable[[Key, PyTree, ClientContext, PyTree, Splits], tuple[PyTree, Metrics]] | None = None
    cluster: Callable[[PyTree, Message, PyTree, Splits], Array] | None = None
    gradients: Gradients | None = None


class Server(NamedTuple):
    """Pure functions of the server.

    Attributes:
      init: ``(key, hp, ctx) -> state``.
      broadcast: ``(key, hp, ctx, state) -> Message``, to the cohort.
      update: ``(key, hp, ctx, state, Reduced | Stacked) -> (state, metrics)``.
      predict_global: ``(hp, state, x [n, ...]) -> logits``, or None for a method without one global model.
      welcome: ``(key, hp, ctx, state) -> Message``, to a new client, ``per_client`` with leaves [...]. None for the
        message of ``broadcast``.
    """

    init: Callable[[Key, PyTree, ServerContext], PyTree]
    broadcast: Callable[[Key, PyTree, ServerContext, PyTree], Message]
    update: Callable[[Key, PyTree, ServerContext, PyTree, Any], tuple[PyTree, Metrics]]
    predict_global: Callable[[PyTree, PyTree, PyTree], Array] | None = None
    welcome: Callable[[Key, PyTree, ServerContext, PyTree], Message] | None = None


def round_robin(client_ids: np.ndarray, groups: int) -> np.ndarray:
    """Assign clients to groups: id modulo the number of groups."""
    return client_ids % groups


def any_data(federation: Federation) -> None:
    """Accept every federation."""


class NoiseStream(NamedTuple):
    """Source of a private algorithm's noise, beside the run's seed, data and hyper-parameters.

    Attributes:
      name: text of its method, settings and mechanism. Algorithms that differ share no noise, as the difference of
        their releases would be free of it.
      secret: drawn from the operating system instead, and stored in the run's state alone.
    """

    name: str
    secret: bool = False


class Algorithm(NamedTuple):
    """Federated algorithm: functions of the clients and of the server.

    Attributes:
      clients: one entry for each group of clients with functions of their own (other architectures, say). States may
        differ between groups; uploads, messages and metrics have one structure.
      server: the server.
      local_steps: tau, the full number of local steps in a round.
      reduction: reduction of the uploads for the server.
      idle_cap: the most rounds in a row that a client trains outside the cohort (``Client.idle``).
      group_of: ``(client ids [m], number of groups) -> [m]``, the group of each client; on the host.
      check_data: refuses an unsuitable federation before compilation; on the host.
      counts_bits: uploads have ``Upload.bits``, to be counted.
      clusters: ``server state -> [m]``, the cluster of each client in the order of the stack, for a method whose server
        finds clusters; on the host, of one run. Clients' own choices are `Client.cluster`.
      noise: noise stream of a private algorithm; None for any other. Cohorts are drawn from it too, as guarantees over
        several runs need independent cohorts.
      pooled: one client, which never fails, holds the training examples of all and takes part in every round; nothing
        is exchanged. Every client is scored with its state, without training examples, and a new one does not adapt.
      own_steps: number of a client's steps by its examples, at most tau; None where it is tau for all.
      guarded: clients draw the noise that protects their examples, in personalisation too.
      in_flight: number of clients at work at once, for asynchronous rounds; None for synchronous ones. A round
        takes the next arrivals, as many as a cohort has. 0 means twice the cohort, at most all clients. Uploads are as
        long as ``Message.shared``, and there are no individual messages.
      increments: tree prefix of ``Upload.total``; false for numbers of steps, moments, running statistics and the like,
        which neither attacks nor compressors may change.
      has_server_optimizer: the server's update applies ``server_lr`` (`algorithms.with_server_optimizer`).
    """

    clients: tuple[Client, ...]
    server: Server
    local_steps: int
    reduction: Reduction = Reduction.SUM
    idle_cap: int = 0
    group_of: Callable[[np.ndarray, int], np.ndarray] = round_robin
    check_data: Callable[[Federation], None] = any_data
    counts_bits: bool = False
    clusters: Callable[[PyTree], np.ndarray] | None = None
    noise: NoiseStream | None = None
    pooled: bool = False
    own_steps: LocalEpochs | None = None
    guarded: bool = False
    in_flight: int | None = None
    increments: PyTree = True
    has_server_optimizer: bool = False

    @property
    def counts_gradients(self) -> bool:
        """True if all of its clients declare their gradient evaluations."""
        said = (client.gradients for client in self.clients)
        return all(own is not None and (own.idle is not None or not self.idle_cap) for own in said)


def _identity(value: Any) -> Any:
    return value


def _unchanged(message: Message, outer: PyTree) -> Message:
    return message


def _forget(outer: PyTree, own: PyTree) -> PyTree:
    return own


def wrapped_server(
    inner: Server,
    *,
    init: Callable[[Key, PyTree, ServerContext], PyTree],
    update: Callable[[Key, PyTree, ServerContext, PyTree, Any], tuple[PyTree, Metrics]],
    state: Callable[[PyTree], PyTree],
    hyper: Callable[[PyTree], PyTree] = _identity,
    send: Callable[[Message, PyTree], Message] = _unchanged,
) -> Server:
    """Server with another state around the method's.

    Args:
      inner: the method's server.
      init, update: functions as in `Server`, but for the outer state.
      state: ``outer state -> the method's``.
      hyper: ``outer hyper-parameters -> the method's``.
      send: ``(message, outer state) -> message``, for what every message holds besides the method's.
    """

    def broadcast(key: Key, hp: PyTree, ctx: ServerContext, outer: PyTree) -> Message:
        return send(inner.broadcast(key, hyper(hp), ctx, state(outer)), outer)

    predict, greet = inner.predict_global, inner.welcome

    def predict_global(hp: PyTree, outer: PyTree, x: PyTree) -> Array:
        assert predict is not None
        return predict(hyper(hp), state(outer), x)

    def welcome(key: Key, hp: PyTree, ctx: ServerContext, outer: PyTree) -> Message:
        assert greet is not None
        return send(greet(key, hyper(hp), ctx, state(outer)), outer)

    return Server(init, broadcast, update, predict and predict_global, greet and welcome)


def wrapped_client(
    inner: Client,
    *,
    update: Callable[[Key, PyTree, ClientContext, Message, PyTree, Splits], tuple[PyTree, Upload, Metrics]],
    init: Callable[[Key, PyTree, ClientContext, Message], PyTree] | None = None,
    state: Callable[[PyTree], PyTree] = _identity,
    keep: Callable[[PyTree, PyTree], PyTree] = _forget,
    hyper: Callable[[PyTree], PyTree] = _identity,
    received: Callable[[Message], Message] = _identity,
) -> Client:
    """Client with another state, message or hyper-parameters around the method's.

    Args:
      inner: the method's client.
      update: function as in `Client`, but for the outer state, message and hyper-parameters.
      init: likewise; None for the method's own state.
      state: ``outer state -> the method's``.
      keep: ``(outer state, the method's new one) -> outer state``, after a round outside the cohort.
      hyper: ``outer hyper-parameters -> the method's``.
      received: ``outer message -> the method's``.
    """

    def own_init(key: Key, hp: PyTree, ctx: ClientContext, message: Message) -> PyTree:
        return inner.init(key, hyper(hp), ctx, received(message))

    def personalize(
        key: Key, hp: PyTree, ctx: ClientContext, message: Message, outer: PyTree, splits: Splits
    ) -> PyTree:
        return inner.personalize(key, hyper(hp), ctx, received(message), state(outer), splits)

    def predict(hp: PyTree, personal: PyTree, x: PyTree) -> Array:
        return inner.predict(hyper(hp), personal, x)

    alone, choose, gradients = inner.idle, inner.cluster, inner.gradients

    def idle(key: Key, hp: PyTree, ctx: ClientContext, outer: PyTree, splits: Splits) -> tuple[PyTree, Metrics]:
        assert alone is not None
        own, metrics = alone(key, hyper(hp), ctx, state(outer), splits)
        return keep(outer, own), metrics

    def cluster(hp: PyTree, message: Message, outer: PyTree, splits: Splits) -> Array:
        assert choose is not None
        return choose(hyper(hp), received(message), state(outer), splits)

    if gradients is not None:
        count = gradients.update
        gradients = gradients._replace(update=lambda steps, message: count(steps, received(message)))
    return Client(init or own_init, update, personalize, predict, alone and idle, choose and cluster, gradients)
