"""Groups of clients with the same model architecture. Each group's states are stacked separately."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core.protocol import Algorithm
from jaxpfl.core.types import Array, ClientData, Federation, PyTree, chunk_of
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


def split(federation: Federation, groups: tuple[Group, ...], *, views: bool = False) -> tuple[Federation, ...]:
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
