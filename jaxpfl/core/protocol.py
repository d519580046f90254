"""Algorithm protocol: pure functions of ONE client, and of a server that sees only uploads.

Only the engine handles the axis over clients: it gathers the cohort, maps the client's functions over the cohort, masks
empty slots, sums the uploads, calls the server, and scatters the clients' new states back. A client's functions are
written without this axis.

In the signatures, ``hp`` are the algorithm's hyper-parameters, a frozen dataclass that is a pytree of traced scalars.

`wrapped_server` and `wrapped_client` wrap a method and forward every function that the wrapper does not change. The
wrapper's state contains the method's state. The wrapper may add to messages and hyper-parameters, and the method does
not see these additions.
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
    """Local work of a round, given as passes over a client's examples and rounded up to whole mini-batches.

    A client with n_i examples takes ``ceil(epochs n_i / b_i)`` steps of ``b_i = min(batch_size, n_i)`` examples.

    Attributes:
      epochs: number E of passes in a round.
      batch_size: number b of examples in a mini-batch; a client with fewer examples uses all of them.
      batches: number of mini-batches that each step uses.
    """

    epochs: int
    batch_size: int
    batches: int = 1

    def steps(self, size: Array) -> Array:
        """Number of steps that a client takes in a round, [] int32.

        A client without examples takes as many steps as a client with one example.

        Examples:
          >>> int(LocalEpochs(1, 10).steps(jnp.int32(34)))
          4
        """
        size = jnp.maximum(size, 1)
        used = jnp.minimum(size, self.batch_size)
        return (self.epochs * size + used - 1) // used

    def draws(self, size: Array) -> Array:
        """Number of mini-batches that a client draws in a round, [] int32."""
        return self.batches * self.steps(size)

    def on_host(self, sizes: np.ndarray) -> np.ndarray:
        """Compute `steps` on the host for clients with the given numbers of examples, [m]."""
        sizes = np.maximum(np.asarray(sizes, np.int64), 1)
        used = np.minimum(sizes, self.batch_size)
        return -(-self.epochs * sizes // used)


ALL_STEPS = 2**31 - 1
"""Value of ``ClientContext.step_limit`` that means no limit."""


class ClientContext(NamedTuple):
    """Information about the run that a client's functions receive.

    Attributes:
      round: number of finished rounds, [] int32.
      client_id: id of the client, [] int32.
      participations: number of earlier rounds in which the client was in the cohort, [] int32.
      step_limit: largest number of steps that the client may take, at most `ALL_STEPS`: a Python int (the number of
        loop iterations is then static) or a traced scalar. In ``personalize``, 0 requests the personalized model BEFORE
        any adaptation.
      batch_key: key of the client's mini-batch order; the same in every round, so that a round continues the epoch in
        which the previous round ended.
      idle_rounds: number of earlier rounds in which the client trained outside the cohort (`Client.idle`), [] int32.
      staleness: number of rounds that ended after the client received the message and before it uploaded, [] int32; 0
        in synchronous rounds. A method may weight uploads by their staleness.
    """

    round: Array
    client_id: Array
    participations: Array
    step_limit: Scalar
    batch_key: Key
    idle_rounds: Scalar = 0
    staleness: Scalar = 0


class ServerContext(NamedTuple):
    """Information about the run that the server's functions receive: the number of finished rounds ([] int32), the
    number m of clients, and the expected cohort size (a float, public).
    """

    round: Scalar
    num_clients: int
    expected_cohort: float


class Message(NamedTuple):
    """The server's broadcast in a round.

    Attributes:
      shared: the tree that every client receives.
      per_client: individual messages, with leaves [m, ...] at the server and [...] at a client. None if there are no
        individual messages, so that a new client can receive the broadcast too.
    """

    shared: PyTree
    per_client: PyTree = None


class Upload(NamedTuple):
    """Upload of a client.

    Attributes:
      total: tree of increments relative to the message (a model update, say), already multiplied by the weight.
      weight: weight of the client in the mean, a tree prefix of ``total`` with leaves [] or [k]. With weight zero, the
        client contributes nothing.
      failed: whether the client's results were not finite, [] bool, for a method that handles failures itself. The
        client then counts as diverged and keeps its earlier state, but its upload is still used, for example because it
        contains the client's share of the noise. If None, the engine detects failures, and a failed client uploads
        nothing.
      bits: length in bits of the coded upload, [] int32, if uploads are compressed (`Algorithm.counts_bits`).
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
    """Stack of the cohort's uploads in C slots; slots without an upload are zero.

    Attributes:
      total, weight: stacks of the uploads' totals and weights, with leaves [C, ...].
      valid: mask of the slots with an upload, [C] bool.
      rows: row of each slot's client in stacks over clients (`Message.per_client`), [C] int32; m for a slot without an
        upload, so that writing with mode "drop" skips the slot.
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
        """Return the `Reduced` that the reduction SUM would give."""
        total, weight = jax.tree.map(lambda a: a.sum(axis=0), (self.total, self.weight))
        return Reduced(total, weight, self.contributors)


class Reduction(Enum):
    """Form in which the server receives the cohort's uploads.

    With ``SUM``, the server receives a `Reduced`, which takes the memory of one upload. With ``STACK``, it receives a
    `Stacked`, for servers that need individual uploads (mixtures, medians, graphs). A `Stacked` takes the memory of one
    upload for each slot of the cohort, on every device.
    """

    SUM = "sum"
    STACK = "stack"


class Gradients(NamedTuple):
    """Declared counts of a client's gradient evaluations: in a round, in personalization, and outside the cohort.

    The unit is one backward pass through one model on one mini-batch. An objective with several terms in one model
    counts once, and a step on k models counts k times. Forward passes alone are not counted, for example for the choice
    of a cluster, the weights of examples, evaluation metrics, and AdaPeD's derivative with respect to psi.

    Attributes:
      update: function that counts the gradients of a round in the cohort, ``(limit, message) -> [] int32``, where limit
        is ``ctx.step_limit`` and ``jnp.minimum(work.steps, limit)`` steps are taken. `ALL_STEPS` means no limit.
      personalize: count for the whole personalization: a number, or a `LocalEpochs` if the count depends on a client's
        number of examples.
      idle: function that counts the gradients of a round outside the cohort (`Client.idle`), ``limit -> [] int32``.
    """

    update: Callable[[Scalar, Message], Scalar]
    personalize: int | LocalEpochs = 0
    idle: Callable[[Scalar], Scalar] | None = None


class Client(NamedTuple):
    """Pure functions of one client.

    Attributes:
      init: function that computes the initial state, ``(key, hp, ctx, message) -> state``. The message is the broadcast
        of round 0 or, for an unseen client, the server's current message. A stateless client returns ``()``. The key is
        the same for all clients, so all clients draw the same initial parameters. Fold in ``ctx.client_id`` for a key
        that differs between clients.
      update: function that performs a round of a client in the cohort,
        ``(key, hp, ctx, message, state, splits) -> (state, Upload, metrics)``. Metrics are a dict of scalars. Progress
        displays show ``train_loss``.
      personalize: function that computes the personalized model, ``(key, hp, ctx, message, state, splits) ->
        personal``, for ``predict``. The client's state does not change. With ``ctx.step_limit == 0`` no step is taken.
      predict: function that computes predictions, ``(hp, personal, x [n, ...]) -> logits [n, classes]``.
      idle: function that performs a round of training outside the cohort,
        ``(key, hp, ctx, state, splits) -> (state, metrics)``. None if clients do not train outside the cohort.
      cluster: function that chooses the client's cluster, ``(hp, message, state, splits) -> [] int32``. None if clients
        choose no cluster.
      gradients: counts of the client's gradient evaluations. If None, reports omit them.
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
      init: function that computes the initial state, ``(key, hp, ctx) -> state``.
      broadcast: function that makes the message to the cohort, ``(key, hp, ctx, state) -> Message``.
      update: function that updates the state with the cohort's uploads,
        ``(key, hp, ctx, state, Reduced | Stacked) -> (state, metrics)``.
      predict_global: function that predicts with the global model, ``(hp, state, x [n, ...]) -> logits``; None for a
        method without one global model.
      welcome: function that makes the message to a new client, ``(key, hp, ctx, state) -> Message``; its
        ``Message.per_client`` has no client axis. If None, a new client receives the message of ``broadcast``.
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
    """Accept every federation; the default of ``Algorithm.check_data``."""


