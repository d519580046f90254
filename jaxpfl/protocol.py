"""The protocol: an algorithm is a few pure functions of ONE client and of a server that sees only uploads.

The engine owns the client axis: it gathers the cohort, maps the client's functions over it, masks, sums the uploads,
calls the server and scatters the clients' states back. Nothing in this file or in an algorithm mentions that axis.

Notation in the signatures: ``hp`` is the algorithm's hyper-parameters, a frozen dataclass pytree of traced scalars.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import trees
from jaxpfl.types import Array, Federation, Key, Metrics, PyTree, Scalar, Splits

ALL_STEPS = 2**31 - 1
"""``ClientContext.step_limit`` of a client that takes every step its method asks for."""


class ClientContext(NamedTuple):
    """What a client knows about the run.

    Attributes:
      round: [] int32, the number of finished rounds.
      client_id: [] int32.
      participations: [] int32, rounds in which this client has taken part before this one.
      step_limit: the most steps that the client takes, at most `ALL_STEPS`: a Python int (the trip count is then
        static) or a traced scalar. In ``personalize``, 0 asks for the personalised model BEFORE any adaptation.
      batch_key: key of the client's mini-batch order; the same in every round, so that rounds continue an epoch.
      idle_rounds: [] int32, rounds outside the cohort in which it has worked alone before this one (`Client.idle`).
    """

    round: Array
    client_id: Array
    participations: Array
    step_limit: Scalar
    batch_key: Key
    idle_rounds: Scalar = 0

    @property
    def local_steps(self) -> Scalar:
        """`step_limit` under its old name, which an algorithm's tau has as well."""
        warnings.warn("ClientContext.local_steps is step_limit now; the old name will go", DeprecationWarning, 2)
        return self.step_limit


class ServerContext(NamedTuple):
    """What the server knows: finished rounds ([] int32), m clients, and the expected cohort (public, a float)."""

    round: Scalar
    num_clients: int
    expected_cohort: float


class Message(NamedTuple):
    """What the server sends in a round.

    Attributes:
      shared: the tree that every client receives.
      per_client: what each client receives for itself: leaves [m, ...] where the server makes it, [...] at the client.
        None for nothing; then clients that were not trained can be served too.
    """

    shared: PyTree
    per_client: PyTree = None


class Upload(NamedTuple):
    """What leaves a client.

    Attributes:
      total: a tree of increments relative to the message, already multiplied by the weight.
      weight: a tree prefix of ``total`` with leaves [] or [k]. Zero for nothing to say.
      failed: [] bool, where a method looks after failures itself: whether the client's work was not finite. It then
        counts as diverged and keeps its state, and what it uploads is taken all the same (its share of a noise, say).
        With None, the engine finds out, and a client that failed uploads nothing.
      bits: [] int32, how many bits the upload takes on the wire, where it is sent in a code (`Algorithm.counts_bits`).
    """

    total: PyTree
    weight: PyTree
    failed: Array | None = None
    bits: Array | None = None


class Reduced(NamedTuple):
    """The sum over the cohort's uploads, and how many clients contributed to it ([] int32)."""

    total: PyTree
    weight: PyTree
    contributors: Array

    def mean(self) -> PyTree:
        """``total / weight``, zero where nobody had weight: adding it leaves a server unchanged."""
        return trees.prefix_divide(self.total, self.weight)


class Stacked(NamedTuple):
    """The cohort's uploads side by side, C slots; what is not valid is zero.

    Attributes:
      total, weight: the uploads, leaves [C, ...].
      valid: [C] bool, whether the slot holds an upload.
      rows: [C] int32, the uploader's row in everything that is stacked by client (`Message.per_client`); m where not
        valid, so that writing with mode "drop" skips it.
    """

    total: PyTree
    weight: PyTree
    valid: Array
    rows: Array

    @property
    def contributors(self) -> Array:
        """How many clients contributed, [] int32."""
        return self.valid.sum(dtype=jnp.int32)

    def summed(self) -> Reduced:
        """What the reduction SUM would have given."""
        total, weight = jax.tree.map(lambda a: a.sum(axis=0), (self.total, self.weight))
        return Reduced(total, weight, self.contributors)


class Reduction(Enum):
    """What the server receives.

    ``SUM``: a `Reduced`; the memory is one upload, whatever the cohort. ``STACK``: a `Stacked`, for servers that must
    tell uploads apart (a mixture over them, medians, graphs); the memory is one upload for each slot of the cohort, on
    every device.
    """

    SUM = "sum"
    STACK = "stack"


