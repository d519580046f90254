"""Scoring: every client's examples under the global model and under its own, before and after adaptation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl import trees
from jaxpfl.engine.cohort import Outcome, run_cohort
from jaxpfl.engine.groups import gather
from jaxpfl.engine.round import RoundPlan
from jaxpfl.engine.state import RunState, server_context
from jaxpfl.errors import JaxpflError
from jaxpfl.models import Task
from jaxpfl.protocol import ALL_STEPS, Algorithm, Client, ClientContext, Message
from jaxpfl.randomness import Purpose, stream
from jaxpfl.types import Array, ClientData, Federation, Key, Metrics, PyTree, Scalar, Splits

Scores = Mapping[str, Metrics]
"""Which model (``global``, ``before``, ``after``) -> metric -> its mean over each client's examples, [m].

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


Work = Callable[[PyTree, PyTree], PyTree]
"""``(client's state, client's data) -> what is kept of it``."""


def make_evaluate(
    algorithm: Algorithm, task: Task, plan: RoundPlan, *, split: Part
) -> Callable[[RunState, PyTree, tuple[Federation, ...]], Scores]:
    """Builds ``(state, hp, federations) -> Scores`` on one split.

    Personalisation sees the training and validation examples only. Its stream depends on the client, not on the
    round or the split. Its batches are drawn as those of a client that takes part for the first time.
    """

    def evaluate(state: RunState, hp: PyTree, federations: tuple[Federation, ...]) -> Scores:
        message = _message(algorithm, plan, state, hp)

        def work_of(client: Client) -> Work:
            def score(own: PyTree, data: tuple[Splits, ClientData, Array, PyTree]) -> Scores:
                splits, examples, client_id, per_client = data
                received = Message(message.shared, per_client)
                personal = _personalize(client, state.key, hp, state.round, client_id, received, own, splits)
                return _score(algorithm, client, task, hp, state.server, personal, examples)

            return score

        data = [(f.splits, getattr(f, split), jnp.asarray(f.client_ids)) for f in federations]
        data = [(*d, group.take(message.per_client)) for d, group in zip(data, plan.groups, strict=True)]
        return _over_everyone(algorithm, plan, work_of, state.clients, data)

    return evaluate


def make_personal(
    algorithm: Algorithm, plan: RoundPlan
) -> Callable[[RunState, PyTree, tuple[Federation, ...]], tuple[PyTree, ...]]:
    """Builds ``(state, hp, federations) -> personalised models``, for each group one tree with leaves [m, ...].

    They are those that `make_evaluate` scores as ``after``.
    """

    def personal(state: RunState, hp: PyTree, federations: tuple[Federation, ...]) -> tuple[PyTree, ...]:
        message = _message(algorithm, plan, state, hp)

        def work_of(client: Client) -> Work:
            def adapted(own: PyTree, data: tuple[Splits, Array, PyTree]) -> PyTree:
                splits, client_id, per_client = data
                received = Message(message.shared, per_client)
                return _personalize(client, state.key, hp, state.round, client_id, received, own, splits).after

            return adapted

        data = [(f.splits, jnp.asarray(f.client_ids)) for f in federations]
        data = [(*d, group.take(message.per_client)) for d, group in zip(data, plan.groups, strict=True)]
        return tuple(_each_group(algorithm, plan, work_of, state.clients, data))

    return personal


def make_adapt(
    algorithm: Algorithm, task: Task, plan: RoundPlan, *, rounds: int, split: Part
) -> Callable[[RunState, PyTree, tuple[Federation, ...]], Scores]:
    """Builds ``(state, hp, federations of unseen clients) -> Scores``: clients that were never trained arrive.

    Each starts as a new client does (``Client.init``), takes ``rounds`` rounds of ``Client.update`` with today's
    message at the rate of the last round, its uploads discarded, and is then personalised and scored as any other.
    ``before`` is what it has on arrival, without a local step.

    Args:
      plan: its groups and participation are those of the unseen clients.
    """

    def adapt(state: RunState, hp: PyTree, federations: tuple[Federation, ...]) -> Scores:
        message = _message(algorithm, plan, state, hp)
        if jax.tree.leaves(message.per_client):
            raise JaxpflError("unseen clients cannot be served: this method's server sends each client its own message")
        last_round = jnp.maximum(state.round - 1, 0)

        def work_of(client: Client) -> Work:
            def arrive(own: tuple[()], data: tuple[Splits, ClientData, Array]) -> Scores:
                splits, examples, client_id = data
                batch_key = stream(state.key, Purpose.BATCHES, client_id)

                def context(participations: Scalar) -> ClientContext:
                    return ClientContext(last_round, client_id, participations, ALL_STEPS, batch_key)

                start = client.init(
                    stream(state.key, Purpose.CLIENT_INIT, client_id), hp, context(jnp.int32(0)), message
                )

                def one(nth: Array, own: PyTree) -> PyTree:
                    key = stream(state.key, Purpose.ADAPT, client_id, nth)
                    new, _, _ = client.update(key, hp, context(nth), message, own, splits)
                    return trees.where(trees.all_finite(new), new, own)

                adapted = jax.lax.fori_loop(0, rounds, one, start)
                personalize = partial(_personalize, client, state.key, hp, state.round, client_id, message)
                before, after = personalize(start, splits), personalize(adapted, splits)
                personal = Personal(before.before, after.after, after.finite)
                return _score(algorithm, client, task, hp, state.server, personal, examples)

            return arrive

        data = [(f.splits, getattr(f, split), jnp.asarray(f.client_ids)) for f in federations]
        return _over_everyone(algorithm, plan, work_of, ((),) * len(data), data)

    return adapt


