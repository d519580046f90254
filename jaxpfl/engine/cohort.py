"""The mesh axes: clients, to each of which a function is applied on every device, and the parts of one client's model.

With D devices, each holds the states of m' / D consecutive clients, where m' is m rounded up to a multiple of D. The
`Spread` assigns work to devices; it changes nothing but the order of additions.

On the model axis several devices work on a client together: an array lies in equal parts along its largest dimension
that the number of devices divides, or whole on each of them if it has none. A program for one device is compiled with
these layouts as constraints; the compiler divides its operations and inserts what they exchange (GSPMD,
arXiv:2105.04663), so that results differ in the order of additions alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpfl.core import trees
from jaxpfl.core.full_precision import RunningSum
from jaxpfl.core.types import Array, ClientData, Examples, PyTree
from jaxpfl.support.errors import JaxpflError

AXIS = "clients"
"""The mesh axis over which clients are sharded."""


_TOGETHER = 8
"""Blocks whose sums are added as they are: their rounding errors, of seven additions, stay below 5e-7 of the sum."""


class Outcome(NamedTuple):
    """Result of one client's work: its next state, the part to be summed over the cohort, and its own outputs."""

    state: PyTree
    summed: PyTree
    kept: PyTree


OneClient = Callable[[PyTree, Array, PyTree, PyTree], Outcome]
"""``(shared, present [] bool, state, data) -> Outcome``. An empty slot of the cohort is a client that is not present:
its state must be returned unchanged, its summed part zero. A state of ``()`` means that states are only read."""


_Work = Callable[[Array, PyTree, PyTree], Outcome]
"""`OneClient` with ``shared`` and the stores bound."""


class Spread(NamedTuple):
    """Distribution of clients over devices.

    Attributes:
      mesh: the devices, with an axis `AXIS`; another one, of devices that share a client, is left to the compiler.
      shared_data: every device reads all data (CPU devices share the host's memory); else each holds its clients'.
      even: each device runs an equal part of the cohort, and states are moved to it and back; else clients work on the
        device that holds their state, and only sums are communicated. Requires ``shared_data``.
    """

    mesh: Mesh
    shared_data: bool
    even: bool

    @property
    def parts(self) -> int:
        """Number of devices, or groups of them, that share the clients."""
        return self.mesh.shape[AXIS]