class Gradients(NamedTuple):
    """Gradients that a client's functions evaluate, as its method declares them.

    The unit is one backward pass through one model on one mini-batch. An objective of several terms of a model is one,
    a step on k models k. Forward passes are not counted: losses that choose a cluster or weigh examples, scores,
    AdaPeD's derivative by psi.

    Attributes:
      update: ``(steps, message) -> [] int32``, of a round in the cohort with ``ctx.step_limit`` = steps.
      personalize: of the whole adaptation.
      idle: ``steps -> [] int32``, of a round outside the cohort (`Client.idle`).
    """

    update: Callable[[Scalar, Message], Scalar]
    personalize: int = 0
    idle: Callable[[Scalar], Scalar] | None = None


class Client(NamedTuple):
    """Pure functions of one client.

    Attributes:
      init: ``(key, hp, ctx, message) -> state``, from the round-0 broadcast. A client without memory returns ``()``.
      update: ``(key, hp, ctx, message, state, splits) -> (state, Upload, metrics)``, a round in the cohort. Metrics are
        scalars by name; ``train_loss`` is the one that progress displays show.
      personalize: ``(key, hp, ctx, message, state, splits) -> personal``; read-only on the state; returns everything
        that ``predict`` needs. With ``ctx.step_limit == 0`` it takes no step.
      predict: ``(hp, personal, x [n, ...]) -> logits [n, classes]``.
      idle: ``(key, hp, ctx, state, splits) -> (state, metrics)``, a round outside the cohort: the client works alone
        with what it has. None for a client that then rests.
      cluster: ``(hp, message, state, splits) -> [] int32``, the cluster that the client counts itself to. None where
        clients choose none.
      gradients: how many gradients these functions evaluate. None where the method does not say; nothing is then
        reported of it.
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
      broadcast: ``(key, hp, ctx, state) -> Message``, what the clients of the cohort receive.
      update: ``(key, hp, ctx, state, Reduced | Stacked) -> (state, metrics)``.
      predict_global: ``(hp, state, x [n, ...]) -> logits``, or None for a method without one global model.
      welcome: ``(key, hp, ctx, state) -> Message``, what a client receives that was never trained, the part for itself
        with leaves [...] as it receives them. None for what ``broadcast`` sends.
    """

    init: Callable[[Key, PyTree, ServerContext], PyTree]
    broadcast: Callable[[Key, PyTree, ServerContext, PyTree], Message]
    update: Callable[[Key, PyTree, ServerContext, PyTree, Any], tuple[PyTree, Metrics]]
    predict_global: Callable[[PyTree, PyTree, PyTree], Array] | None = None
    welcome: Callable[[Key, PyTree, ServerContext, PyTree], Message] | None = None


def by_turns(client_ids: np.ndarray, groups: int) -> np.ndarray:
    """Deals clients to groups by their ids: id modulo the number of groups."""
    return client_ids % groups


def any_data(federation: Federation) -> None:
    """Refuses nothing."""


class NoiseStream(NamedTuple):
    """What the noise of a private algorithm is drawn from, beside the run's seed, data and hyper-parameters.

    Attributes:
      name: what tells the algorithm from others: its method, settings and mechanism. Two that differ share no noise,
        of which the difference of their releases would be free.
      secret: drawn from the operating system instead, and kept by the run's state alone.
    """

    name: str
    secret: bool = False


class Algorithm(NamedTuple):
    """A federated method: what clients do and what the server does with the uploads.

    Attributes:
      clients: one entry for each group of clients that work differently (other architectures, say). States may differ
        between groups; uploads, messages and metrics have one structure.
      server: the server.
      local_steps: tau, the steps of a client that does its whole work in a round.
      reduction: what the server receives.
      idle_cap: the most rounds in a row that a client outside the cohort works alone (with ``Client.idle``).
      group_of: ``(client ids [m], number of groups) -> [m]``, the group of each client; on the host.
      check_data: refuses a federation that the method cannot serve, before anything is compiled; on the host.
      counts_bits: whether uploads say how many bits they take (``Upload.bits``), to be counted.
      clusters: ``the server's state -> [m]``, the cluster of each client in the order of the stack, for a method whose
        server finds some; on the host, of one run. Clients that choose say so by `Client.cluster`.
      noise: of an algorithm whose releases are private. Its cohorts, too, are then drawn from that stream, as what is
        claimed of several runs together needs cohorts that are independent.
    """

    clients: tuple[Client, ...]
    server: Server
    local_steps: int
    reduction: Reduction = Reduction.SUM
    idle_cap: int = 0
    group_of: Callable[[np.ndarray, int], np.ndarray] = by_turns
    check_data: Callable[[Federation], None] = any_data
    counts_bits: bool = False
    clusters: Callable[[PyTree], np.ndarray] | None = None
    noise: NoiseStream | None = None

    @property
    def counts_gradients(self) -> bool:
        """Whether all of its clients say how many gradients they evaluate."""
        said = (client.gradients for client in self.clients)
        return all(own is not None and (own.idle is not None or not self.idle_cap) for own in said)
