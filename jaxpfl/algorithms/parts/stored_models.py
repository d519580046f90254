r"""Servers that store past global models for new clients.

Of the models mu_0 ... mu_r the server keeps at most S, equally spaced over the rounds so far: those of the multiples of
a stride k_r that doubles whenever S of them would not reach round r.

.. math:: k_r = \min\{2^j : r < 2^j S\}, \qquad \text{mu}_r \text{ is kept if } k_r \mid r

A new model replaces the earliest one that is no multiple of the stride, once every slot is used. Between two doublings
the early models are k_r apart and the late ones still k_r / 2.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core.protocol import Message, Reduced, Server, ServerContext, Stacked, wrapped_server
from jaxpfl.core.types import Array, Key, Metrics, PyTree

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


def begin(mu: PyTree, size: int) -> StoredModels:
    """Initial store of ``size`` slots, with mu_0 in the first."""
    rounds = jnp.full(size, _EMPTY, jnp.int32).at[0].set(0)
    return StoredModels(rounds, jax.tree.map(lambda a: jnp.broadcast_to(a, (size, *a.shape)), mu))


def add(stored: StoredModels, round: Array, mu: PyTree) -> StoredModels:
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
        return Archive(state, begin(model(key, hp, ctx, state), size))

    def update(
        key: Key, hp: PyTree, ctx: ServerContext, archive: Archive, reduced: Reduced | Stacked
    ) -> tuple[Archive, Metrics]:
        state, metrics = server.update(key, hp, ctx, archive.state, reduced)
        after = ctx._replace(round=ctx.round + 1)
        return Archive(state, add(archive.stored, after.round, model(key, hp, after, state))), metrics

    def welcome(key: Key, hp: PyTree, ctx: ServerContext, archive: Archive) -> Message:
        return Message(model(key, hp, ctx, archive.state), archive.stored)

    wrapped = wrapped_server(server, init=init, update=update, state=lambda archive: archive.state)
    return wrapped._replace(welcome=welcome)