class _Slots(NamedTuple):
    """Slots of a cohort, the filled ones first.

    Attributes:
      present: whether filled.
      state, data: the client's row in states and in data.
      place: index of the slot in the whole cohort, at which its outputs are stored.
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
    """Apply ``one`` to every row of the cohort.

    Args:
      one: the work of one client.
      shared: input common to all clients. It must not be closed over: within the devices' programs it would keep its
        outer type, and the gradient of a ``lax.scan`` over a client's data fails on such a mixture.
      rows: [capacity] int32, sorted, distinct; m where the slot is empty.
      states: stacked client states, leaves [m', ...].
      data: anything else that is stacked by client, leaves [m, ...] (or [m', ...]), and `ClientData`, whose stores are
        shared: no example is gathered or copied here.
      num_clients: m.
      block: clients per vectorised operation; 1 runs one after the other.
      everyone: static; the rows are 0 ... m-1, so that nothing needs to be gathered if they run at once.
      spread: distribution over several devices; None for one device (then m' = m).

    Returns:
      All clients' states with the cohort's rows replaced, the sum over the cohort, and the outputs of every slot,
      [capacity, ...], zero where it is empty; on several devices each holds all of them.
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

    # check_vma: an algorithm's loops start from constants, which would each need a cast to "varying over clients".
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
        # One device has the outputs of a slot, the others have zeros.
        return outcome._replace(summed=all_summed(outcome.summed, AXIS), kept=jax.tree.map(_psum, outcome.kept))

    return on_each(shared, rows, states, data, examples)


def _join_and_call(
    one: OneClient, shared: PyTree, examples: tuple[Examples, ...], present: Array, state: PyTree, data: PyTree
) -> Outcome:
    """`OneClient` for data without their stores."""
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
    """This device's share of the slots; ``first`` is the first client whose state it holds."""
    own = jax.tree.leaves(states)[0].shape[0]
    capacity = rows.shape[0]
    share = -(-capacity // devices)
    rows = jnp.pad(rows, (0, share * devices - capacity), constant_values=num_clients)
    # Dealt in turn, so that empty slots, which come last, are distributed evenly too.
    rows = rows.reshape(share, devices).T.reshape(-1)
    local = jnp.where((rows >= first) & (rows < first + own) & (rows < num_clients), rows - first, own)

    def only_mine(vector: Array) -> Array:
        return jnp.where((local < own)[:, None], vector, jnp.zeros((), vector.dtype))

    # Exactly one device holds the state of a row: the sum over devices moves it to where it is needed.
    held = jax.tree.map(only_mine, jax.vmap(trees.pack)(_clipped(states, local)))
    mine = jax.tree.map(lambda v: jax.lax.psum_scatter(v, AXIS, scatter_dimension=0, tiled=True), held)
    turn = jax.lax.dynamic_slice_in_dim(rows, jax.lax.axis_index(AXIS) * share, share)
    present = turn < num_clients
    place = jax.lax.axis_index(AXIS) + devices * jnp.arange(share)
    slots = _Slots(present, jnp.where(present, jnp.arange(share), share), turn, jnp.where(present, place, capacity))
    outcome = _run_here(one, slots, jax.vmap(trees.Packed.unpack)(mine), data, kept=capacity, block=block)
    done = jax.tree.map(lambda v: jax.lax.all_gather(v, AXIS, axis=0, tiled=True), jax.vmap(trees.pack)(outcome.state))
    new = jax.tree.map(lambda a, v: a.at[local].set(v, mode="drop"), states, jax.vmap(trees.Packed.unpack)(done))
    return Outcome(new, outcome.summed, outcome.kept)


def _run_here(
    one: _Work, slots: _Slots, states: PyTree, data: PyTree, *, kept: int, block: int, everyone: bool = False
) -> Outcome:
    """Run the slots of one device.

    Args:
      kept: slots of the whole cohort.
      everyone: static; slot i is row i of states and data.
    """
    capacity = slots.present.shape[0]
    if block >= capacity and everyone:
        outcome = jax.vmap(one)(slots.present, states, data)
        if kept != capacity:  # other devices have the rest
            outcome = outcome._replace(kept=trees.put_rows(_zeros(outcome.kept, kept), slots.place, outcome.kept))
        return outcome._replace(summed=_sum(outcome.summed))

    blocks = -(-capacity // block)
    padding = blocks * block - capacity
    last = jnp.int32(2**31 - 1)
    ends = _Slots(jnp.array(False), last, last, last)
    slots = jax.tree.map(lambda a, end: jnp.pad(a, (0, padding), constant_values=end), slots, ends)
    table = jax.tree.map(lambda a: a.reshape(blocks, block), slots)
    run_block, put = (_one_by_one, _put_one) if block == 1 else (_together, trees.put_rows)
    # Traced once: eval_shape and the loop share the cached trace, if their arguments are typed alike (within shard_map
    # a type says over which mesh axis it varies, so `present` must come from the slots).
    one = jax.jit(one, inline=True)
    shapes = jax.eval_shape(lambda: one(slots.present[0], *_row((states, data), slots.state[0])))
    nothing = jax.tree.map(lambda leaf: jnp.zeros((kept, *leaf.shape), leaf.dtype), shapes.kept)
    read_only = not jax.tree.leaves(shapes.state)

    def body(i: Array, carry: Outcome) -> Outcome:
        # The states travel in the carry and are written in place: each row is read and written once in a round, and
        # the loop holds one copy of them however large the cohort is. States that are only read stay out of it.
        here = _row(table, i)
        new, summed, values = run_block(one, here, states if read_only else carry.state, data)
        total = jax.tree.map(jnp.add, carry.summed, summed)
        return Outcome(put(carry.state, here.state, new), total, put(carry.kept, here.place, values))

    # Empty slots come last, so that a device runs only as many blocks as it has clients in the cohort.
    filled = -(-slots.present.sum() // block)
    empty = RunningSum.zero(shapes.summed)

    def group(nth: Array, carry: Outcome) -> Outcome:
        # A few uploads are added as they are and their sum compensated, which costs a third of compensating each.
        first = nth * _TOGETHER
        last = jnp.minimum(first + _TOGETHER, filled)
        outcome = jax.lax.fori_loop(first, last, body, carry._replace(summed=empty.total))
        return outcome._replace(summed=carry.summed.plus(outcome.summed))

    start = Outcome(() if read_only else states, empty, nothing)
    outcome = jax.lax.fori_loop(0, -(-filled // _TOGETHER), group, start)
    return outcome._replace(summed=outcome.summed.total)


def _together(one: _Work, slots: _Slots, states: PyTree, data: PyTree) -> Outcome:
    old, inputs = trees.take_rows(states, slots.state), trees.take_rows(data, slots.data)
    new, summed, values = jax.vmap(one)(slots.present, old, inputs)
    return Outcome(new, _sum(summed), values)


def _one_by_one(one: _Work, slots: _Slots, states: PyTree, data: PyTree) -> Outcome:
    # A vmap of width one would turn every product into a batched one; this keeps the client's own operations.
    here = jax.tree.map(lambda a: a[0], slots)
    return one(here.present, _row(states, here.state), _row(data, here.data))


def _put_one(tree: PyTree, rows: Array, values: PyTree) -> PyTree:
    # One client at a time, empty slots are never reached; and XLA makes a loop of a scatter that may drop its row.
    return jax.tree.map(lambda a, v: jax.lax.dynamic_update_index_in_dim(a, v, rows[0], 0), tree, values)


def _row(tree: PyTree, row: Array) -> PyTree:
    """One row of every leaf, the nearest one if the row is out of range."""
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, row, keepdims=False), tree)


def _clipped(tree: PyTree, rows: Array) -> PyTree:
    return jax.tree.map(lambda a: a.at[rows].get(mode="clip"), tree)


def _zeros(like: PyTree, rows: int) -> PyTree:
    return jax.tree.map(lambda a: jnp.zeros((rows, *a.shape[1:]), a.dtype), like)


def _psum(leaf: Array) -> Array:
    if leaf.dtype == jnp.bool_:
        return jax.lax.psum(leaf.astype(jnp.int8), AXIS) > 0
    return jax.lax.psum(leaf, AXIS)


def _sum(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda a: a.sum(axis=0, dtype=a.dtype), tree)


_LIMB_BITS = 11
"""Bits of the three numbers that stand for an int32 in a vector of floats: exact in float32 for up to 2^13 devices."""


def all_summed(tree: PyTree, axis: str) -> PyTree:
    """Sum a tree over the devices of a mesh axis, with the numbers and types of ``jax.lax.psum`` on each leaf.

    Leaves of one floating-point type travel in one vector, and int32 leaves in the same as exact floats. Leaves that
    lie in parts on several devices (`trees.leaves_apart`) are never concatenated.
    """
    leaves, structure = jax.tree.flatten(tree)
    exact = next((leaf.dtype for leaf in leaves if leaf.dtype in (jnp.float32, jnp.float64)), None)
    if exact is None or trees.are_apart():
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
        return low + (middle << _LIMB_BITS) + (high << 2 * _LIMB_BITS)  # beyond int32 it wraps, as their sum does

    packed = trees.pack([sent(leaf) for leaf in leaves])
    found = jax.lax.psum(packed, axis).unpack()
    return jax.tree.unflatten(structure, list(map(received, found, leaves)))


def split_stores(tree: PyTree) -> tuple[PyTree, tuple[Examples, ...]]:
    """A tree stacked by client without its stores (leaves [m, ...]), and these (leaves [N, ...]), in order.

    A function of one client is mapped over the former alone: a store is an argument that is never gathered or copied.
    """
    stores = [node.examples for node in jax.tree.leaves(tree, is_leaf=_is_data) if _is_data(node)]
    return join_stores(tree, [None] * len(stores)), tuple(stores)


def join_stores(tree: PyTree, stores: Sequence[Examples | None]) -> PyTree:
    """Inverse of `split_stores`, for one client or a stack."""
    given = iter(stores)
    return jax.tree.map(
        lambda node: replace(node, examples=next(given)) if _is_data(node) else node, tree, is_leaf=_is_data
    )


def shift_places(tree: PyTree, stores: Sequence[Examples], device: Array) -> PyTree:
    """The tree with places in a device's parts of stores that lie on several in equal parts.

    Args:
      tree: without its stores, stacked or one client's.
      stores: this device's parts.
      device: [] int32, its index.
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
    """Devices that hold one client's arrays together.

    Attributes:
      mesh: all devices, with an axis `MODEL`.
    """

    mesh: Mesh

    def layout(self, tree: PyTree, *lead: str | None) -> PyTree:
        """The layout of every leaf, by its shape behind leading axes.

        Args:
          tree: arrays or shapes.
          lead: the mesh axis of each leading axis of all leaves, None for one that is not sharded.
        """
        count = self.mesh.shape[MODEL]
        return jax.tree.map(lambda a: NamedSharding(self.mesh, P(*lead, *_parts(a, count, len(lead)))), tree)

    def lay(self, tree: PyTree) -> PyTree:
        """The same arrays of one client or of the server, which the compiler is to hold in parts; within a program."""
        within = jax.sharding.get_abstract_mesh()  # in `shard_map`, where the axis of clients is not the compiler's
        mesh, count = self.mesh if within.empty else within, self.mesh.shape[MODEL]

        def lay(a: Array) -> Array:
            parts = _parts(a, count)
            if not any(parts):
                return a
            return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*parts)))

        return jax.tree.map(lay, tree)


def lay(axis: ModelAxis | None, tree: PyTree) -> PyTree:
    """`ModelAxis.lay`; without an axis the tree as it is."""
    return tree if axis is None else axis.lay(tree)


def bytes_of_part(shapes: PyTree, count: int) -> int:
    """Bytes that one client's tree takes on each of ``count`` devices.

    Raises:
      JaxpflError: if none of its arrays can be divided.
    """
    leaves = jax.tree.leaves(shapes)
    divided = [any(_parts(a, count)) for a in leaves]
    if not any(divided):
        raise JaxpflError(f"plan.model_shards = {count}: no array of the model has a dimension divisible by {count}")
    sizes = [math.prod(a.shape) * a.dtype.itemsize for a in leaves]
    return sum(size // count if parts else size for size, parts in zip(sizes, divided, strict=True))


def _parts(a: jax.ShapeDtypeStruct | Array, count: int, lead: int = 0) -> Sequence[str | None]:
    """The mesh axis of each dimension behind the leading ones: `MODEL` for one of them at most."""
    if jnp.issubdtype(a.dtype, jax.dtypes.extended):  # keys
        return ()
    shape = a.shape[lead:]
    divisible = [(size, place) for place, size in enumerate(shape) if size and size % count == 0]
    if not divisible:
        return ()
    _, chosen = max(divisible)
    return [MODEL if place == chosen else None for place in range(len(shape))]
