"""Scoring: every client's test examples under the global model and under its own, before and after adaptation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from jaxpfl import trees
from jaxpfl.engine.cohort import Outcome, Spread, run_cohort
from jaxpfl.engine.round import RunState, server_context
from jaxpfl.models import Task
from jaxpfl.participation import Participation
from jaxpfl.protocol import ALL_STEPS, Algorithm, ClientContext
from jaxpfl.randomness import Purpose, stream
from jaxpfl.types import Array, ClientData, Federation, Metrics, PyTree, Splits

Scores = Mapping[str, Metrics]
"""Which model (``global``, ``before``, ``after``) -> metric -> its mean over each client's examples, [m].

``global`` is missing for a method without one global model. A client without examples in the split has NaN.
``after`` has one more entry, ``diverged``: [m] bool, whether the adaptation gave a non-finite model; such a client is
scored with the model before.
"""


def make_evaluate(
    algorithm: Algorithm,
    task: Task,
    participation: Participation,
    *,
    block: int,
    spread: Spread | None = None,
    split: Literal["test", "validation"],
) -> Callable[[RunState, PyTree, Federation], Scores]:
    """Builds ``(state, hp, federation) -> Scores`` on one split.

    Personalisation sees the training and validation examples only. Its stream depends on the client, not on the
    round or the split. Its batches are drawn as those of a client that takes part for the first time.
    """
    client, server = algorithm.client, algorithm.server

    def evaluate(state: RunState, hp: PyTree, federation: Federation) -> Scores:
        ctx = server_context(participation, state.round)
        message = server.broadcast(stream(state.key, Purpose.BROADCAST, state.round), hp, ctx, state.server)

        def score(present: Array, own: PyTree, data: tuple[Splits, ClientData, Array]) -> Outcome:
            splits, examples, client_id = data
            if not examples.mask.shape[0]:  # nobody has examples, and many models refuse an empty batch
                examples = jax.tree.map(lambda a: jnp.zeros((1, *a.shape[1:]), a.dtype), examples)
            key = stream(state.key, Purpose.PERSONALIZE, client_id)
            batch_key = stream(state.key, Purpose.PERSONALIZE_BATCHES, client_id)

            def personal(local_steps: int) -> PyTree:
                client_ctx = ClientContext(state.round, client_id, jnp.int32(0), local_steps, batch_key)
                return client.personalize(key, hp, client_ctx, message, own, splits)

            before = personal(0)
            after = personal(ALL_STEPS)
            finite = trees.all_finite(after)
            models = {"before": before, "after": trees.where(finite, after, before)}
            logits = {name: client.predict(hp, model, examples.x) for name, model in models.items()}
            if server.predict_global is not None:
                logits["global"] = server.predict_global(hp, state.server, examples.x)
            means = {name: _means(task, values, examples) for name, values in logits.items()}
            means["after"]["diverged"] = ~finite
            return Outcome((), (), means)

        num_clients = participation.num_clients
        rows = jnp.arange(num_clients, dtype=jnp.int32)
        data = (federation.splits, getattr(federation, split), jnp.asarray(federation.client_ids))
        outcome = run_cohort(
            score,
            rows,
            state.clients,
            data,
            num_clients=num_clients,
            block=block,
            everyone=True,
            spread=spread and spread._replace(even=False),
        )
        return jax.tree.map(lambda a: a[:num_clients], outcome.kept)

    return evaluate


def _means(task: Task, logits: Array, examples: ClientData) -> Metrics:
    count = examples.mask.sum()

    def mean(metric: Callable[[Array, Array], Array]) -> Array:
        total = jnp.where(examples.mask, metric(logits, examples.y), 0).sum()
        return jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.nan)

    return {name: mean(metric) for name, metric in task.metrics.items()}
