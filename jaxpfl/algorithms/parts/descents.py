"""Optimizer states that a client keeps from one of its rounds to the next.

A client that keeps its optimizer states begins a round with the momentum or the moments from the end of its previous
round. This holds even if the client was outside the cohort in between, and although it starts from another model.
Rounds outside the cohort (`Client.idle`) and personalisation begin with new optimizer states and do not change the kept
states. The kept states never leave the client.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpfl.core import trees
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Upload, wrapped_client
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Splits


class Descent(NamedTuple):
    """State of gradient descent: the parameters and the optimizer state, which is empty for plain SGD."""

    params: PyTree
    memory: PyTree

    @classmethod
    def start(cls, optimizer: optax.GradientTransformation, params: PyTree) -> Descent:
        """Return the state at the beginning: ``params`` and a new optimizer state."""
        return cls(params, optimizer.init(params))

    def step(self, optimizer: optax.GradientTransformation, gradient: PyTree) -> Descent:
        """Take one step. With SGD as `LocalWork.descent`, the step leads to ``params - rate (gradient + weight_decay
        params)``.
        """
        updates, memory = optimizer.update(gradient, self.memory, self.params)
        return Descent(optax.apply_updates(self.params, updates), memory)


class Kept(NamedTuple):
    """State of a client that keeps its optimizer states.

    Attributes:
      own: the state of the method's client.
      memories: optimizer states at the end of the client's last round, one for each `Descent` in the round's local
        steps, in the order in which they run; not used before the client's first round.
      rounds: [] int32, the number of the client's rounds in the cohort so far.
    """

    own: PyTree
    memories: tuple[PyTree, ...]
    rounds: Array


class _Round:
    """Optimizer states of the round that is being traced: the kept states at its start (None for new states), and the
    states at its end.
    """

    def __init__(self, kept: Kept | None):
        self.kept, self.started, self.ends = kept, 0, []


_round: ContextVar[_Round | None] = ContextVar("descents of a round", default=None)


@contextmanager
def _recorded(kept: Kept | None) -> Iterator[_Round]:
    token = _round.set(found := _Round(kept))
    try:
        yield found
    finally:
        _round.reset(token)


def _is_descent(node: object) -> bool:
    return isinstance(node, Descent)


def resume_memories(carry: PyTree) -> PyTree:
    """Replace new optimizer states at the start of local steps by the kept states, if there are any."""
    now = _round.get()
    if now is None or now.kept is None:
        return carry
    kept = now.kept

    def resume(node: object) -> object:
        if not isinstance(node, Descent):
            return node
        now.started += 1
        return node._replace(memory=trees.where(kept.rounds > 0, kept.memories[now.started - 1], node.memory))

    return jax.tree.map(resume, carry, is_leaf=_is_descent)


def record_memories(carry: PyTree) -> PyTree:
    """Record the optimizer states at the end of local steps, and return ``carry`` unchanged."""
    if (now := _round.get()) is not None:
        now.ends += [node.memory for node in jax.tree.leaves(carry, is_leaf=_is_descent) if isinstance(node, Descent)]
    return carry


def keeping(algorithm: Algorithm, splits: Splits) -> Algorithm:
    """Wrap an algorithm such that its clients keep their optimizer states.

    A pooled algorithm is returned unchanged, because its client keeps the states already.

    Args:
      algorithm: any algorithm that takes local steps by `local_work.run_steps`, called outside of branches and loops.
      splits: examples of one client, as arrays or shapes, from which the shapes of the states are derived.
    """
    if algorithm.pooled:
        return algorithm
    return algorithm._replace(clients=tuple(_client(client, splits) for client in algorithm.clients))


def _client(inner: Client, splits: Splits) -> Client:
    def init(key: Key, hp: PyTree, ctx: ClientContext, message: Message) -> Kept:
        own = inner.init(key, hp, ctx, message)

        def ends(splits: Splits) -> tuple[PyTree, ...]:
            with _recorded(None) as found:
                inner.update(key, hp, ctx, message, own, splits)
            return tuple(found.ends)

        shapes = jax.eval_shape(ends, splits)
        return Kept(own, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes), jnp.int32(0))

    def update(
        key: Key, hp: PyTree, ctx: ClientContext, message: Message, state: Kept, splits: Splits
    ) -> tuple[Kept, Upload, Metrics]:
        with _recorded(state) as found:
            own, upload, metrics = inner.update(key, hp, ctx, message, state.own, splits)
        return Kept(own, tuple(found.ends), state.rounds + 1), upload, metrics

    return wrapped_client(
        inner, init=init, update=update, state=lambda kept: kept.own, keep=lambda kept, own: kept._replace(own=own)
    )
