"""The protocol: an algorithm is a few pure functions of ONE client and of a server that sees only uploads.

The engine owns the client axis: it gathers the cohort, maps the client's functions over it, masks, sums the uploads,
calls the server and scatters the clients' states back. Nothing in this file or in an algorithm mentions that axis.

Notation in the signatures: ``hp`` is the algorithm's hyper-parameters, a frozen dataclass pytree of traced scalars.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxpfl import trees
from jaxpfl.types import Array, Key, Metrics, PyTree, Scalar, Splits

ALL_STEPS = 2**31 - 1
"""``ClientContext.local_steps`` of a client that takes every step its method asks for."""


class ClientContext(NamedTuple):
    """What a client knows about the run.

    Attributes:
      round: [] int32, the number of finished rounds.
      client_id: [] int32.
      participations: [] int32, rounds in which this client has taken part before this one.
      local_steps: the most steps that the client takes, at most `ALL_STEPS`: a Python int (the trip count is then
        static) or a traced scalar. In ``personalize``, 0 asks for the personalised model BEFORE any adaptation.
      batch_key: key of the client's mini-batch order; the same in every round, so that rounds continue an epoch.
    """

    round: Array
    client_id: Array
    participations: Array
    local_steps: Scalar
    batch_key: Key


class ServerContext(NamedTuple):
    """What the server knows: finished rounds ([] int32), m clients, and the expected cohort (public, a float)."""

    round: Array
    num_clients: int
    expected_cohort: float


class Upload(NamedTuple):
    """What leaves a client.

    Attributes:
      total: a tree of increments relative to the message, already multiplied by the weight.
      weight: a tree prefix of ``total`` with leaves [] or [k]. Zero for nothing to say.
    """

    total: PyTree
    weight: PyTree


class Reduced(NamedTuple):
    """The sum over the cohort's uploads, and how many clients contributed to it ([] int32)."""

    total: PyTree
    weight: PyTree
    contributors: Array

    def mean(self) -> PyTree:
        """``total / weight``, zero where nobody had weight: adding it leaves a server unchanged."""
        return trees.prefix_divide(self.total, self.weight)


class Client(NamedTuple):
    """Pure functions of one client.

    Attributes:
      init: ``(key, hp, ctx, message) -> state``, from the round-0 broadcast. A client without memory returns ``()``.
      update: ``(key, hp, ctx, message, state, splits) -> (state, Upload, metrics)``, a round in the cohort. Metrics are
        scalars by name; ``train_loss`` is the one that progress displays show.
      personalize: ``(key, hp, ctx, message, state, splits) -> personal``; read-only on the state; returns everything
        that ``predict`` needs. With ``ctx.local_steps == 0`` it takes no step.
      predict: ``(hp, personal, x [n, ...]) -> logits [n, classes]``.
    """

    init: Callable[[Key, PyTree, ClientContext, PyTree], PyTree]
    update: Callable[[Key, PyTree, ClientContext, PyTree, PyTree, Splits], tuple[PyTree, Upload, Metrics]]
    personalize: Callable[[Key, PyTree, ClientContext, PyTree, PyTree, Splits], PyTree]
    predict: Callable[[PyTree, PyTree, PyTree], Array]


class Server(NamedTuple):
    """Pure functions of the server.

    Attributes:
      init: ``(key, hp, ctx) -> state``.
      broadcast: ``(key, hp, ctx, state) -> message``, the tree that every client of the cohort receives.
      update: ``(key, hp, ctx, state, Reduced) -> (state, metrics)``.
      predict_global: ``(hp, state, x [n, ...]) -> logits``, or None for a method without one global model.
    """

    init: Callable[[Key, PyTree, ServerContext], PyTree]
    broadcast: Callable[[Key, PyTree, ServerContext, PyTree], PyTree]
    update: Callable[[Key, PyTree, ServerContext, PyTree, Reduced], tuple[PyTree, Metrics]]
    predict_global: Callable[[PyTree, PyTree, PyTree], Array] | None = None


class Algorithm(NamedTuple):
    """A federated method: what a client does and what the server does with the sum of the uploads."""

    client: Client
    server: Server
