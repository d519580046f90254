r"""Asynchronous rounds: M clients are at work at once, and a round ends when the next K of them have uploaded.

At the start of a round as many clients as are missing from M (all of them in the first round, then K) are drawn,
uniformly from the clients not at work, and receive the server's current model. Each keeps what it received, and takes
the seconds of `clock.seconds_ahead` from then on. The K clients with the least time left make up the round; of several
with the same time left, the first to begin come first. They do their work from the model that each of them received,
with the randomness and the learning rate of the round in which they began, and then the others have that much less time
left. A client's staleness is the number of rounds that ended while it was at work.

With M = K and equal times everybody arrives in the round in which it began: cohorts and results are the same as in
synchronous rounds with uniform cohorts. An upload that is lost, or not finite, is an arrival all the same.

Reference: Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous Aggregation",
https://arxiv.org/abs/2106.06639.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import trees
from jaxpfl.core.participation import Participation
from jaxpfl.core.protocol import Algorithm, Message
from jaxpfl.core.randomness import client_scores
from jaxpfl.core.types import Array, Key, PyTree
from jaxpfl.support.errors import JaxpflError


class InFlight(NamedTuple):
    """Clients at work, in M slots.

    Attributes:
      received: the `Message.shared` that each began from, leaves [M, ...].
      rows: the client's row in the stack; the number of clients where the slot is empty, [M] int32.
      began: the round in which it began, [M] int32.
      left: seconds until it arrives, from the end of the last round, [M] float32.
    """

    received: PyTree
    rows: Array
    began: Array
    left: Array


class Arrivals(NamedTuple):
    """The K clients of a round.

    Attributes:
      rows: their rows, sorted, [K] int32.
      slots: slot of each client that arrives, by row of the stack, [m] int32; zero for all others.
      seconds: duration of the round, [] float32.
    """

    rows: Array
    slots: Array
    seconds: Array


def concurrency(algorithm: Algorithm, participation: Participation) -> int:
    """M, the number of clients at work at once.

    Raises:
      JaxpflError: for a number below the cohort or above the clients, cohorts of no fixed size, and algorithms that
        asynchronous rounds cannot run.
    """
    asked, cohort, clients = algorithm.in_flight, participation.capacity, participation.num_clients
    assert asked is not None
    if not (participation.fixed_size or participation.everyone):
        raise JaxpflError(
            f"asynchronous rounds need cohorts of a fixed size, got participation = {participation.name}: use uniform"
        )
    for what, has in (
        ("one group of clients", len(algorithm.clients) > 1),
        ("no work outside the cohort", algorithm.idle_cap > 0),
        ("uploads of a known length: leave out compress", algorithm.counts_bits),
        ("a method that is not private", algorithm.noise is not None),
    ):
        if has:
            raise JaxpflError(f"asynchronous rounds (in_flight = {asked}) need {what}")
    if asked == 0:
        return min(2 * cohort, clients)
    if not cohort <= asked <= clients:
        raise JaxpflError(
            f"in_flight must be 0 or between {cohort}, the clients in a round, and all {clients} clients, got {asked}"
        )
    return asked


def check(message: Message, up: int) -> None:
    """Refuse a method whose messages are not kept for clients at work, or whose uploads are of unforeseen length.

    Args:
      message: the broadcast.
      up: bytes of an upload.

    Raises:
      JaxpflError.
    """
    if jax.tree.leaves(message.per_client):
        raise JaxpflError("asynchronous rounds (in_flight) send all clients the same: Message.per_client must be None")
    if up != (down := trees.num_bytes(message.shared)):
        raise JaxpflError(
            f"asynchronous rounds (in_flight) need uploads as long as Message.shared, {down} bytes, got {up}"
        )


def nobody(number: int, clients: int, shared: PyTree) -> InFlight:
    """M empty slots.

    Args:
      number: M.
      clients: m.
      shared: a `Message.shared`, or its shapes.
    """
    zeros = jnp.zeros(number, jnp.int32)
    received = jax.tree.map(lambda a: jnp.zeros((number, *a.shape), a.dtype), shared)
    return InFlight(received, zeros + clients, zeros, jnp.zeros(number, jnp.float32))


def dispatched(
    before: InFlight, key: Key, ids: Array, round: Array, shared: PyTree, seconds: Callable[[Array], Array]
) -> InFlight:
    """Clients at work once every empty slot has been given to a client that begins.

    Args:
      before: the clients at work.
      key: key for the draw.
      ids: all clients' ids, [m].
      round: the round that begins.
      shared: message to the clients that begin.
      seconds: ``rows [M] -> [M]``, the time that they will take.
    """
    clients, empty = ids.shape[0], before.rows == ids.shape[0]
    busy = jnp.zeros(clients, bool).at[before.rows].set(True, mode="drop")
    _, best = jax.lax.top_k(jnp.where(busy, -jnp.inf, client_scores(key, ids)), before.rows.shape[0])
    # Slots are given in the order of the scores, so that neither they nor ties depend on the order of the stack.
    turn = jnp.maximum(jnp.cumsum(empty) - 1, 0)
    rows = jnp.where(empty, best[turn].astype(jnp.int32), before.rows)
    return InFlight(
        jax.vmap(trees.where, in_axes=(0, None, 0))(empty, shared, before.received),
        rows,
        jnp.where(empty, round, before.began).astype(jnp.int32),
        jnp.where(empty, seconds(rows), before.left),
    )


def landed(before: InFlight, cohort: int, clients: int) -> tuple[InFlight, Arrivals]:
    """Clients at work after the next K have arrived, and these.

    Args:
      before: the clients at work, in all slots.
      cohort: K.
      clients: m.
    """
    arriving = jnp.lexsort((before.began, before.left))[:cohort].astype(jnp.int32)
    rows, seconds = before.rows[arriving], before.left[arriving[-1]]
    slots = jnp.zeros(clients, jnp.int32).at[rows].set(arriving)
    left = jnp.maximum(before.left - seconds, 0)
    after = before._replace(rows=before.rows.at[arriving].set(clients), left=left)
    return after, Arrivals(jnp.sort(rows), slots, seconds)


def received(flights: InFlight, slot: Array) -> tuple[PyTree, Array]:
    """The message to the client in a slot, and the round in which it began."""
    pick = partial(jax.lax.dynamic_index_in_dim, index=slot, keepdims=False)
    return jax.tree.map(pick, (flights.received, flights.began))
