"""The client axis: run a function of one client over the rows of a cohort, in blocks and on every device, and sum.

Clients stay where they are: with D devices, each holds m / D consecutive clients (their data and states) and runs those
of the cohort that it holds. Nothing but the sums crosses devices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpfl import trees
from jaxpfl.types import Array, PyTree

AXIS = "clients"
"""The mesh axis over which clients are spread."""


class Outcome(NamedTuple):
    """What one client's work leaves: its next state, what is summed over the cohort, and what is kept per client."""

    state: PyTree
    summed: PyTree
    kept: PyTree


OneClient = Callable[[Array, PyTree, PyTree], Outcome]
"""``(present [] bool, state, data) -> Outcome``; an empty slot of the cohort is a client that is not present: its state
must come back unchanged, and its summed part zero."""


def run_cohort(
    one: OneClient,
    rows: Array,
    states: PyTree,
    data: PyTree,
    *,
    block: int,
    everyone: bool,
    mesh: Mesh | None = None,
) -> Outcome:
    """Runs ``one`` for every row of the cohort.

    Args:
      one: the work of one client.
      rows: [capacity] int32, sorted, distinct; m where the slot is empty.
      states: stacked client states, leaves [m, ...].
      data: anything else that is stacked by client, leaves [m, ...].
      block: clients that run in one vectorised operation; 1 runs one after the other.
      everyone: static; the rows are 0 ... m-1, so nothing needs to be gathered where they run at once.
      mesh: the devices, one axis whose size divides m; None for one device.

    Returns:
      All clients' states with the cohort's rows replaced, the sum over the cohort, and the kept values of every
      client, [m, ...], zero for those outside the cohort.
    """
    if mesh is None:
        return _run_here(one, rows, states, data, block=block, everyone=everyone)
    own = jax.tree.leaves(data)[0].shape[0] // mesh.size

    # check_vma: an algorithm's loops start from constants, which would each need a cast to "varying over clients".
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(AXIS), P(AXIS)),
        out_specs=Outcome(P(AXIS), P(), P(AXIS)),
        check_vma=False,
    )
    def on_each(rows: Array, states: PyTree, data: PyTree) -> Outcome:
        first = jax.lax.axis_index(AXIS) * own
        here = (rows >= first) & (rows < first + own)
        mine = jnp.sort(jnp.where(here, rows - first, own))[: min(own, rows.shape[0])]
        outcome = _run_here(one, mine, states, data, block=block, everyone=everyone)
        return outcome._replace(summed=jax.lax.psum(outcome.summed, AXIS))

    return on_each(rows, states, data)


def _run_here(one: OneClient, rows: Array, states: PyTree, data: PyTree, *, block: int, everyone: bool) -> Outcome:
    """The rows of one device's clients."""
    capacity, clients = rows.shape[0], jax.tree.leaves(data)[0].shape[0]
    if block >= capacity and everyone:
        new, summed, kept = jax.vmap(one)(rows < clients, states, data)
        return Outcome(new, _sum(summed), kept)

    blocks = -(-capacity // block)
    padding = jnp.full(blocks * block - capacity, clients, rows.dtype)
    slots = jnp.concatenate([rows, padding]).reshape(blocks, block)
    run_block = _one_by_one if block == 1 else _together
    one = jax.jit(one, inline=True)  # traced once: eval_shape and the loop share the cached trace
    shapes = jax.eval_shape(lambda: one(jnp.array(True), *_row((states, data), slots[0, 0])))
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes.summed)
    kept = jax.tree.map(lambda leaf: jnp.zeros((clients, *leaf.shape), leaf.dtype), shapes.kept)

    def body(i: Array, carry: Outcome) -> Outcome:
        # The states travel in the carry and are written in place: each row is read and written once in a round, and
        # the loop holds one copy of them however large the cohort is.
        states, total, kept = carry
        states, summed, kept = run_block(one, slots[i], states, data, kept)
        return Outcome(states, jax.tree.map(jnp.add, total, summed), kept)

    # Empty slots come last: a device runs as many blocks as it has clients in the cohort.
    filled = blocks if everyone else -(-(rows < clients).sum() // block)
    return jax.lax.fori_loop(0, filled, body, Outcome(states, zero, kept))


def _together(one: OneClient, rows: Array, states: PyTree, data: PyTree, kept: PyTree) -> Outcome:
    present = rows < jax.tree.leaves(data)[0].shape[0]
    new, summed, values = jax.vmap(one)(present, trees.take_rows(states, rows), trees.take_rows(data, rows))
    return Outcome(trees.put_rows(states, rows, new), _sum(summed), trees.put_rows(kept, rows, values))


def _one_by_one(one: OneClient, rows: Array, states: PyTree, data: PyTree, kept: PyTree) -> Outcome:
    # A vmap of width one would turn every product into a batched one; this keeps the client's own operations.
    row, clients = rows[0], jax.tree.leaves(data)[0].shape[0]
    present = row < clients
    row = jnp.minimum(row, clients - 1)
    old, earlier = _row((states, kept), row)
    new, summed, values = one(present, old, _row(data, row))
    values = trees.where(present, values, earlier)
    # An empty slot writes back what it read, in place; XLA makes a loop of a scatter that drops it.
    states, kept = jax.tree.map(
        lambda a, v: jax.lax.dynamic_update_index_in_dim(a, v, row, 0), (states, kept), (new, values)
    )
    return Outcome(states, summed, kept)


def _row(tree: PyTree, row: Array) -> PyTree:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, row, keepdims=False), tree)


def _sum(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda a: a.sum(axis=0, dtype=a.dtype), tree)
