"""Stacks of clients: groups with one architecture, distribution over devices, and sharding of one client's arrays.

Clients with the same model architecture form a `Group`, and the states of each group are stacked separately.

On the axis of clients, each of D devices stores the states of m' / D consecutive clients, where m' is m rounded up to a
multiple of D. A cohort has a fixed number of slots, each with one client or empty. A `Spread` assigns the clients' work
to the devices. The results differ from the results on a single device only by the order of additions.

On the model axis, several devices work on one client together. Each array is sharded along its largest dimension that
is divisible by the number of devices, or replicated if there is no such dimension. The program is written for one
device and compiled with these layouts as constraints. The compiler partitions the operations and inserts the
communication (GSPMD, arXiv:2105.04663), so results again differ only by the order of additions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpfl.core import trees
from jaxpfl.core.full_precision import RunningSum
from jaxpfl.core.protocol import Algorithm
from jaxpfl.core.types import Array, ClientData, Examples, Federation, PyTree, chunk_of
from jaxpfl.data import stack
from jaxpfl.support.errors import JaxpflError

_WORTH = 0.01
"""Share of the examples' memory that a reordering of the clients (`Group.dealt`) must save to be worthwhile."""


class Group(NamedTuple):
    """Clients whose states are stacked together.

    Each client has a row in the federation, 0 ... m - 1, and a row in its group's stack. If there is only one group and
    ``places`` is None, the two rows are equal.

    Attributes:
      members: rows of the group's clients in the federation, ascending, [size], as a NumPy array.
      rows: number of rows in the group's stack: the group's size, rounded up to a multiple of the number of devices.
      num_clients: number m of clients in the federation.
      only: true if there is no other group.
      places: row of each member in the group's stack, [size], as a NumPy array; None if member i has row i. If
        ``places`` is given, unused rows are at the end of each device's part of the stack, not at the end of the stack.
    """

    members: np.ndarray
    rows: int
    num_clients: int
    only: bool
    places: np.ndarray | None = None

    @property
    def size(self) -> int:
        """Number of clients in the group."""
        return len(self.members)

    @property
    def end(self) -> int:
        """Row number that means "no client": the first row after the clients' rows."""
        return self.size if self.places is None else self.rows

    @property
    def order(self) -> np.ndarray:
        """Row of each member in the group's stack, [size]."""
        return np.arange(self.size) if self.places is None else self.places

    def cohort(self, rows: Array) -> Array:
        """Convert a cohort's rows in the federation to sorted rows in this group's stack; `end` means "no client"."""
        return rows if self._is_whole else jnp.sort(self.rows_of(rows))[: self.size]

    def rows_of(self, rows: Array) -> Array:
        """Convert rows in the federation to rows in this group's stack; m and rows of other groups become `end`."""
        if self._is_whole:
            return rows
        place = np.full(self.num_clients + 1, self.end, np.int32)
        place[self.members] = self.order
        return jnp.asarray(place)[rows]

    def clients(self, rows: Array) -> Array:
        """Convert rows in this group's stack to rows in the federation (inverse of `rows_of`); `end` becomes m."""
        if self._is_whole:
            return rows
        client = np.full(self.end + 1, self.num_clients, np.int32)
        client[self.order] = self.members
        return jnp.asarray(client)[jnp.minimum(rows, self.end)]

    def every(self) -> Array:
        """Rows of all clients in the group's stack, sorted, [size] int32."""
        if self.places is None:
            return jnp.arange(self.size, dtype=jnp.int32)
        return jnp.asarray(np.sort(self.places).astype(np.int32))

    def take_every(self, own: Array) -> Array:
        """Drop the unused rows of an array in the order of the group's stack, [rows, ...] -> [size, ...]."""
        return own[: self.size] if self.places is None else own[np.sort(self.places)]

    def take(self, stacked: PyTree) -> PyTree:
        """Take the group's clients from a tree with a row for each of m clients; the result has leaves [rows, ...]."""

        def take(leaf: Array) -> Array:
            if self._is_whole:
                missing = self.rows - leaf.shape[0]
                return jnp.pad(leaf, [(0, missing)] + [(0, 0)] * (leaf.ndim - 1)) if missing else leaf
            clients = np.full(self.rows, self.members.max(initial=0))
            clients[self.order] = self.members
            return leaf[clients]

        return jax.tree.map(take, stacked)

    def put(self, stacked: PyTree, values: PyTree) -> PyTree:
        """Write the group's values into the values of all clients. Values in unused rows are dropped."""
        return jax.tree.map(lambda leaf, new: leaf.at[self.members].set(self.members_of(new)), stacked, values)

    def members_of(self, own: PyTree) -> PyTree:
        """Convert a tree from the order of the group's stack, [rows, ...], to the order of the members, [size, ...]."""
        rows = slice(self.size) if self.places is None else self.places
        return jax.tree.map(lambda leaf: leaf[rows], own)

    def restore_order(self, values: PyTree) -> PyTree:
        """Reorder values [size, ...] from the order of `every` to the order of the members."""
        if self.places is None:
            return values
        slots = np.searchsorted(np.sort(self.places), self.places)
        return jax.tree.map(lambda leaf: leaf[slots], values)

    def resized(self, *, whole: bool) -> int | np.ndarray:
        """Return the argument with which `state.resize_rows` adds or removes the unused rows of the group's stack.

        Args:
          whole: whether the result has all rows of the stack (True), or only a row for each member (False).
        """
        if self.places is None:
            return self.rows if whole else self.size
        if not whole:
            return self.places
        members = np.zeros(self.rows, np.int64)  # an unused row gets the values of the first member
        members[self.places] = np.arange(self.size)
        return members

    def dealt(self, sizes: np.ndarray, devices: int) -> Group:
        """Assign the group's clients to devices so that all devices store about equally many examples.

        Every device gets the same number of clients. The group is returned unchanged if the assignment would save less
        than `_WORTH` of the memory.

        Args:
          sizes: each member's number of examples in each split, [size, splits].
          devices: number of devices that share the rows.
        """
        share = self.rows // devices
        before = np.array_split(np.arange(self.size), np.arange(1, devices) * share)
        stored = stack.examples_held(sizes, before)
        if stored <= (1 + _WORTH) * sizes.sum(dtype=np.int64):
            return self
        # Try two assignments: balance the total number of examples, or balance each split by itself. The second is
        # better if a large split is distributed over the clients differently from the other splits.
        ways = (stack.even_shares(kinds, [share] * devices) for kinds in (sizes.sum(axis=1, keepdims=True), sizes))
        after = min(ways, key=lambda way: stack.examples_held(sizes, way))
        if stack.examples_held(sizes, after) > (1 - _WORTH) * stored:
            return self
        places = np.zeros(self.size, np.int64)
        for device, own in enumerate(after):
            places[own] = device * share + np.arange(len(own))
        return self._replace(places=places)

    @property
    def _is_whole(self) -> bool:
        return self.only and self.places is None


