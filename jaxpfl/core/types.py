"""Types that all packages share: clients' data in one flat store, and the federation of all clients.

Notation: there are m clients. Client i has n_i examples, and N is their sum over clients. The capacity n is the largest
n_i or an upper bound on it. Shapes are given for ONE client; stacks of clients have a leading axis [m].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, shown

Array: TypeAlias = jax.Array
Key: TypeAlias = jax.Array
"""A typed PRNG key, as made by ``jax.random.key``."""
Device: TypeAlias = Any
"""A ``jax.Device``, which type checkers do not accept as a type."""
PyTree: TypeAlias = Any
Scalar: TypeAlias = Any
"""A Python number or a zero-dimensional array, possibly traced."""
Metrics: TypeAlias = dict[str, Array]

NO_LABEL = -1
"""Label of a sequence position without a label: padding, or a token that is not to be predicted."""
MOST_EXAMPLES = 2**31 - 1
"""Largest number of examples in a split, because the position of an example is an int32."""
EQUAL = 1.25
"""Clients count as equally large if padding all of them to the largest client's number of examples multiplies the total
by at most this factor.
"""
CHUNK = 2
"""Overhead of a chunk (`ClientData.chunk`), in units of the time for one example. With a small model, the overhead is
larger, but chunks run concurrently.
"""


class Examples(NamedTuple):
    """Flat store of examples: inputs, a tree of [N, ...], and labels, [N] or [N, ...]."""

    x: PyTree
    y: Any


class PersonExamples(NamedTuple):
    """`Examples` whose persons are known: a third array has the number of each example's person, [N] int32.

    A person's examples at a client are adjacent (`ClientData.count_persons` checks this). The type differs from
    `Examples`, so that ``x, y = examples`` holds for all other stores.
    """

    x: PyTree
    y: Any
    persons: Any


Store: TypeAlias = Examples | PersonExamples


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["examples", "start", "size"],
    meta_fields=["capacity", "chunk"],
)
@dataclass(frozen=True, eq=False)
class ClientData:
    """View of one client's examples in a flat store, or a stack of such views for m clients.

    The examples of a client are at positions ``start ... start + size - 1`` of the store, which has no padding. The
    properties ``x``, ``y`` and ``mask`` build padded arrays on access.

    Attributes:
      examples: the store, which all clients share.
      start: position of the client's first example, [] int32 (or [m] when stacked).
      size: number of the client's examples n_i, [] int32 (or [m]).
      capacity: largest number n of examples that a client can have; static.
      chunk: number of examples that a pass over all of a client's examples processes together; static, at most the
        capacity.
    """

    examples: Store
    start: Any
    size: Any
    capacity: int
    chunk: int

    @classmethod
    def stacked(cls, examples: Store, sizes: Sequence[int] | np.ndarray) -> ClientData:
        """Stack clients on the host, given the arrays of all their examples.

        Args:
          examples: NumPy arrays with the examples of the first client, then of the second, and so on.
          sizes: each client's number of examples, [m]; the sum is N.

        Raises:
          JaxpflError: if there are 2**31 examples or more.
        """
        size = np.asarray(sizes, np.int64)
        total = int(size.sum())
        if total > MOST_EXAMPLES:
            raise JaxpflError(f"a split has {total} examples, but at most {MOST_EXAMPLES} are supported")
        # A client without examples starts at position 0, so that no start lies outside the store.
        start = np.where(size > 0, np.cumsum(size) - size, 0).astype(np.int32)
        return cls(examples, start, size.astype(np.int32), int(size.max(initial=0)), chunk_of(size))

    @classmethod
    def padded(cls, x: PyTree, y: Any, mask: Any) -> ClientData:
        """Build a `ClientData` for one client, or for a stack of clients, from padded arrays.

        Padding is not stored if the arrays are NumPy arrays.

        Args:
          x: inputs, a tree of arrays [n, ...], or [m, n, ...] for a stack.
          y: labels, [n] or [m, n].
          mask: mask of the real examples, which come before the padding, [n] or [m, n] bool.
        """
        if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves((x, y, mask))):
            examples = jax.tree.map(lambda leaf: leaf[mask], Examples(x, y))
            made = cls.stacked(examples, mask.sum(axis=-1).reshape(-1))
            made = made if mask.ndim > 1 else made.client(0)
            return replace(made, capacity=mask.shape[-1])
        mask = jnp.asarray(mask)
        n = mask.shape[-1]
        examples = jax.tree.map(
            lambda leaf: jnp.asarray(leaf).reshape(-1, *jnp.shape(leaf)[mask.ndim :]), Examples(x, y)
        )
        start = n * jnp.arange(mask.size // max(n, 1), dtype=jnp.int32).reshape(mask.shape[:-1]) if n else 0
        start = jnp.broadcast_to(start, mask.shape[:-1]).astype(jnp.int32)
        return cls(examples, start, mask.sum(axis=-1, dtype=jnp.int32), n, n)

    @property
    def x(self) -> PyTree:
        """Padded inputs, a tree of [n, ...] (or [m, n, ...]): real examples first, then zeros."""
        return jax.tree.map(self._gathered, self.examples.x)

    @property
    def y(self) -> Any:
        """Padded labels, [n] (or [m, n]): labels of real examples first, then zeros."""
        return self._gathered(self.examples.y)

    @property
    def mask(self) -> Any:
        """Mask of the real examples, [n] (or [m, n]) bool."""
        arrays: Any = np if isinstance(self.size, np.ndarray | np.generic) else jnp
        return arrays.arange(self.capacity) < arrays.expand_dims(self.size, -1)

    def _gathered(self, leaf: Any) -> Any:
        host = isinstance(leaf, np.ndarray) and isinstance(self.start, np.ndarray | np.generic)
        arrays: Any = np if host else jnp
        mask = self.mask
        if not leaf.shape[0] or not self.capacity:
            return arrays.zeros((*mask.shape, *leaf.shape[1:]), leaf.dtype)
        places = arrays.expand_dims(self.start, -1) + arrays.arange(self.capacity, dtype=np.int32)
        rows = leaf[arrays.where(mask, places, 0)]
        real = mask.reshape(*mask.shape, *[1] * (leaf.ndim - 1))
        view = arrays.where(real, rows, arrays.zeros((), leaf.dtype))
        if host:
            view.flags.writeable = False  # read-only, because it is a copy: writing to it would not change the store
        return view

    def client(self, row: Any) -> ClientData:
        """Return the view of the client in one row of the stack."""
        return replace(self, start=self.start[row], size=self.size[row])

    def rows(self, places: Any) -> ClientData:
        """Select clients by their rows in the stack, on the host.

        If the selected clients have fewer examples than the store, their examples are copied to a new store, which is
        in temporary files if the examples are in files.

        Args:
          places: row numbers in the new order, or a mask [m].
        """
        start, size = np.asarray(self.start)[places], np.asarray(self.size)[places]
        # int64, because clients that are selected several times can have more examples in total than int32 can count.
        if size.sum(dtype=np.int64) >= len(self.examples.y):
            return replace(self, start=start, size=size)
        return ClientData.stacked(self._copy(start, size), size).bounded(self.capacity)

    def check(self) -> None:
        """Check on the host that all clients' positions lie within the arrays in ``examples``.

        Raises:
          JaxpflError: if a position lies outside, for example because a user sliced the arrays instead of selecting
            clients with `Federation.rows`.
        """
        start, size, stored = np.asarray(self.start, np.int64), np.asarray(self.size), len(self.examples.y)
        wrong = np.flatnonzero((start < 0) | (size < 0) | (size > self.capacity) | (start + size > stored))
        if start.shape != size.shape or len(wrong):
            raise JaxpflError(
                f"a client's examples lie outside the store of {stored} examples: select clients with federation.rows, "
                "not by slicing its arrays"
            )

    @property
    def persons(self) -> Any:
        """Person of each example in ``examples``, [N] int32; None if unknown."""
        return getattr(self.examples, "persons", None)

    def count_persons(self) -> tuple[np.ndarray, int]:
        """Count each client's persons on the host, [m], and find the largest number of examples that a person has.

        Raises:
          JaxpflError: if the persons are not integers of at most 32 bits, [N], or if a person's examples are at several
        clients or not adjacent.
        """
        size, examples = np.asarray(self.size), self.with_examples(x=()).flat()
        assert isinstance(examples, PersonExamples)
        persons = examples.persons
        whole = np.issubdtype(persons.dtype, np.integer) and persons.shape == (len(examples.y),)
        if not whole or not np.array_equal(persons, persons.astype(np.int32)):  # devices would cut longer integers
            found = f"{persons.dtype} {list(persons.shape)}"
            raise JaxpflError(f"persons must be integers [{len(examples.y)}] of at most 32 bits, got {found}")
        client = np.repeat(np.arange(len(size)), size)
        first = np.flatnonzero(np.diff(client, prepend=-1) | np.diff(persons, prepend=-1))
        names, times = np.unique(persons[first], return_counts=True)
        if (times > 1).any():
            raise JaxpflError(
                f"{(times > 1).sum()} of {len(names)} persons have examples at several clients, or apart at one: "
                "a person can be protected only if all of its examples are together at one client"
            )
        return np.bincount(client[first], minlength=len(size)), int(np.diff(first, append=len(persons)).max(initial=0))

    def without_persons(self) -> ClientData:
        """Return the same clients without the examples' person ids."""
        return self if self.persons is None else replace(self, examples=Examples(*self.examples[:2]))

    def flat(self) -> Store:
        """Concatenate the clients' examples on the host, in the order of the stack.

        Raises:
          JaxpflError: as in `check`.
        """
        self.check()
        start, size = np.atleast_1d(np.asarray(self.start)), np.atleast_1d(np.asarray(self.size))
        ends = np.cumsum(size, dtype=np.int64)
        if np.array_equal(start[size > 0], (ends - size)[size > 0]) and ends[-1] == len(self.examples.y):
            return jax.tree.map(np.asarray, self.examples)
        return self._copy(start, size)

    def _copy(self, start: np.ndarray, size: np.ndarray) -> Store:
        ends = np.cumsum(size, dtype=np.int64)
        places = np.arange(int(size.sum(dtype=np.int64))) + np.repeat(start - (ends - size), size)
        return jax.tree.map(lambda leaf: host_memory.gathered(np.asarray(leaf), places), self.examples)

    def with_examples(self, x: PyTree | None = None, y: Any = None) -> ClientData:
        """Return the same clients with other inputs or labels, [N, ...] in the order of ``examples``."""
        old = self.examples
        return replace(self, examples=old._replace(x=old.x if x is None else x, y=old.y if y is None else y))

    def bounded(self, capacity: int) -> ClientData:
        """Return the same clients with another capacity. Results must not depend on the capacity."""
        return replace(self, capacity=capacity)

    def emptied(self) -> ClientData:
        """Return the same clients without examples, on the host."""
        examples = jax.tree.map(lambda leaf: np.asarray(leaf)[:0], self.examples)
        return ClientData.stacked(examples, np.zeros(len(np.asarray(self.size)), np.int32))


