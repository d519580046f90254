"""Algorithm protocol: pure functions of ONE client, and of a server that sees only uploads.

Only the engine handles the axis over clients: it gathers the cohort, maps the client's functions over the cohort, masks
empty slots, sums the uploads, calls the server, and scatters the clients' new states back. A client's functions are
written without this axis.

In the signatures, ``hp`` are the algorithm's hyper-parameters, a frozen dataclass that is a pytree of traced scalars.

`wrapped_server` and `wrapped_client` wrap a method and forward every function that the wrapper does not change. The
wrapper's state contains the method's state. The wrapper may add to messages and hyper-parameters, and the method does
not see these additions.

`call_update` and the other functions that call a method check by shape and dtype that the method keeps to the protocol.
The checks run while a program is traced and add nothing to the program. Without them, ``jnp.where`` and ``+`` would
broadcast a leaf of a wrong shape, and the result would be wrong without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from numbers import Number
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jaxpfl.core import trees
from jaxpfl.core.types import Array, Federation, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.support.errors import JaxpflError, shown


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


def call_update(client: Client, *given: Any) -> tuple[PyTree, Upload, Metrics]:
    """Call ``client.update(key, hp, ctx, message, state, splits)`` and check the result.

    Raises:
      JaxpflError: if the result is not (state, `Upload`, metrics), or the new state differs from the old state in
        structure, shape or dtype.
    """
    new, upload, metrics = _returned("client.update", client.update(*given), "state", "Upload", "metrics")
    if not isinstance(upload, Upload):
        raise JaxpflError(
            f"client.update must return (state, Upload, metrics), but the second value has type {type(upload).__name__}"
        )
    check_same("client.update: state", new, given[4], like="client.init's state")
    _check_upload(upload)
    return new, upload, metrics


def call_idle(client: Client, *given: Any) -> tuple[PyTree, Metrics]:
    """Call ``client.idle(key, hp, ctx, state, splits)`` and check the result.

    Raises:
      JaxpflError: if the result is not (state, metrics), or the new state differs from the old state in structure,
        shape or dtype.
    """
    assert client.idle is not None
    new, metrics = _returned("client.idle", client.idle(*given), "state", "metrics")
    check_same("client.idle: state", new, given[3], like="client.init's state")
    return new, metrics


def call_server(server: Server, *given: Any, shared: PyTree) -> tuple[PyTree, Metrics]:
    """Call ``server.update(key, hp, ctx, state, Reduced or Stacked)`` and check the result.

    Args:
      shared: `Message.shared`, the part of the message that all clients receive.

    Raises:
      JaxpflError: if the result is not (state, metrics), or the new state differs from the old state in structure,
        shape or dtype. If the call itself fails, and the uploads differ from ``shared`` in structure (or in shape, if
        uploads are summed), the error names this difference as the likely cause. Without a failure, such a difference
        is allowed, because a method may upload a tree that differs from the message.
    """
    try:
        result = server.update(*given)
    except (TypeError, ValueError) as error:
        uploads = given[4]
        try:
            if isinstance(uploads, Stacked):
                uploads, shared = jax.tree.map(lambda _: np.zeros(()), (uploads, shared))
            check_same("Upload.total", uploads.total, shared, like="Message.shared", dtypes=False)
        except JaxpflError as difference:
            said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise JaxpflError(f"server.update failed ({said}); {difference}") from error
        raise
    new, metrics = _returned("server.update", result, "state", "metrics")
    check_same("server.update: state", new, given[3], like="server.init's state")
    return new, metrics


def call_gradients(count: Callable[..., Scalar], limit: Scalar, *given: Any) -> Scalar:
    """Call a function of `protocol.Gradients` and check the count that it returns.

    Args:
      count: the function.
      limit: `ClientContext.step_limit`; the count can be checked only if the limit is static.
      given: further arguments of the function.

    Raises:
      JaxpflError: if the count is negative, or so large that `ALL_STEPS` was used as if it were a number of steps.
    """
    found = count(limit, *given)
    if isinstance(found, int) and not 0 <= found < ALL_STEPS:
        raise JaxpflError(
            f"Gradients counted {found} gradients in a round: count jnp.minimum(work.steps, limit), because limit is "
            f"{ALL_STEPS} if there is no limit, or use jaxpfl.algorithms.gradients"
        )
    return found


def check_message(message: Any, num_clients: int) -> None:
    """Check that a broadcast is a `Message`, and that its individual messages have a row for each client.

    Raises:
      JaxpflError: if the broadcast is not a `Message`, or a leaf has a different number of rows; the error names the
        leaf.
    """
    if not isinstance(message, Message):
        raise JaxpflError(f"server.broadcast must return a Message, got a {type(message).__name__}")
    _check_arrays("server.broadcast: Message.per_client", message.per_client)
    for path, leaf in jax.tree.leaves_with_path(message.per_client):
        if leaf.shape[:1] != (num_clients,):
            raise JaxpflError(
                f"server.broadcast: Message.per_client{keystr(path)} is {_typed(leaf)}, but must have a leading "
                f"axis of {num_clients} clients"
            )


def check_prediction(what: str, logits: Any, examples: int) -> None:
    """Check that a prediction, which errors call ``what``, is an array with a row for each example.

    Raises:
      JaxpflError: if the prediction is not such an array; the error gives the shape.
    """
    if getattr(logits, "shape", ())[:1] != (examples,):
        raise JaxpflError(f"{what} must have a row for each of {examples} examples, got {_typed(logits)}")


def check_metric(name: str, values: Any, *examples: int) -> None:
    """Check that a task's metric has the right shape.

    A metric of examples has one number for each example. It must not be a mean over the examples, because such a mean
    would include padding.

    Args:
      name: the metric's name, for the error.
      values: the metric's value.
      examples: expected shape, the number of examples; omit it for a metric that is one number for each client.

    Raises:
      JaxpflError: if the shape is wrong; the error gives the shape.
    """
    if not _is_number(values, examples):
        each = f"each of {examples[0]} examples" if examples else "a client"
        raise JaxpflError(f"the task's metric {name!r} must be one number for {each}, got {_typed(values)}")


def check_same(what: str, got: PyTree, want: PyTree, *, like: str, dtypes: bool = True) -> None:
    """Check that two trees have the same structure, shapes and (with ``dtypes``) dtypes.

    Args:
      what: name of the tree ``got`` in the error, such as ``"client.update: state"``.
      got: the tree to check.
      want: tree with the expected structure, shapes and dtypes.
      like: name of the tree ``want`` in the error.
      dtypes: whether dtypes are compared too.

    Raises:
      JaxpflError: if the trees differ; the error names the first leaf that differs.
    """
    _check_arrays(what, got)
    _check_arrays(like, want)
    if jax.tree.structure(got) != jax.tree.structure(want):
        raise JaxpflError(f"{what} differs in structure from {like}: {_structures(got, want)}")
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        if a.shape != b.shape or (dtypes and a.dtype != b.dtype):
            raise JaxpflError(f"{what}{keystr(path)} is {_typed(a)}, but {like}{keystr(path)} is {_typed(b)}")


def _check_upload(upload: Upload) -> None:
    """Check that an upload consists of arrays, and that its weight is a tree prefix of its total.

    Each leaf of the weight corresponds to one or several leaves of the total, whose shapes must begin with the shape of
    the weight's leaf.

    Raises:
      JaxpflError: if a check fails; the error names the part of the upload.
    """
    for name in ("total", "weight"):
        _check_arrays(f"client.update: Upload.{name}", getattr(upload, name))

    def check(path: tuple[Any, ...], weight: Array, part: PyTree) -> None:
        for leaf in jax.tree.leaves(part):
            if leaf.shape[: weight.ndim] != weight.shape:
                raise JaxpflError(
                    f"client.update: Upload.weight{keystr(path)} has shape {list(weight.shape)}, which must be a "
                    f"prefix of the shape of Upload.total, {list(leaf.shape)}"
                )

    try:
        jax.tree.map_with_path(check, upload.weight, upload.total)
    except (TypeError, ValueError) as error:
        raise JaxpflError(
            "client.update must return an Upload whose weight is a tree prefix of its total: "
            f"{_structures(upload.weight, upload.total)}"
        ) from error


def _returned(what: str, result: Any, *names: str) -> Any:
    """Return a method function's result after checking that it is a tuple with one value for each of ``names``.

    The last value, the metrics, must be a dict of scalars.
    """
    if not isinstance(result, tuple) or len(result) != len(names):
        kind = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise JaxpflError(f"{what} must return ({', '.join(names)}), got {kind}")
    *_, metrics = result
    if not isinstance(metrics, dict):
        raise JaxpflError(f"{what}: metrics must be a dict of scalars, got {shown(metrics)}")
    for name, value in metrics.items():
        if not _is_number(value):
            raise JaxpflError(f"{what}: metric {name!r} must be a scalar, got {_typed(value)}")
    return result


def _check_arrays(what: str, tree: PyTree) -> None:
    """Refuse a tree, which errors call ``what``, with a leaf that is not an array."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            raise JaxpflError(f"{what}{keystr(path)} must be an array, got {shown(leaf)}")


def _structures(got: PyTree, want: PyTree) -> str:
    """Describe the difference between two trees: the first leaf that only one tree has, or else the two structures."""
    own, other = ([keystr(path) for path, _ in jax.tree.leaves_with_path(tree)] for tree in (got, want))
    for mine, theirs, said in ((own, other, "has a leaf"), (other, own, "lacks the leaf")):
        alone = [path for path in mine if path not in theirs]
        if alone and alone[0]:
            return f"it {said} {alone[0]}"
    first, second = (shown(jax.tree.structure(tree), 200) for tree in (got, want))
    return f"{first} for {second}"


def _is_number(value: Any, shape: tuple[int, ...] = ()) -> bool:
    """True for an array of this shape; a Python number has the shape ()."""
    return getattr(value, "shape", () if isinstance(value, Number) else None) == shape


def _typed(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else shown(leaf)
