"""The client axis: run a function of one client over the rows of a cohort, in blocks, and sum what is uploaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl import trees
from jaxpfl.types import Array, PyTree


class Outcome(NamedTuple):
    """What one client's work leaves: its next state, what is summed over the cohort, and what is kept per client."""

    state: PyTree
    summed: PyTree
    kept: PyTree


OneClient = Callable[[Array, PyTree, PyTree], Outcome]
"""``(row [], state, data) -> Outcome`` of the client in that row; must itself ignore an empty slot (row = m)."""


def run_cohort(one: OneClient, rows: Array, states: PyTree, data: PyTree, *, block: int, everyone: bool) -> Outcome:
    """Runs ``one`` for every row of the cohort.

    Args:
      one: the work of one client.
      rows: [capacity] int32, sorted, distinct; m where the slot is empty.
      states: stacked client states, leaves [m, ...].
      data: anything else that is stacked by client, leaves [m, ...].
      block: clients that run in one vectorised operation; 1 runs one after the other.
      everyone: static; the rows are 0 ... m-1, so nothing needs to be gathered where they run at once.

    Returns:
      All clients' states with the cohort's rows replaced ([m, ...]), the sum over the cohort, and the kept values in
      the order of the rows, [capacity, ...].
    """
    capacity = rows.shape[0]
    num_clients = jax.tree.leaves(data)[0].shape[0]
    if block >= capacity and everyone:
        new, summed, kept = jax.vmap(one)(rows, states, data)
        return Outcome(new, _sum(summed), kept)
    if block >= capacity:
        return _together(one, rows, states, data)

    blocks = -(-capacity // block)
    padding = jnp.full(blocks * block - capacity, num_clients, rows.dtype)
    rows = jnp.concatenate([rows, padding]).reshape(blocks, block)
    run_block = _one_by_one if block == 1 else _together
    zero = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        jax.eval_shape(lambda: run_block(one, rows[0], states, data).summed),
    )

    def body(carry: tuple[PyTree, PyTree], rows: Array) -> tuple[tuple[PyTree, PyTree], PyTree]:
        # The states travel in the carry and are written in place: each row is read and written once in a round, and
        # the loop holds one copy of them however large the cohort is.
        states, total = carry
        states, summed, kept = run_block(one, rows, states, data)
        return (states, jax.tree.map(jnp.add, total, summed)), kept

    (states, total), kept = jax.lax.scan(body, (states, zero), rows)
    kept = jax.tree.map(lambda a: a.reshape(blocks * block, *a.shape[2:])[:capacity], kept)
    return Outcome(states, total, kept)


def _together(one: OneClient, rows: Array, states: PyTree, data: PyTree) -> Outcome:
    new, summed, kept = jax.vmap(one)(rows, trees.take_rows(states, rows), trees.take_rows(data, rows))
    return Outcome(trees.put_rows(states, rows, new), _sum(summed), kept)


def _one_by_one(one: OneClient, rows: Array, states: PyTree, data: PyTree) -> Outcome:
    # A vmap of width one would turn every product into a batched one; this keeps the client's own operations.
    row = rows[0]
    new, summed, kept = one(row, _row(states, row), _row(data, row))
    return Outcome(
        trees.put_rows(states, rows, jax.tree.map(lambda a: a[None], new)),
        summed,
        jax.tree.map(lambda a: a[None], kept),
    )


def _row(tree: PyTree, row: Array) -> PyTree:
    return jax.tree.map(lambda a: a.at[row].get(mode="clip"), tree)


def _sum(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda a: a.sum(axis=0), tree)
