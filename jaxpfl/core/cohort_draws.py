"""Draws of cohorts, apart from their numbers: one compiled program may then serve other numbers of clients.

A draw is over the rows of a stack, of which the first m are clients and the others, if any, nobody's. Empty slots of a
cohort carry the number of rows. A client's score depends on its id alone, so that nobody's rows change no draw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core.randomness import client_scores
from jaxpfl.core.types import Array, Key, Scalar


class CohortNumbers(NamedTuple):
    """Numbers of a `Participation`, Python's or traced; those of a program that serves other numbers of clients too.

    Attributes:
      clients: m.
      slots: slots of the cohort in use, at most its capacity.
      expected: the expected number of clients in a round.
      rate: the probability with which each client takes part, where clients do so independently; else None.
    """

    clients: Scalar
    slots: Scalar
    expected: Scalar
    rate: Scalar = None


@dataclass(frozen=True)
class Drawn:
    """``(key, client_ids) -> result`` of a registered scheme, its numbers apart from what it does.

    Attributes:
      draw: ``(key, client_ids [rows], numbers, capacity) -> result``; rows from m on are nobody's.
      capacity: slots of the cohort, static.
      numbers: None where they are yet to be given.
    """

    draw: Callable[[Key, Array, CohortNumbers, int], Array]
    capacity: int
    numbers: CohortNumbers | None

    def __call__(self, key: Key, client_ids: Array) -> Array:
        """The result for these clients."""
        assert self.numbers is not None
        return self.draw(key, client_ids, self.numbers, self.capacity)


def _of_clients(values: Array, clients: Scalar) -> Array:
    """The values, [rows], of the first m rows; minus infinity, and so last of all, for those that are nobody's."""
    if isinstance(clients, int) and clients == values.shape[0]:
        return values
    return jnp.where(jnp.arange(values.shape[0]) < clients, values, -jnp.inf)


def _first(rows: Array, count: Scalar, empty: int) -> Array:
    """The first ``count`` rows; ``empty`` behind them."""
    if isinstance(count, int) and count == rows.shape[0]:
        return rows
    return jnp.where(jnp.arange(rows.shape[0]) < count, rows, empty)


def everyone(key: Key, client_ids: Array, numbers: CohortNumbers, capacity: int) -> Array:
    """Rows of all clients."""
    del key
    return _first(jnp.arange(capacity, dtype=jnp.int32), numbers.clients, client_ids.shape[0])


def uniform(key: Key, client_ids: Array, numbers: CohortNumbers, capacity: int) -> Array:
    """Rows of as many clients as there are slots, uniformly without replacement."""
    _, rows = jax.lax.top_k(_of_clients(client_scores(key, client_ids), numbers.clients), capacity)
    return jnp.sort(_first(rows.astype(jnp.int32), numbers.slots, client_ids.shape[0]))


def poisson(key: Key, client_ids: Array, numbers: CohortNumbers, capacity: int) -> Array:
    """Rows of the clients that take part, each independently; a random part of them if they outnumber the slots."""
    # Of those drawn, scores are independent and uniform below q: the lowest are a uniformly random subset.
    lowest, rows = jax.lax.top_k(_of_clients(-client_scores(key, client_ids), numbers.clients), capacity)
    rows = jnp.where(-lowest < numbers.rate, rows.astype(jnp.int32), client_ids.shape[0])
    return jnp.sort(_first(rows, numbers.slots, client_ids.shape[0]))


def cyclic(
    of_blocks: Key, key: Key, round: Array, client_ids: Array, numbers: CohortNumbers, cycle: int, capacity: int
) -> Array:
    """Rows of the block of clients whose turn it is, or of those of them that take part, each independently.

    Args:
      of_blocks: key of the division into blocks, the same in every round.
      key: of the round's draws, for a rate below 1.
      round: [] int32, the number of finished rounds; its block is ``round % cycle``.
      numbers: ``rate`` is that within the block.
    """
    m = client_ids.shape[0]
    # Ties of scores, multiples of 2^-23, are broken by the id: the order of the stack must not count.
    order = jnp.lexsort((client_ids, client_scores(of_blocks, client_ids)))
    places = jnp.arange(capacity) * cycle + round % cycle
    rows = jnp.where(places < m, order.at[places].get(mode="clip"), m)
    if numbers.rate != 1:
        here = client_scores(key, client_ids).at[rows].get(mode="fill", fill_value=1.0) < numbers.rate
        rows = jnp.where(here, rows, m)
    return jnp.sort(rows.astype(jnp.int32))


def left_out(key: Key, client_ids: Array, numbers: CohortNumbers, capacity: int) -> Array:
    """Number of clients of the same `poisson` draw that found no slot, [] int32."""
    del capacity
    lowest = _of_clients(-client_scores(key, client_ids), numbers.clients)
    return jnp.maximum((-lowest < numbers.rate).sum(dtype=jnp.int32) - numbers.slots, 0)
