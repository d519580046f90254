"""Groups of clients whose states differ in structure (other architectures), each a stack of its own."""

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
"""Share of the memory of clients' examples from which on their order is changed to save it."""


class Group(NamedTuple):
    """Clients that share a stack. A single group is the stack of all clients, and nothing is moved.

    Attributes:
      members: their rows in the stack of all m clients, ascending, [size]; on the host.
      rows: rows of the group's own stack: its size, rounded up to a multiple of the devices.
      num_clients: m.
      only: true if there is no other group.
      places: row of each member in the group's own stack, [size], on the host; None if member i has row i. Rows that
        are nobody's then lie at the end of each device's part.
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
        """Row behind all clients' rows, which stands for an empty slot."""
        return self.size if self.places is None else self.rows

    @property
    def order(self) -> np.ndarray:
        """Rows of the members in the group's own stack, [size]."""
        return np.arange(self.size) if self.places is None else self.places

    def cohort(self, rows: Array) -> Array:
        """Map a cohort's rows among all clients to rows in this group, sorted, ``end`` where empty."""
        return rows if self._is_whole else jnp.sort(self.rows_of(rows))[: self.size]

    def rows_of(self, rows: Array) -> Array:
        """Map rows among all clients to rows in this group; ``end`` for m and for other groups' clients."""
        if self._is_whole:
            return rows
        place = np.full(self.num_clients + 1, self.end, np.int32)
        place[self.members] = self.order
        return jnp.asarray(place)[rows]

    def clients(self, rows: Array) -> Array:
        """Map rows in this group to rows among all clients, the inverse of `cohort`; m where empty."""
        if self._is_whole:
            return rows
        client = np.full(self.end + 1, self.num_clients, np.int32)
        client[self.order] = self.members
        return jnp.asarray(client)[jnp.minimum(rows, self.end)]

    def every(self) -> Array:
        """Rows of all of the group's clients, sorted, [size] int32."""
        if self.places is None:
            return jnp.arange(self.size, dtype=jnp.int32)
        return jnp.asarray(np.sort(self.places).astype(np.int32))

    def take_every(self, own: Array) -> Array:
        """The rows of `every` of what is stacked as the group is."""
        return own[: self.size] if self.places is None else own[np.sort(self.places)]

    def take(self, stacked: PyTree) -> PyTree:
        """The group's rows of a tree stacked by all clients, [m, ...], padded to ``rows``."""

        def take(leaf: Array) -> Array:
            if self._is_whole:
                missing = self.rows - leaf.shape[0]
                return jnp.pad(leaf, [(0, missing)] + [(0, 0)] * (leaf.ndim - 1)) if missing else leaf
            clients = np.full(self.rows, self.members.max(initial=0))
            clients[self.order] = self.members
            return leaf[clients]

        return jax.tree.map(take, stacked)

    def take_counts(self, stacked: PyTree) -> PyTree:
        """The group's rows of what a state holds for all clients, [m', ...]: in its own order if it is the only one."""
        return stacked if self.only else self.take(stacked)

    def put(self, stacked: PyTree, values: PyTree) -> PyTree:
        """Replace the group's rows in what a state holds for all clients; rows that are nobody's are dropped."""
        if self.only:
            return values
        return jax.tree.map(lambda leaf, new: leaf.at[self.members].set(self.members_of(new)), stacked, values)

    def members_of(self, own: PyTree) -> PyTree:
        """The members of a tree stacked as the group is, [rows, ...] -> [size, ...]."""
        rows = slice(self.size) if self.places is None else self.places
        return jax.tree.map(lambda leaf: leaf[rows], own)

    def restore_order(self, values: PyTree) -> PyTree:
        """Reorder values by slot of `every`, [size, ...], to the members' order."""
        if self.places is None:
            return values
        slots = np.searchsorted(np.sort(self.places), self.places)
        return jax.tree.map(lambda leaf: leaf[slots], values)

    def resized(self, *, whole: bool) -> int | np.ndarray:
        """The own stack's rows, or the members' alone, for `state.resize_rows`."""
        if self.places is None:
            return self.rows if whole else self.size
        if not whole:
            return self.places
        members = np.zeros(self.rows, np.int64)  # a row that is nobody's has some client's values
        members[self.places] = np.arange(self.size)
        return members

    def dealt(self, sizes: np.ndarray, devices: int) -> Group:
        """The same clients, dealt to devices in equal numbers so that each holds about as many examples.

        Nothing moves where that would save less than `_WORTH` of the memory.

        Args:
          sizes: the members' numbers of examples of each split, [size, splits].
          devices: number of devices that share the rows.
        """
        share = self.rows // devices
        before = np.array_split(np.arange(self.size), np.arange(1, devices) * share)
        stored = stack.examples_held(sizes, before)
        if stored <= (1 + _WORTH) * sizes.sum(dtype=np.int64):
            return self
        # By all examples together, and by each split's own: the latter where a large one is not spread like the others.
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

    Raises:
      JaxpflError: if a group would have no client (unless allowed), or ``group_of`` names an unknown one.
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
    """Each group's clients as a federation of their own, with its examples alone, or, as a view, in the whole store."""
    if len(groups) == 1:
        return (federation,)
    if not views:
        return tuple(federation.rows(group.members) for group in groups)

    def view(split: ClientData, group: Group) -> ClientData:
        start, size = (np.asarray(a)[group.members] for a in (split.start, split.size))
        return replace(split, start=start, size=size, chunk=chunk_of(size))

    ids, *splits = federation
    return tuple(Federation(np.asarray(ids)[g.members], *(view(one, g) for one in splits)) for g in groups)


def gather(values: list[PyTree], groups: tuple[Group, ...]) -> PyTree:
    """Combine the values of all non-empty groups, [size, ...], in the stack order of all clients, [m, ...]."""
    if len(groups) == 1:
        return values[0]
    order = np.argsort(np.concatenate([group.members for group in groups]))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts)[order], *values)


class Clients(NamedTuple):
    """Inputs that all runs share.

    Attributes:
      federations: the data of each group.
      among: the place of each row of the one group's stack among all m clients, [size] int32, m where there is
        nobody; None where the stacks hold all clients.
      ids: all m clients' ids, [m], on every device, where each holds its own clients' data: a cohort is then drawn
        without communication. Else None.
    """

    federations: tuple[Federation, ...]
    among: Array | None = None
    ids: Array | None = None

    def all_ids(self, groups: tuple[Group, ...]) -> Array:
        """Ids of all clients of the stack, [m]."""
        if self.ids is not None:
            return self.ids
        given = zip(self.federations, groups, strict=True)
        return gather([group.members_of(jnp.asarray(f.client_ids)) for f, group in given], groups)

    def received(self, per_client: PyTree) -> PyTree:
        """The messages, leaves [m, ...], to the clients of the stacks; a row that is nobody's gets some client's."""
        among = self.among
        if among is None:
            return per_client
        return jax.tree.map(lambda leaf: jnp.asarray(leaf).at[among].get(mode="clip"), per_client)

    def places(self, rows: Array, num_clients: int) -> Array:
        """Rows of the stacks -> rows of all m clients, m where a slot is empty."""
        return rows if self.among is None else self.among.at[rows].get(mode="fill", fill_value=num_clients)
