r"""Asynchronous rounds: M clients train concurrently, and a round ends when the next K of them have uploaded.

At the start of a round, idle clients are drawn uniformly until M clients are at work. These are M clients in the first
round and K clients in every later round. Each drawn client receives the server's current model, keeps this model, and
works for the number of seconds that `round.seconds_ahead` returns. The round consists of the K clients with the
smallest time left; if times are equal, clients that began earlier come first. Each of the K clients trains from the
model that it received, with the randomness and the learning rate of the round in which it began. The duration of the
round is then subtracted from the other clients' times. A client's staleness is the number of rounds that ended while it
was at work.

With M = K and equal times, every upload arrives in the round in which it began. Cohorts and results are then the same
as in synchronous rounds with uniform cohorts. A client whose upload is lost or not finite still arrives and belongs to
the round's K clients.

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
    """Clients at work, in M slots with one client each or none.

    Attributes:
      received: `Message.shared` that each client received when it began, leaves [M, ...].
      rows: row of each slot's client in the federation, [M] int32; an empty slot has m, the number of clients.
      began: round in which each client began, [M] int32.
      left: seconds from the end of the last round until each upload arrives, [M] float32.
    """

    received: PyTree
    rows: Array
    began: Array
    left: Array


class Arrivals(NamedTuple):
    """The K clients whose uploads arrive in a round.

    Attributes:
      rows: rows of these clients in the federation, sorted, [K] int32.
      slots: slot of each client whose upload arrives, by the client's row in the federation, [m] int32; 0 for other
        clients.
      seconds: duration of the round, [] float32.
    """

    rows: Array
    slots: Array
    seconds: Array


def concurrency(algorithm: Algorithm, participation: Participation) -> int:
    """Number M of clients that train concurrently.

    Raises:
      JaxpflError: if M is smaller than the cohort size K or larger than the number of clients, if cohorts do not have a
        fixed size, or if asynchronous rounds do not support the algorithm.
    """
    asked, cohort, clients = algorithm.in_flight, participation.capacity, participation.num_clients
    assert asked is not None
    if not (participation.fixed_size or participation.everyone):
        raise JaxpflError(
            "asynchronous rounds require cohorts of a fixed size, got "
            f"participation = {participation.name}: use uniform"
        )
    for what, has in (
        ("a single group of clients", len(algorithm.clients) > 1),
        ("a method without work outside the cohort", algorithm.idle_cap > 0),
        ("uploads of a known size: leave out compress", algorithm.counts_bits),
        ("a method that is not private", algorithm.noise is not None),
    ):
        if has:
            raise JaxpflError(f"asynchronous rounds (in_flight = {asked}) require {what}")
    if asked == 0:
        return min(2 * cohort, clients)
    if not cohort <= asked <= clients:
        raise JaxpflError(
            f"in_flight must be 0 or between {cohort} (clients in a round) and {clients} (all clients), got {asked}"
        )
    return asked


def check(message: Message, up: int) -> None:
    """Check that asynchronous rounds support a method's messages and uploads.

    Args:
      message: the server's broadcast.
      up: bytes of an upload.

    Raises:
      JaxpflError: if the server sends clients different messages, or if an upload is not as long as `Message.shared`.
    """
    if jax.tree.leaves(message.per_client):
        raise JaxpflError("asynchronous rounds (in_flight) send only a shared message: Message.per_client must be None")
    if up != (down := trees.num_bytes(message.shared)):
        raise JaxpflError(
            f"asynchronous rounds (in_flight) require uploads as large as Message.shared ({down} bytes), got {up}"
        )


def nobody(number: int, clients: int, shared: PyTree) -> InFlight:
    """Return M empty slots, as before the first round.

    Args:
      number: number M of slots.
      clients: number m of clients.
      shared: any `Message.shared`, or its shapes.
    """
    zeros = jnp.zeros(number, jnp.int32)
    received = jax.tree.map(lambda a: jnp.zeros((number, *a.shape), a.dtype), shared)
    return InFlight(received, zeros + clients, zeros, jnp.zeros(number, jnp.float32))


def dispatched(
    before: InFlight, key: Key, ids: Array, round: Array, shared: PyTree, seconds: Callable[[Array], Array]
) -> InFlight:
    """Fill every empty slot with a client that starts its work in this round.

    Args:
      before: slots before the round, of which some may be empty.
      key: key for the draw of the clients.
      ids: all clients' ids, [m].
      round: number of this round.
      shared: message sent to the clients that start in this round.
      seconds: function ``rows [M] -> seconds [M]`` that returns the time that each client needs.
    """
    clients, empty = ids.shape[0], before.rows == ids.shape[0]
    busy = jnp.zeros(clients, bool).at[before.rows].set(True, mode="drop")
    _, best = jax.lax.top_k(jnp.where(busy, -jnp.inf, client_scores(key, ids)), before.rows.shape[0])
    # Slots are filled in the order of the scores, so that neither slots nor ties depend on the clients' order.
    turn = jnp.maximum(jnp.cumsum(empty) - 1, 0)
    rows = jnp.where(empty, best[turn].astype(jnp.int32), before.rows)
    return InFlight(
        jax.vmap(trees.where, in_axes=(0, None, 0))(empty, shared, before.received),
        rows,
        jnp.where(empty, round, before.began).astype(jnp.int32),
        jnp.where(empty, seconds(rows), before.left),
    )


def landed(before: InFlight, cohort: int, clients: int) -> tuple[InFlight, Arrivals]:
    """Let the next K uploads arrive; return the clients still at work, and the arrivals.

    Args:
      before: slots before the uploads arrive, none of them empty.
      cohort: number K of uploads that arrive.
      clients: number m of clients.
    """
    arriving = jnp.lexsort((before.began, before.left))[:cohort].astype(jnp.int32)
    rows, seconds = before.rows[arriving], before.left[arriving[-1]]
    slots = jnp.zeros(clients, jnp.int32).at[rows].set(arriving)
    left = jnp.maximum(before.left - seconds, 0)
    after = before._replace(rows=before.rows.at[arriving].set(clients), left=left)
    return after, Arrivals(jnp.sort(rows), slots, seconds)


def received(flights: InFlight, slot: Array) -> tuple[PyTree, Array]:
    """The message that the client in a slot received, and the round in which this client began to work."""
    pick = partial(jax.lax.dynamic_index_in_dim, index=slot, keepdims=False)
    return jax.tree.map(pick, (flights.received, flights.began))