def chunk_of(sizes: np.ndarray) -> int:
    """Choose the chunk size for a pass over clients with these numbers of examples.

    If padding every client to the largest client's number of examples adds at most a quarter to the total, the largest
    client's number is the chunk size, so that each client needs a single chunk. Otherwise the chunk size with the
    smallest cost is chosen among the median number, powers of two and the largest number. A chunk costs its length plus
    `CHUNK` examples. Without any examples, the chunk size is 0.
    """
    present = np.asarray(sizes, np.int64)
    present = present[present > 0]
    if not len(present):
        return 0
    largest = int(present.max())
    if largest * len(present) <= EQUAL * present.sum():
        return largest
    powers = [2**k for k in range(2, (largest - 1).bit_length())]
    lengths = [max(int(np.median(present)), 1), *powers, largest]
    return min(lengths, key=lambda length: int((-(-present // length)).sum()) * (length + CHUNK))


class Splits(NamedTuple):
    """Examples of a client that an algorithm may see. Test examples are not a field, so no algorithm can reach them."""

    train: ClientData
    validation: ClientData

    def client(self, row: Any) -> Splits:
        """Views of the client in one row of the stack."""
        return Splits(self.train.client(row), self.validation.client(row))


@jax.tree_util.register_static
class Names(tuple[str, ...]):
    """Names of clients, in the order of the clients. In a pytree, names belong to the structure, so they are not inputs
    of compiled programs.
    """

    def rows(self, places: Any) -> Names:
        """Select names by an array of row numbers."""
        return Names(self[place] for place in places)


class Federation(NamedTuple):
    """All m clients stacked on axis 0: the data argument of every compiled program.

    Attributes:
      client_ids: distinct ids of the clients, [m] int32; a client's random streams depend on its id, not on its row in
        the stack.
      train, validation, test: stacked `ClientData`, each with its own store; a split may have no examples.
      client_names: names of the clients in the data set, [m]; None if unknown, or if a partition made the clients. A
        client may have any name, even an empty one, and two clients may have the same name.
      preparation: record of how the examples were made from a data set (`jaxpfl.data.Preparation`); None if unknown.
        Set it to None if you change the inputs yourself.
    """

    client_ids: Any
    train: ClientData
    validation: ClientData
    test: ClientData
    client_names: Names | None = None
    preparation: Any = None

    @property
    def num_clients(self) -> int:
        return self.client_ids.shape[0]

    @property
    def splits(self) -> Splits:
        return Splits(self.train, self.validation)

    @property
    def all_splits(self) -> tuple[ClientData, ClientData, ClientData]:
        """The training, validation and test examples."""
        return self.train, self.validation, self.test

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example's input, for inputs that are a single array."""
        return tuple(self.train.examples.x.shape[1:])

    def rows(self, places: Any) -> Federation:
        """Select clients by their rows in the stack, on the host.

        Args:
          places: row numbers in the new order, or a mask [m]. A client that is selected twice needs a second id
            (``_replace(client_ids=...)``) before training, because equal ids have equal random streams.

        Raises:
          JaxpflError: if ``places`` are not row numbers of the stack or a mask.
        """
        places, m = np.asarray(places), self.num_clients
        if places.dtype == bool and places.shape == (m,):
            places = np.flatnonzero(places)
        whole = np.issubdtype(places.dtype, np.integer) or not places.size
        if not whole or places.ndim != 1 or ((places < 0) | (places >= m)).any():
            raise JaxpflError(f"rows must be integers from 0 to {m - 1} or a mask [{m}], got {shown(places.tolist())}")
        places = places.astype(np.int64)
        names = self.client_names and Names(self.client_names).rows(places)
        train, validation, test = (split.rows(places) for split in self.all_splits)
        return Federation(np.asarray(self.client_ids)[places], train, validation, test, names, self.preparation)

    def pooled(self) -> Federation:
        """Pool all training examples into one client with id 0, on the host; the other splits are empty.

        The examples are in the order of the clients' ids, so that the result does not depend on the order of the stack.
        The examples are not copied if the store already has this order.
        """
        examples = self.train.rows(np.argsort(np.asarray(self.client_ids))).flat()
        train = ClientData.stacked(examples, [len(examples.y)])
        return Federation(np.zeros(1, np.int32), train, train.emptied(), train.emptied())
