"""Scoring: every client's examples under the global model and under its own, before and after adaptation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl import contract, trees
from jaxpfl.cohort_draws import CohortNumbers
from jaxpfl.engine.cohort import Outcome, run_cohort
from jaxpfl.engine.groups import gather
from jaxpfl.engine.round import Clients, RoundPlan
from jaxpfl.engine.state import RunState, server_context
from jaxpfl.errors import JaxpflError
from jaxpfl.models import Task
from jaxpfl.protocol import ALL_STEPS, Algorithm, Client, ClientContext, Message
from jaxpfl.randomness import Purpose, stream
from jaxpfl.types import Array, ClientData, Key, Metrics, PyTree, Scalar, Splits

Scores = Mapping[str, Metrics]
"""Model (``global``, ``before``, ``after``) -> metric -> its mean over each client's examples, [m].

``global`` is missing for a method without one global model. A client without examples in the split has NaN.
``after`` has one more entry, ``diverged``: [m] bool, whether the adaptation gave a non-finite model; such a client is
scored with the model before.
"""

Part = Literal["test", "validation"]


class Personal(NamedTuple):
    """A client's personalised model before and after its adaptation, and whether the latter is finite, [] bool."""

    before: PyTree
    after: PyTree
    finite: Array


class Today(NamedTuple):
    """Inputs that all clients share: the run's key, finished rounds, hyper-parameters, server state and message.

    ``welcome`` is the message to new clients, and ``rounds`` the number of rounds that these then train.
    """

    key: Key
    round: Array
    hp: PyTree
    server: PyTree
    sent: PyTree
    welcome: PyTree = None
    rounds: Scalar = 0


Work = Callable[[Today, PyTree, PyTree], PyTree]
"""``(today, client's state, client's data) -> result``."""


def make_evaluate(
    algorithm: Algorithm, task: Task, plan: RoundPlan, *, split: Part
) -> Callable[[RunState, PyTree, Clients], Scores]:
    """Build ``(state, hp, clients) -> Scores`` on one split.

    Personalisation sees the training and validation examples only. Its stream depends on the client, not on the
    round or the split. Its batches are drawn as those of a client that takes part for the first time.
    """

    def work_of(client: Client) -> Work:
        def score(today: Today, own: PyTree, data: tuple[Splits, ClientData, Array, PyTree]) -> Scores:
            splits, examples, client_id, per_client = data
            personal = _personalize(client, today, client_id, per_client, own, splits)
            return _score(algorithm, client, task, today, personal, examples)

        return score

    def evaluate(state: RunState, hp: PyTree, clients: Clients) -> Scores:
        today, per_client = _today(algorithm, plan, state, hp, clients)
        data = [
            (f.splits, getattr(f, split), jnp.asarray(f.client_ids), group.take(per_client))
            for f, group in zip(clients.federations, plan.groups, strict=True)
        ]
        return gather(_each_group(algorithm, plan, work_of, today, state.clients, data, clients.numbers), plan.groups)

    return evaluate


def make_personal(algorithm: Algorithm, plan: RoundPlan) -> Callable[[RunState, PyTree, Clients], tuple[PyTree, ...]]:
    """Build ``(state, hp, clients) -> personalised models``, for each group one tree with leaves [m, ...].

    `make_evaluate` scores them as ``after``.
    """

    def work_of(client: Client) -> Work:
        def adapted(today: Today, own: PyTree, data: tuple[Splits, Array, PyTree]) -> PyTree:
            splits, client_id, per_client = data
            return _personalize(client, today, client_id, per_client, own, splits).after

        return adapted

    read = _reader(algorithm, plan, work_of)
    return lambda state, hp, clients: tuple(read(state, hp, clients))


def make_clusters(algorithm: Algorithm, plan: RoundPlan) -> Callable[[RunState, PyTree, Clients], Array]:
    """Build ``(state, hp, clients) -> each client's cluster, [m]``."""

    def work_of(client: Client) -> Work:
        def choose(today: Today, own: PyTree, data: tuple[Splits, Array, PyTree]) -> Array:
            assert client.cluster is not None
            splits, _, per_client = data
            return client.cluster(today.hp, Message(today.sent, per_client), own, splits)

        return choose

    read = _reader(algorithm, plan, work_of)
    return lambda state, hp, clients: gather(read(state, hp, clients), plan.groups)


