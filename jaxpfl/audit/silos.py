"""Game with one canary example in a silo, for runs in which noise protects single examples.

The canary is the first example of a silo, or all examples of its first person. Its gradient is a vector with equal
entries, so long that clipping shortens it to the norm C. If a run's coin excludes the canary, its gradient is zero, as
if the silo did not have it. A run's scores are sums of the entries of what leaves the silo: its uploads and its
personalized model. The claim must cover them even for someone who knows all other examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.algorithms import LocalWork
from jaxpfl.audit.subject import Scores, Subject, coin, tosses
from jaxpfl.core import trees
from jaxpfl.core.protocol import Algorithm, Client, wrapped_client
from jaxpfl.core.types import Array, Key, PyTree, Splits
from jaxpfl.privacy.guarded import ExampleLoss, GuardedBatch, GuardedData
from jaxpfl.support.errors import JaxpflError

_INCLUDED, _EXCLUDED = 1, 2
"""Marks of the canary; other examples have the mark 0."""
_LENGTH = 1e4
_ROUNDS = 6  # number of rounds whose uploads are also scored alone


class _MarkedBatch(GuardedBatch):
    """Mini-batch of pairs (x, mark), in which the canary's gradient is replaced."""

    def gradient(self, loss: ExampleLoss, params: PyTree, key: Key) -> tuple[Array, PyTree]:
        def replaced(params: PyTree, key: Key, x: PyTree, y: Array) -> Array:
            x, mark = x
            canary = jnp.where(mark == _INCLUDED, -_LENGTH, 0.0) * _total(params)
            return jnp.where(mark > 0, canary, loss(params, key, x, y))

        return super().gradient(replaced, params, key)


class _MarkedData(GuardedData):
    """Guarded data whose first example (or person) has a mark."""

    def __init__(self, data: GuardedData, mark: Array):
        stored = data._data
        units = jnp.arange(stored.examples.y.shape[0]) if stored.persons is None else stored.persons
        marks = jnp.where(units == units[stored.start], mark, 0)
        super().__init__(data._ledger, stored.with_examples(x=(stored.examples.x, marks)), data._drawn)

    def _batch(self, *drawn: Any, **more: Any) -> GuardedBatch:
        batch = super()._batch(*drawn, **more)
        return _MarkedBatch(batch._ledger, batch._descent, batch._units, batch._noise_key, batch._mechanism)


class _Kept(NamedTuple):
    """Client state of the method, with the first example's mark, [], and the upload's summed entries in each of R
    rounds, [R].
    """

    state: PyTree
    mark: Array
    uploads: Array


def _total(tree: PyTree) -> Array:
    return sum((leaf.sum() for leaf in jax.tree.leaves(tree)), start=jnp.zeros(()))


def _marked(usual: Client, client_id: int, rounds: int) -> Client:
    """Wrap a client function so that one client has a canary, and every client keeps the sums of its uploads."""

    def marked(kept: _Kept, splits: Splits) -> Splits:
        data: Any = splits.train
        if isinstance(data, GuardedData):  # shapes of the optimizer's memory are computed without the mechanism
            data = _MarkedData(data, kept.mark)
        return splits._replace(train=data)

    def init(key, hp, ctx, message) -> _Kept:
        mark = jnp.where(coin(ctx.batch_key), _INCLUDED, _EXCLUDED)
        own = jnp.where(ctx.client_id == client_id, mark, 0)
        return _Kept(usual.init(key, hp, ctx, message), own, jnp.zeros(rounds))

    def update(key, hp, ctx, message, kept: _Kept, splits):
        state, sent, metrics = usual.update(key, hp, ctx, message, kept.state, marked(kept, splits))
        total = _total(trees.prefix_divide(sent.total, sent.weight))
        return _Kept(state, kept.mark, kept.uploads.at[ctx.round].set(total)), sent, metrics

    def personalize(key, hp, ctx, message, kept: _Kept, splits):
        return usual.personalize(key, hp, ctx, message, kept.state, marked(kept, splits))

    def keep(kept: _Kept, state: PyTree) -> _Kept:
        return kept._replace(state=state)

    outer = wrapped_client(usual, update=update, init=init, state=lambda kept: kept.state, keep=keep)
    return outer._replace(personalize=personalize)


def silo_scores(subject: Subject) -> Scores:
    """Build the function that simulates runs with one canary, in a silo with the largest epsilon."""
    assert subject.silo is not None
    rounds, train, silo = subject.run.spec.rounds, subject.run.federation.train, subject.silo
    like = np.asarray(train.size) == silo.examples
    if silo.persons is not None:
        like &= train.count_persons()[0] == silo.persons
    place = int(np.argmax(like))
    ids, name = subject.ids[[place]], subject.run.spec.method.name

    def change(algorithm: Algorithm, work: LocalWork) -> Algorithm:
        if len(algorithm.clients) != 1:
            raise JaxpflError(f"an audit with unit = example requires clients with the same model: {name} has several")
        return algorithm._replace(clients=(_marked(algorithm.clients[0], int(ids[0]), rounds),))

    # The initial model is public: a draw of its own in every world would only hide what the silo releases.
    model = subject.run.task.model
    task = subject.run.task._replace(model=model._replace(init=lambda key, x: model.init(jax.random.key(0), x)))
    simulation = Subject(replace(subject.run, task=task)).simulation(change)

    def play(seeds: Sequence[int]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        state = simulation.init(seeds)
        there = tosses(state.key, ids)[:, 0]
        state, _ = simulation.advance(state, rounds)
        models = jax.tree.leaves(simulation.personal_models(state))
        model = sum(np.asarray(leaf[:, place], float).reshape(len(there), -1).sum(axis=1) for leaf in models)
        (kept,) = simulation.trim(state).clients
        uploads = np.asarray(kept.uploads, float)[:, place]
        table = {"uploads": uploads.sum(axis=1), "personal model": model, "both": uploads.sum(axis=1) + model}
        return there, table | {f"round {t}": uploads[:, t] for t in range(min(rounds, _ROUNDS))}

    return play