def _message(algorithm: Algorithm, plan: RoundPlan, state: RunState, hp: PyTree) -> Message:
    ctx = server_context(plan.participation, state.round)
    return algorithm.server.broadcast(stream(state.key, Purpose.BROADCAST, state.round), hp, ctx, state.server)


def _personalize(
    client: Client,
    run_key: Key,
    hp: PyTree,
    round: Array,
    client_id: Array,
    message: Message,
    own: PyTree,
    splits: Splits,
) -> Personal:
    key = stream(run_key, Purpose.PERSONALIZE, client_id)
    batch_key = stream(run_key, Purpose.PERSONALIZE_BATCHES, client_id)

    def personal(local_steps: int) -> PyTree:
        ctx = ClientContext(round, client_id, jnp.int32(0), local_steps, batch_key)
        return client.personalize(key, hp, ctx, message, own, splits)

    before, after = personal(0), personal(ALL_STEPS)
    finite = trees.all_finite(after)
    return Personal(before, trees.where(finite, after, before), finite)


def _score(
    algorithm: Algorithm,
    client: Client,
    task: Task,
    hp: PyTree,
    server: PyTree,
    personal: Personal,
    examples: ClientData,
) -> dict[str, Metrics]:
    if not examples.mask.shape[0]:  # nobody has examples, and many models refuse an empty batch
        examples = jax.tree.map(lambda a: jnp.zeros((1, *a.shape[1:]), a.dtype), examples)
    logits = {name: client.predict(hp, getattr(personal, name), examples.x) for name in ("before", "after")}
    if algorithm.server.predict_global is not None:
        logits["global"] = algorithm.server.predict_global(hp, server, examples.x)
    means = {name: _means(task, values, examples) for name, values in logits.items()}
    means["after"]["diverged"] = ~personal.finite
    return means


def _each_group(
    algorithm: Algorithm,
    plan: RoundPlan,
    work_of: Callable[[Client], Work],
    states: tuple[PyTree, ...],
    data: list[PyTree],
) -> list[PyTree]:
    """What is kept of each group's clients, leaves [size, ...]."""
    kept = []
    for client, group, own, given in zip(algorithm.clients, plan.groups, states, data, strict=True):
        work = work_of(client)

        def one(present: Array, own: PyTree, given: PyTree, work: Work = work) -> Outcome:
            return Outcome((), (), work(own, given))

        outcome = run_cohort(
            one,
            jnp.arange(group.size, dtype=jnp.int32),
            own,
            given,
            num_clients=group.size,
            block=plan.block,
            everyone=True,
            spread=plan.spread and plan.spread._replace(even=False),
        )
        kept.append(outcome.kept)
    return kept


def _over_everyone(
    algorithm: Algorithm,
    plan: RoundPlan,
    work_of: Callable[[Client], Work],
    states: tuple[PyTree, ...],
    data: list[PyTree],
) -> PyTree:
    """The same, of all clients in the order of their stack, leaves [m, ...]."""
    return gather(_each_group(algorithm, plan, work_of, states, data), plan.groups)


def _means(task: Task, logits: Array, examples: ClientData) -> Metrics:
    count = examples.mask.sum()

    def mean(metric: Callable[[Array, Array], Array]) -> Array:
        total = jnp.where(examples.mask, metric(logits, examples.y), 0).sum()
        return jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.nan)

    return {name: mean(metric) for name, metric in task.metrics.items()}