class NoiseStream(NamedTuple):
    """Identity of a private algorithm's random noise; the noise key also depends on the run's seed, data and settings.

    Attributes:
      name: string that identifies the algorithm's method, settings and mechanism. Different algorithms must not share
        noise, because shared noise would cancel in the difference of their releases.
      secret: whether the noise key is drawn from the operating system's entropy, rather than derived from ``name``,
        seed, data and settings. A secret key is stored only in the run's state.
    """

    name: str
    secret: bool = False


class Algorithm(NamedTuple):
    """Federated algorithm: functions of the clients and of the server.

    Attributes:
      clients: one `Client` for each group of clients that share functions, such as a group with its own architecture.
        The structure of states may differ between groups. Uploads, messages and metrics must have equal structures.
      server: the server.
      local_steps: number tau of local steps that a client without a step limit takes in a round.
      reduction: form in which the server receives the uploads: their sum, or a stack of individual uploads.
      idle_cap: largest number of consecutive rounds in which a client trains outside the cohort (``Client.idle``).
      group_of: function that assigns clients to groups, ``(client ids [m], number of groups) -> [m]``; called on the
        host.
      check_data: function that refuses an unsuitable federation before compilation; called on the host.
      counts_bits: whether uploads have ``Upload.bits``, which are then counted.
      clusters: function from the server's state to each client's cluster, [m], in the order of the stack of clients;
        None if the server forms no clusters. The function is called on the host with the state of one run. For clusters
        that clients choose, see `Client.cluster`.
      noise: noise stream of a private algorithm; None for any other algorithm. Cohorts are drawn from this stream too,
        because guarantees over several runs need independent cohorts.
      pooled: whether one model is trained on the training examples of all clients, as if a single client had them all.
        The pooled client takes part in every round and never fails; nothing is exchanged. All clients are evaluated
        with the pooled client's state, and new clients do not adapt.
      own_steps: number of steps as a function of a client's number of examples, at most tau; None if all clients take
        tau steps.
      guarded: whether each client's noise protects its individual examples, in training and in personalization.
      in_flight: number of clients that train concurrently in asynchronous rounds; None for synchronous rounds. A round
        ends when as many uploads have arrived as a cohort has clients. 0 means twice the size of the cohort, but at
        most all clients. Uploads must have as many bytes as ``Message.shared``, and there must be no individual
        messages.
      increments: tree prefix of ``Upload.total``, true for increments, and false for parts that neither attacks nor
        compressors may change, such as numbers of steps, moments and running statistics.
      has_server_optimizer: whether the server's update applies ``server_lr`` (`algorithms.with_server_optimizer`).
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
        """True if all entries of ``clients`` declare their gradient evaluations."""
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
    """Wrap a method's server. The wrapper's ("outer") state contains the state of the method's server.

    Args:
      inner: the method's server.
      init, update: functions as in `Server`, but with the outer state.
      state: function that extracts the method's state from the outer state.
      hyper: function that extracts the method's hyper-parameters from the outer hyper-parameters.
      send: function that may add to every message of the method, ``(message, outer state) -> message``.
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
    """Wrap a method's client. The wrapper's ("outer") state, message and hyper-parameters contain the method's own.

    Args:
      inner: the method's client.
      update: function as in `Client`, but with the outer state, message and hyper-parameters.
      init: function as in `Client`, but with the outer state; if None, the outer state is the method's state.
      state: function that extracts the method's state from the outer state.
      keep: function that puts the method's new state into the outer state after a round outside the cohort.
      hyper: function that extracts the method's hyper-parameters from the outer hyper-parameters.
      received: function that extracts the method's message from the outer message.
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
