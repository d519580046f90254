"""Simulated time in a round: the steps that a client takes, and the seconds of its work and of the round."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpfl.core import participation, trees
from jaxpfl.core.participation import Availability, TimeModel
from jaxpfl.core.protocol import Algorithm, Message
from jaxpfl.core.types import Array, Key, PyTree, Scalar
from jaxpfl.engine.state import LIMB, Counts


def step_limit(
    algorithm: Algorithm, availability: Availability, run_key: Key, round: Array, client_id: Array, size: Array
) -> Scalar:
    """Upper limit on a client's local steps; static where it is and all clients take as many.

    Args:
      algorithm: the method.
      availability: with its rates.
      run_key: of the run.
      round: in which the client begins.
      client_id: of the client.
      size: its number of training examples.
    """
    own = algorithm.own_steps
    steps = algorithm.local_steps if own is None else jnp.minimum(own.steps(size), algorithm.local_steps)
    limit = availability.step_limit(run_key, round, client_id, steps)
    return limit if isinstance(steps, int) else jnp.minimum(limit, steps)


def synchronous_seconds(
    clock: TimeModel,
    algorithm: Algorithm,
    ids: Array,
    clients: int,
    counts: Counts,
    before: Counts,
    up: int,
    message: Message,
) -> Array:
    """Simulated seconds of a round: those of its slowest client, zero for an empty cohort, [] float32.

    Args:
      clock: the clients' speeds.
      algorithm: the method; without declared gradients each of its steps counts as one.
      ids: of the clients, in the order of the counts, [m] or [m'].
      clients: m.
      counts, before: the clients' work after the round and before it, [m'].
      up: bytes of an upload that is not compressed.
      message: the broadcast.
    """
    took_part = counts.participations > before.participations
    work = counts.gradients - before.gradients if algorithm.counts_gradients else counts.steps - before.steps
    down = trees.num_bytes(message.shared) + trees.num_bytes(message.per_client) // clients
    sent: Scalar = up
    if algorithm.counts_bits:
        high, low = (counts.table - before.table)[..., 8:].astype(jnp.float32).T
        sent = (high * LIMB + low) / 8
    padded = jnp.pad(ids, (0, took_part.shape[0] - ids.shape[0]))
    return jnp.where(took_part, clock.seconds(padded, work, sent, down), 0).max().astype(jnp.float32)


def seconds_ahead(
    algorithm: Algorithm,
    availability: Availability,
    ids: Array,
    sizes: Array,
    run_key: Key,
    round: Array,
    shared: PyTree,
) -> Callable[[Array], Array]:
    """Build ``rows [M] -> seconds [M]``, what clients that begin in a round will take from the broadcast to its upload.

    Without a time model all take one second, whatever they do.

    Args:
      algorithm: the method; its uploads are as long as what its server sends.
      availability: with its rates.
      ids: of the clients, [m].
      sizes: their numbers of training examples, [m].
      run_key: of the run.
      round: in which they begin.
      shared: `Message.shared`.
    """
    if availability.time_model is None:
        return lambda rows: jnp.ones(rows.shape, jnp.float32)
    clock, (client,) = participation.resolve_time_model(availability.time_model), algorithm.clients
    sent = trees.num_bytes(shared)

    def gradients(client_id: Array, size: Array) -> Array:
        limit = step_limit(algorithm, availability, run_key, round, client_id, size)
        if client.gradients is None:
            return jnp.minimum(limit, algorithm.local_steps)
        return jnp.asarray(client.gradients.update(limit, Message(shared)))

    def seconds(rows: Array) -> Array:
        work = jax.vmap(gradients)(ids[rows], sizes[rows])
        return clock.seconds(ids[rows], work, sent, sent).astype(jnp.float32)

    return seconds