def make_groups(
    algorithm: Algorithm, client_ids: np.ndarray, devices: int, *, may_be_empty: bool = False
) -> tuple[Group, ...]:
    """Build the groups of an algorithm's clients.

    Args:
      algorithm: the method, whose ``group_of`` assigns clients to groups.
      client_ids: ids of all clients, [m].
      devices: number of devices that share the clients.
      may_be_empty: whether a group without clients is allowed.

    Raises:
      JaxpflError: if a group is empty although ``may_be_empty`` is false, or if ``group_of`` returns a group that does
        not exist.
    """
    count, num_clients = len(algorithm.clients), len(client_ids)
    numbers = np.zeros(num_clients, int) if count == 1 else np.asarray(algorithm.group_of(client_ids, count))
    if numbers.shape != (num_clients,) or numbers.min() < 0 or numbers.max() >= count:
        raise JaxpflError(f"group_of must give each of {num_clients} clients a group from 0 to {count - 1}")
    groups = []
    for number in range(count):
        members = np.flatnonzero(numbers == number)
        if not len(members) and not may_be_empty:
            raise JaxpflError(f"group {number} of {count} has no client: use fewer groups than {num_clients} clients")
        groups.append(Group(members, -(-len(members) // devices) * devices, num_clients, count == 1))
    return tuple(groups)


def split_federation(
    federation: Federation, groups: tuple[Group, ...], *, views: bool = False
) -> tuple[Federation, ...]:
    """Split a federation into one federation for each group.

    Args:
      federation: data of all clients.
      groups: groups of clients with the same architecture, each with the rows of its members.
      views: whether all groups share the arrays with the examples; otherwise each group gets a copy of its own clients'
        examples.
    """
    if len(groups) == 1:
        return (federation,)
    if not views:
        return tuple(federation.rows(group.members) for group in groups)

    def view(split: ClientData, group: Group) -> ClientData:
        start, size = (np.asarray(a)[group.members] for a in (split.start, split.size))
        return replace(split, start=start, size=size, chunk=chunk_of(size))

    ids = np.asarray(federation.client_ids)
    train, validation, test = federation.all_splits
    return tuple(Federation(ids[g.members], view(train, g), view(validation, g), view(test, g)) for g in groups)


def gather(values: list[PyTree], groups: tuple[Group, ...]) -> PyTree:
    """Combine the values of all non-empty groups, each [size, ...], into values in the federation's order, [m, ...]."""
    if len(groups) == 1:
        return values[0]
    order = np.argsort(np.concatenate([group.members for group in groups]))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts)[order], *values)


class Clients(NamedTuple):
    """Data of the clients, which all runs share.

    Attributes:
      federations: data of each group.
      among: for each row of the group's stack, the row of its client in the federation, [size] int32; m for unused
        rows. The array is None unless clients are streamed from the host. In this case, the only group contains only
        some of the m clients.
      ids: ids of all m clients, [m], if each device stores only its own clients' data; otherwise None. Every device has
        a copy, so that it can draw a cohort without communication.
    """

    federations: tuple[Federation, ...]
    among: Array | None = None
    ids: Array | None = None

    def received(self, per_client: PyTree) -> PyTree:
        """Reorder the messages to all clients, leaves [m, ...], into the rows of the groups' stacks.

        An unused row gets the last client's message.
        """
        among = self.among
        if among is None:
            return per_client
        # mode="clip": the index m of an unused row becomes m - 1. The results of unused rows are discarded.
        return jax.tree.map(lambda leaf: jnp.asarray(leaf).at[among].get(mode="clip"), per_client)

    def places(self, rows: Array, num_clients: int) -> Array:
        """Convert rows in the only group's stack to rows in the federation; rows without a client become m."""
        return rows if self.among is None else self.among.at[rows].get(mode="fill", fill_value=num_clients)


AXIS = "clients"
"""The mesh axis over which clients are sharded."""


_TOGETHER = 8
"""Number of blocks of clients (`run_cohort`) whose sums are added without compensation. The rounding errors of these
seven additions stay below 5e-7 of the sum.
"""


class Outcome(NamedTuple):
    """Result of one client's work.

    Attributes:
      state: the client's next state.
      summed: tree that is summed over the cohort.
      kept: outputs that are kept separately for each slot of the cohort, not summed.
    """

    state: PyTree
    summed: PyTree
    kept: PyTree


OneClient = Callable[[PyTree, Array, PyTree, PyTree], Outcome]
"""Function ``(shared, present [] bool, state, data) -> Outcome`` that performs one client's work. In an empty slot of
the cohort, ``present`` is false, and the function must return the unchanged state and zeros for the sum. A function
that only reads states returns ``()`` as the state."""


_Work = Callable[[Array, PyTree, PyTree], Outcome]
"""Function ``(present, state, data) -> Outcome``: a `OneClient` whose argument ``shared`` and whose arrays of examples
are already bound.
"""


class Spread(NamedTuple):
    """Distribution of clients over devices.

    Attributes:
      mesh: mesh of the devices, whose axis `AXIS` is the axis of clients. If the mesh also has a model axis, the
        compiler partitions the arrays on that axis.
      shared_data: whether all devices read the same copy of the data, as CPU devices do in the host's memory. Otherwise
        each device stores its own clients' data.
      even: whether each device runs an equal part of the cohort, which requires ``shared_data``. The state of a client
        then moves to the device that runs the client, and back. Otherwise a client runs on the device that stores its
        state, and only sums are communicated.
    """

    mesh: Mesh
    shared_data: bool
    even: bool

    @property
    def parts(self) -> int:
        """Number of devices (or groups of devices) over which the clients are distributed."""
        return self.mesh.shape[AXIS]


class _Slots(NamedTuple):
    """Slots of a cohort that one device runs, each for one client; filled slots come before empty slots.

    Attributes:
      present: whether the slot is filled.
      state: row of the slot's client in the states.
      data: row of the slot's client in the data.
      place: index of the slot among the cohort's slots on all devices; the client's outputs are stored there.
    """

    present: Array
    state: Array
    data: Array
    place: Array


def run_cohort(
    one: OneClient,
    shared: PyTree,
    rows: Array,
    states: PyTree,
    data: PyTree,
    *,
    num_clients: int,
    block: int,
    everyone: bool,
    spread: Spread | None = None,
) -> Outcome:
    """Apply ``one`` to every client of the cohort.

    Args:
      one: work of one client.
      shared: inputs that are the same for all clients. ``one`` must take them as an argument and not capture them.
        Within ``shard_map``, captured arrays would keep their types from outside, and the gradient of a ``lax.scan``
        over a client's data would fail because types differ.
      rows: row of each slot's client in ``states``, [capacity] int32, sorted and distinct; m in empty slots.
      states: stacked client states, leaves [m', ...], where m' is m rounded up to a multiple of ``spread.parts``.
      data: other inputs that are stacked by client, leaves [m, ...] or [m', ...], including `ClientData`. The clients'
        examples remain in their common store: this function neither gathers nor copies them.
      num_clients: number m of clients.
      block: number of clients in one vectorized operation; 1 runs the clients one after the other.
      everyone: whether the rows are 0 ... m-1 (static). In this case, no row is gathered if all clients fit in one
        block.
      spread: distribution of clients over several devices; None for one device (then m' = m).

    Returns:
      An `Outcome`. ``state`` has all clients' states, with new states for the cohort. ``summed`` is the sum over the
      cohort. ``kept`` has the outputs of every slot, [capacity, ...], which are zero in empty slots. If there are
      several devices, each has a copy of ``kept``.
    """
    capacity = rows.shape[0]
    data, examples = split_stores(data)
    if spread is None:
        here = _Slots(rows < num_clients, rows, rows, jnp.arange(capacity))
        work = partial(_join_and_call, one, shared, examples)
        return _run_here(work, here, states, data, kept=capacity, block=block, everyone=everyone)
    devices = spread.parts
    own = -(-num_clients // devices)
    by_client = P(AXIS)

    # check_vma=False: an algorithm's loops start from constants, each of which would need a cast to "varying".
    @partial(
        jax.shard_map,
        mesh=spread.mesh,
        in_specs=(P(), P(), by_client, *[P() if spread.shared_data else by_client] * 2),
        out_specs=Outcome(by_client, P(), P()),
        axis_names={AXIS},
        check_vma=False,
    )
    def on_each(shared: PyTree, rows: Array, states: PyTree, data: PyTree, examples: tuple[Examples, ...]) -> Outcome:
        work = partial(_join_and_call, one, shared, examples)
        if not spread.shared_data:
            data = shift_places(data, examples, jax.lax.axis_index(AXIS))
        first = jax.lax.axis_index(AXIS) * own
        if spread.even:
            outcome = _run_even(work, rows, first, states, data, num_clients=num_clients, block=block, devices=devices)
        else:
            here = (rows >= first) & (rows < first + own) & (rows < num_clients)
            local = jnp.sort(jnp.where(here, rows - first, own))[: min(own, rows.shape[0])]
            data_rows = local + first if spread.shared_data else local
            place = (rows < first).sum() + jnp.arange(local.shape[0])  # rows are sorted
            slots = _Slots(local < own, local, data_rows, jnp.where(local < own, place, capacity))
            aligned = everyone and not spread.shared_data
            outcome = _run_here(work, slots, states, data, kept=capacity, block=block, everyone=aligned)
        # Exactly one device has the outputs of a slot, and the others have zeros, so the sum over devices gives the
        # outputs.
        return outcome._replace(summed=all_summed(outcome.summed, AXIS), kept=jax.tree.map(_psum, outcome.kept))

    return on_each(shared, rows, states, data, examples)


def _join_and_call(
    one: OneClient, shared: PyTree, examples: tuple[Examples, ...], present: Array, state: PyTree, data: PyTree
) -> Outcome:
    """Insert the examples' arrays into one client's data (`join_stores`), and call ``one``."""
    return one(shared, present, state, join_stores(data, examples))


def _run_even(
    one: _Work,
    rows: Array,
    first: Array,
    states: PyTree,
    data: PyTree,
    *,
    num_clients: int,
    block: int,
    devices: int,
) -> Outcome:
    """Run this device's equal share of the cohort's slots (`Spread.even`).

    Args:
      one: work of one client.
      rows: rows [capacity] of the cohort's clients on all devices.
      first: first client whose state this device stores.
      states: states of this device's clients.
      data: data of all clients.
      num_clients: number m of clients.
      block: number of clients in one vectorized operation.
      devices: number of devices.
    """
    own = jax.tree.leaves(states)[0].shape[0]
    capacity = rows.shape[0]
    share = -(-capacity // devices)
    rows = jnp.pad(rows, (0, share * devices - capacity), constant_values=num_clients)
    # Slot i goes to device i mod D, so that the empty slots, which come last, are distributed evenly too.
    rows = rows.reshape(share, devices).T.reshape(-1)
    local = jnp.where((rows >= first) & (rows < first + own) & (rows < num_clients), rows - first, own)

    def only_mine(vector: Array) -> Array:
        return jnp.where((local < own)[:, None], vector, jnp.zeros((), vector.dtype))

    # Exactly one device stores the state of a row, and the others contribute zeros, so the sum moves the state to the
    # device that runs the client.
    held = jax.tree.map(only_mine, jax.vmap(trees.pack)(jax.tree.map(lambda a: a.at[local].get(mode="clip"), states)))
    mine = jax.tree.map(lambda v: jax.lax.psum_scatter(v, AXIS, scatter_dimension=0, tiled=True), held)
    turn = jax.lax.dynamic_slice_in_dim(rows, jax.lax.axis_index(AXIS) * share, share)
    present = turn < num_clients
    place = jax.lax.axis_index(AXIS) + devices * jnp.arange(share)
    slots = _Slots(present, jnp.where(present, jnp.arange(share), share), turn, jnp.where(present, place, capacity))
    outcome = _run_here(one, slots, mine.unpack(), data, kept=capacity, block=block)
    done = jax.tree.map(lambda v: jax.lax.all_gather(v, AXIS, axis=0, tiled=True), jax.vmap(trees.pack)(outcome.state))
    new = jax.tree.map(lambda a, v: a.at[local].set(v, mode="drop"), states, done.unpack())
    return Outcome(new, outcome.summed, outcome.kept)


def _run_here(
    one: _Work, slots: _Slots, states: PyTree, data: PyTree, *, kept: int, block: int, everyone: bool = False
) -> Outcome:
    """Run the slots of one device.

    Args:
      one: work of one client.
      slots: slots that this device runs.
      states: states of this device's clients.
      data: data that this device reads.
      kept: number of slots of the cohort on all devices.
      block: number of clients in one vectorized operation.
      everyone: whether slot i has row i of states and data (static).
    """
    capacity = slots.present.shape[0]
    if block >= capacity and (everyone or block > 1):
        old, inputs = (states, data) if everyone else _rows_of(slots, states, data)
        outcome = jax.vmap(one)(slots.present, old, inputs)
        if not everyone and jax.tree.leaves(outcome.state):  # otherwise the states are only read
            outcome = outcome._replace(state=trees.put_rows(states, slots.state, outcome.state))
        if kept != capacity or not everyone:  # other devices run the other slots
            nothing = jax.tree.map(lambda a: jnp.zeros((kept, *a.shape[1:]), a.dtype), outcome.kept)
            outcome = outcome._replace(kept=trees.put_rows(nothing, slots.place, outcome.kept))
        return outcome._replace(summed=_sum(outcome.summed))

    blocks = -(-capacity // block)
    padding = blocks * block - capacity
    last = jnp.int32(2**31 - 1)
    ends = _Slots(jnp.array(False), last, last, last)
    slots = jax.tree.map(lambda a, end: jnp.pad(a, (0, padding), constant_values=end), slots, ends)
    table = jax.tree.map(lambda a: a.reshape(blocks, block), slots)
    run_block, put = (_one_by_one, _put_one) if block == 1 else (_together, trees.put_rows)
    # Trace once: eval_shape and the loop share the cached trace if their arguments have the same types. Within
    # shard_map, a type includes the mesh axes over which it varies, so `present` must come from the slots.
    one = jax.jit(one, inline=True)
    shapes = jax.eval_shape(lambda: one(slots.present[0], *_row((states, data), slots.state[0])))
    nothing = jax.tree.map(lambda leaf: jnp.zeros((kept, *leaf.shape), leaf.dtype), shapes.kept)
    read_only = not jax.tree.leaves(shapes.state)

    def body(i: Array, carry: Outcome) -> Outcome:
        # The states are part of the carry and are written in place: each row is read and written once in a round, and
        # the loop needs one copy of the states for any cohort. States that are only read are not part of the carry.
        here = _row(table, i)
        new, summed, values = run_block(one, here, states if read_only else carry.state, data)
        total = jax.tree.map(jnp.add, carry.summed, summed)
        return Outcome(put(carry.state, here.state, new), total, put(carry.kept, here.place, values))

    # Empty slots come last, so a device runs only the blocks that contain clients.
    filled = -(-slots.present.sum() // block)
    empty = RunningSum.zero(shapes.summed)

    def group(nth: Array, carry: Outcome) -> Outcome:
        # A few blocks are added plainly, and only their sum is added with compensation. This costs a third as much as
        # compensating every block.
        first = nth * _TOGETHER
        last = jnp.minimum(first + _TOGETHER, filled)
        outcome = jax.lax.fori_loop(first, last, body, carry._replace(summed=empty.total))
        return outcome._replace(summed=carry.summed.plus(outcome.summed))

    start = Outcome(() if read_only else states, empty, nothing)
    outcome = jax.lax.fori_loop(0, -(-filled // _TOGETHER), group, start)
    return outcome._replace(summed=outcome.summed.total)


def _together(one: _Work, slots: _Slots, states: PyTree, data: PyTree) -> Outcome:
    new, summed, values = jax.vmap(one)(slots.present, *_rows_of(slots, states, data))
    return Outcome(new, _sum(summed), values)


def _rows_of(slots: _Slots, states: PyTree, data: PyTree) -> tuple[PyTree, PyTree]:
    return trees.take_rows(states, slots.state), trees.take_rows(data, slots.data)


def _one_by_one(one: _Work, slots: _Slots, states: PyTree, data: PyTree) -> Outcome:
    # A vmap of width one would turn every matrix product into a batched product, so the client is called directly.
    here = jax.tree.map(lambda a: a[0], slots)
    return one(here.present, _row(states, here.state), _row(data, here.data))


def _put_one(tree: PyTree, rows: Array, values: PyTree) -> PyTree:
    # With one client at a time, the loop never reaches an empty slot, so no row needs to be dropped. XLA would compile
    # a scatter that drops rows to a loop.
    return jax.tree.map(lambda a, v: jax.lax.dynamic_update_index_in_dim(a, v, rows[0], 0), tree, values)


def _row(tree: PyTree, row: Array) -> PyTree:
    """Return one row of every leaf; for an index out of range, the nearest row."""
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, row, keepdims=False), tree)


def _psum(leaf: Array) -> Array:
    if leaf.dtype == jnp.bool_:
        return jax.lax.psum(leaf.astype(jnp.int8), AXIS) > 0
    return jax.lax.psum(leaf, AXIS)


def _sum(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda a: a.sum(axis=0, dtype=a.dtype), tree)


_LIMB_BITS = 11
"""Bits of each of the three floats that represent an int32. Their sums are exact in float32 for up to 2^13 devices."""


def all_summed(tree: PyTree, axis: str) -> PyTree:
    """Sum a tree over the devices of a mesh axis; the result equals ``jax.lax.psum`` of each leaf.

    To reduce the number of messages, all leaves with the same floating-point dtype are concatenated into one vector. An
    int32 leaf is appended to such a vector as floats that are summed exactly. Sharded leaves (`trees.leaves_apart`) are
    never concatenated.
    """
    leaves, structure = jax.tree.flatten(tree)
    exact = next((leaf.dtype for leaf in leaves if leaf.dtype in (jnp.float32, jnp.float64)), None)
    if exact is None or trees.leaves_apart.value:
        return jax.lax.psum(tree, axis)

    def sent(leaf: Array) -> Array:
        if leaf.dtype != jnp.int32:
            return leaf
        low, middle = (leaf >> shift & (1 << _LIMB_BITS) - 1 for shift in (0, _LIMB_BITS))
        return jnp.stack([low, middle, leaf >> 2 * _LIMB_BITS]).astype(exact)

    def received(limbs: Array, like: Any) -> Array:
        if like.dtype != jnp.int32:
            return limbs
        low, middle, high = limbs.astype(jnp.int32)
        return low + (middle << _LIMB_BITS) + (high << 2 * _LIMB_BITS)  # wraps on overflow, as an int32 sum does

    packed = trees.pack([sent(leaf) for leaf in leaves])
    found = jax.lax.psum(packed, axis).unpack()
    return jax.tree.unflatten(structure, list(map(received, found, leaves)))


def split_stores(tree: PyTree) -> tuple[PyTree, tuple[Examples, ...]]:
    """Take the examples out of each `ClientData` in a tree; return the rest of the tree, and the examples.

    The examples of all clients are in common arrays [N, ...] (a store), while the other leaves are stacked by client,
    [m, ...]. A function of one client can then be mapped over the other leaves and receive whole stores, so that
    examples are never gathered or copied.
    """
    stores = [node.examples for node in jax.tree.leaves(tree, is_leaf=_is_data) if _is_data(node)]
    return join_stores(tree, [None] * len(stores)), tuple(stores)


def join_stores(tree: PyTree, stores: Sequence[Examples | None]) -> PyTree:
    """Insert the examples into a tree that `split_stores` returned, or into one client's rows of this tree."""
    given = iter(stores)
    return jax.tree.map(
        lambda node: replace(node, examples=next(given)) if _is_data(node) else node, tree, is_leaf=_is_data
    )


def shift_places(tree: PyTree, stores: Sequence[Examples], device: Array) -> PyTree:
    """Convert the position of each client's first example, in the array of all examples, to its position in a device's
    shard of this array.

    Args:
      tree: result of `split_stores`, in which each `ClientData` has no examples; for one client, or with a leading axis
        of clients.
      stores: this device's shards; all devices' shards of a store have the same length.
      device: index of this device, [] int32.
    """
    parts = iter(stores)

    def shift(node: Any) -> Any:
        return replace(node, start=node.start - device * len(next(parts).y)) if _is_data(node) else node

    return jax.tree.map(shift, tree, is_leaf=_is_data)


def _is_data(node: Any) -> bool:
    return isinstance(node, ClientData)


MODEL = "model"
"""The mesh axis over which one client's arrays are sharded."""


class ModelAxis(NamedTuple):
    """Mesh axis over which each client's arrays are sharded. The devices on this axis work on one client together.

    Attributes:
      mesh: mesh of all devices, with an axis `MODEL`.
    """

    mesh: Mesh

    def layout(self, tree: PyTree, *lead: str | None) -> PyTree:
        """Sharding of every leaf, chosen by its shape without the leading axes.

        Args:
          tree: arrays or shapes.
          lead: mesh axis of each leading axis of all leaves; None for an axis that is not sharded.
        """
        count = self.mesh.shape[MODEL]
        return jax.tree.map(lambda a: NamedSharding(self.mesh, P(*lead, *_parts(a, count, len(lead)))), tree)

    def lay(self, tree: PyTree) -> PyTree:
        """Tell the compiler, within a traced program, to shard the arrays of one client or of the server."""
        within = jax.sharding.get_abstract_mesh()  # not empty in `shard_map`, where the axis of clients is manual
        mesh, count = self.mesh if within.empty else within, self.mesh.shape[MODEL]

        def lay(a: Array) -> Array:
            parts = _parts(a, count)
            if not any(parts):
                return a
            return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*parts)))

        return jax.tree.map(lay, tree)


def lay(axis: ModelAxis | None, tree: PyTree) -> PyTree:
    """Apply `ModelAxis.lay`; without a model axis, return the tree unchanged."""
    return tree if axis is None else axis.lay(tree)


def bytes_of_part(shapes: PyTree, count: int) -> int:
    """Bytes of one client's tree on each of ``count`` devices that share it.

    Raises:
      JaxpflError: if no array has a dimension that is divisible by ``count``.
    """
    leaves = jax.tree.leaves(shapes)
    divided = [any(_parts(a, count)) for a in leaves]
    if not any(divided):
        raise JaxpflError(f"plan.model_shards = {count}: no array of the model has a dimension divisible by {count}")
    sizes = [math.prod(a.shape) * a.dtype.itemsize for a in leaves]
    return sum(size // count if parts else size for size, parts in zip(sizes, divided, strict=True))


def _parts(a: jax.ShapeDtypeStruct | Array, count: int, lead: int = 0) -> Sequence[str | None]:
    """Mesh axis of each dimension after the ``lead`` first ones: `MODEL` for the sharded dimension, otherwise None."""
    if jnp.issubdtype(a.dtype, jax.dtypes.extended):  # random keys are replicated
        return ()
    shape = a.shape[lead:]
    divisible = [(size, place) for place, size in enumerate(shape) if size and size % count == 0]
    if not divisible:
        return ()
    _, chosen = max(divisible)
    return [MODEL if place == chosen else None for place in range(len(shape))]