def make_adapt(
    algorithm: Algorithm, task: Task, plan: RoundPlan, *, split: Part
) -> Callable[[RunState, PyTree, Clients, Array], Scores]:
    """Build ``(state, hp, unseen clients, rounds) -> Scores`` for clients that were never trained.

    Each starts as a new client does (``Client.init``), takes ``rounds`` rounds of ``Client.update`` with today's
    message at the rate of the last round, its uploads discarded, and is then personalised and scored as any other.
    ``before`` is its model on arrival, without a local step. ``after`` has, if the method counts them, the
    ``gradients`` that each evaluated in these rounds and for its personalised model, [u] int32.

    Args:
      plan: its groups and participation are those of the unseen clients.
    """

    def work_of(client: Client) -> Work:
        def arrive(today: Today, own: tuple[()], data: tuple[Splits, ClientData, Array]) -> Scores:
            splits, examples, client_id = data
            batch_key = stream(today.key, Purpose.BATCHES, client_id)
            last_round = jnp.maximum(today.round - 1, 0)
            message = Message(today.sent, today.welcome)

            def context(participations: Scalar) -> ClientContext:
                return ClientContext(last_round, client_id, participations, ALL_STEPS, batch_key)

            init_key = stream(today.key, Purpose.CLIENT_INIT, client_id)
            start = client.init(init_key, today.hp, context(jnp.int32(0)), message)

            def one(nth: Array, own: PyTree) -> PyTree:
                key = stream(today.key, Purpose.ADAPT, client_id, nth)
                new, _, _ = contract.updated(client, key, today.hp, context(nth), message, own, splits)
                return trees.where(trees.all_finite(new), new, own)

            adapted = jax.lax.fori_loop(0, today.rounds, one, start)
            personal = _personalize(client, today, client_id, today.welcome, adapted, splits)
            on_arrival = _personal(client, today, client_id, today.welcome, start, splits, 0)
            scores = _score(algorithm, client, task, today, personal._replace(before=on_arrival), examples)
            if client.gradients is not None:
                in_rounds = today.rounds * client.gradients.update(ALL_STEPS, message)
                scores["after"]["gradients"] = jnp.int32(in_rounds + client.gradients.personalize)
            return scores

        return arrive

    def adapt(state: RunState, hp: PyTree, clients: Clients, rounds: Array) -> Scores:
        today, per_client = _today(algorithm, plan, state, hp, clients, newcomers=True)
        today = today._replace(rounds=rounds)
        if algorithm.server.welcome is not None:
            today = today._replace(welcome=per_client)
        elif jax.tree.leaves(per_client):
            raise JaxpflError("unseen clients cannot be served: this method's server sends each client its own message")
        data = [(f.splits, getattr(f, split), jnp.asarray(f.client_ids)) for f in clients.federations]
        return gather(_each_group(algorithm, plan, work_of, today, ((),) * len(data), data), plan.groups)

    return adapt


def _today(
    algorithm: Algorithm, plan: RoundPlan, state: RunState, hp: PyTree, clients: Clients, *, newcomers: bool = False
) -> tuple[Today, PyTree]:
    """Inputs that all clients share, and each client's own part of the message; or those of new clients."""
    ctx = server_context(plan.participation.at(clients.numbers), state.round)
    key = stream(state.key, Purpose.BROADCAST, state.round)
    send = (newcomers and algorithm.server.welcome) or algorithm.server.broadcast
    message = send(key, hp, ctx, state.server)
    return Today(state.key, state.round, hp, state.server, message.shared), message.per_client


def _personalize(
    client: Client, today: Today, client_id: Array, per_client: PyTree, own: PyTree, splits: Splits
) -> Personal:
    given = (client, today, client_id, per_client, own, splits)
    before, after = _personal(*given, 0), _personal(*given, ALL_STEPS)
    contract.check_shapes("client.personalize: model", after, before, like="without a step: model")
    finite = trees.all_finite(after)
    return Personal(before, trees.where(finite, after, before), finite)


