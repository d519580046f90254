"""Groups of clients whose states differ in structure (other architectures), each a stack of its own."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.errors import JaxpflError
from jaxpfl.protocol import Algorithm
from jaxpfl.types import Array, Federation, PyTree


class Group(NamedTuple):
    """Clients that share a stack. A single group is the stack of all clients, and nothing is moved.

    Attributes:
      members: their rows in the stack of all m clients, ascending, [size]; on the host.
      rows: rows of the group's own stack: its size, rounded up to a multiple of the devices.
      num_clients: m.
      only: true if there is no other group.
    """

    members: np.ndarray
    rows: int
    num_clients: int
    only: bool

    @property
    def size(self) -> int:
        """Number of clients in the group."""
        return len(self.members)

    def capacity(self, cohort: int) -> int:
        """Slots needed in this group for a cohort of at most ``cohort`` clients."""
        return min(cohort, self.size)

    def cohort(self, rows: Array) -> Array:
        """The group's part of a cohort: rows of all clients -> rows of the group, sorted, ``size`` where empty."""
        if self.only:
            return rows
        place = np.full(self.num_clients + 1, self.size, np.int32)
        place[self.members] = np.arange(self.size)
        return jnp.sort(jnp.asarray(place)[rows])[: self.capacity(rows.shape[0])]

    def clients(self, rows: Array) -> Array:
        """Inverse of `cohort`: rows of the group -> rows of all clients, m where empty."""
        if self.only:
            return rows
        return jnp.asarray(np.append(self.members, self.num_clients).astype(np.int32))[jnp.minimum(rows, self.size)]

    def take(self, stacked: PyTree) -> PyTree:
        """The group's rows of a tree stacked by all clients, [m, ...] or [m', ...], padded to ``rows``."""

        def take(leaf: Array) -> Array:
            if self.only:
                missing = self.rows - leaf.shape[0]
                return jnp.pad(leaf, [(0, missing)] + [(0, 0)] * (leaf.ndim - 1)) if missing else leaf
            return leaf[np.pad(self.members, (0, self.rows - self.size), mode="edge")]

        return jax.tree.map(take, stacked)

    def put(self, stacked: PyTree, values: PyTree) -> PyTree:
        """A tree stacked by all clients with the group's rows replaced; the rows beyond its size are dropped."""
        if self.only:
            return values
        return jax.tree.map(lambda leaf, new: leaf.at[self.members].set(new[: self.size]), stacked, values)


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


def split(federation: Federation, groups: tuple[Group, ...]) -> tuple[Federation, ...]:
    """Each group's clients as a federation of their own."""
    if len(groups) == 1:
        return (federation,)
    return tuple(federation.rows(group.members) for group in groups)


def messages(per_client: PyTree, among: Array | None) -> PyTree:
    """Each client's own message for a stack of some clients.

    Args:
      per_client: leaves [m, ...].
      among: the clients' rows, [size] int32, m for nobody (who gets some client's); None for all clients.
    """
    if among is None:
        return per_client
    return jax.tree.map(lambda leaf: jnp.asarray(leaf).at[among].get(mode="clip"), per_client)


def gather(values: list[PyTree], groups: tuple[Group, ...]) -> PyTree:
    """Combine values of each non-empty group, [size, ...], in the order of the stack of all clients, [m, ...]."""
    if len(groups) == 1:
        return values[0]
    order = np.argsort(np.concatenate([group.members for group in groups]))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts)[order], *values)