def _personal(
    client: Client,
    today: Today,
    client_id: Array,
    per_client: PyTree,
    own: PyTree,
    splits: Splits,
    step_limit: int,
) -> PyTree:
    """The client's personalised model after at most so many steps of its adaptation."""
    key = stream(today.key, Purpose.PERSONALIZE, client_id)
    batch_key = stream(today.key, Purpose.PERSONALIZE_BATCHES, client_id)
    ctx = ClientContext(today.round, client_id, jnp.int32(0), step_limit, batch_key)
    return client.personalize(key, today.hp, ctx, Message(today.sent, per_client), own, splits)


def _score(
    algorithm: Algorithm, client: Client, task: Task, today: Today, personal: Personal, examples: ClientData
) -> dict[str, Metrics]:
    if not examples.mask.shape[0]:  # nobody has examples, and many models refuse an empty batch
        examples = jax.tree.map(lambda a: jnp.zeros((1, *a.shape[1:]), a.dtype), examples)
    logits = {name: client.predict(today.hp, getattr(personal, name), examples.x) for name in ("before", "after")}
    if algorithm.server.predict_global is not None:
        logits["global"] = algorithm.server.predict_global(today.hp, today.server, examples.x)
    for name, values in logits.items():
        function = "server.predict_global" if name == "global" else "client.predict"
        contract.check_prediction(function, values, examples.mask.shape[0])
    means = {name: _means(task, values, examples) for name, values in logits.items()}
    means["after"]["diverged"] = ~personal.finite
    return means


def _reader(
    algorithm: Algorithm, plan: RoundPlan, work_of: Callable[[Client], Work]
) -> Callable[[RunState, PyTree, Clients], list[PyTree]]:
    """Build ``(state, hp, clients) -> results of each group's clients``; they see no test example."""

    def read(state: RunState, hp: PyTree, clients: Clients) -> list[PyTree]:
        today, per_client = _today(algorithm, plan, state, hp, clients)
        data = [
            (f.splits, jnp.asarray(f.client_ids), group.take(per_client))
            for f, group in zip(clients.federations, plan.groups, strict=True)
        ]
        return _each_group(algorithm, plan, work_of, today, state.clients, data, clients.numbers)

    return read


def _each_group(
    algorithm: Algorithm,
    plan: RoundPlan,
    work_of: Callable[[Client], Work],
    today: Today,
    states: tuple[PyTree, ...],
    data: list[PyTree],
    numbers: CohortNumbers | None = None,
) -> list[PyTree]:
    """Results of each group's clients, leaves [size, ...]; none for a group without clients.

    Args:
      numbers: given where the last of the rows may be nobody's, whose results are arbitrary.
    """
    kept = []
    for client, group, own, given in zip(algorithm.clients, plan.groups, states, data, strict=True):
        if not group.size:
            continue
        work = work_of(client)

        def one(today: Today, present: Array, own: PyTree, given: PyTree, work: Work = work) -> Outcome:
            return Outcome((), (), work(today, own, given))

        rows = jnp.arange(group.size, dtype=jnp.int32)
        outcome = run_cohort(
            one,
            today,
            rows if numbers is None else jnp.where(rows < numbers.clients, rows, group.size),
            own,
            given,
            num_clients=group.size,
            block=plan.block,
            everyone=True,
            spread=plan.spread and plan.spread._replace(even=False),
        )
        kept.append(outcome.kept)
    return kept


def _means(task: Task, logits: Array, examples: ClientData) -> Metrics:
    count = examples.mask.sum()

    def mean(name: str, metric: Callable[[Array, Array], Array]) -> Array:
        values = metric(logits, examples.y)
        contract.check_metric(name, values, examples.mask.shape[0])
        total = jnp.where(examples.mask, values, 0).sum()
        return jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.nan)

    return {name: mean(name, metric) for name, metric in task.metrics.items()}
