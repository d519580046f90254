"""Checks of clients' arrays, and `Federation`s made from them.

For each split, a federation has one store: arrays in which the examples of all clients follow one another.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from jaxpfl.core import types as store
from jaxpfl.core.types import ClientData, Federation, Names
from jaxpfl.data.labels import check_finite, checked_labels, digit_loss, narrowed
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, shown, warn

_ENTRIES = 2**18
"""Number of entries that are hashed together, chosen so that they fit into a processor's cache."""

Examples: TypeAlias = tuple[Any, Any]
"""One client's inputs [n_i, ...] and labels [n_i] (or [n_i, d]), as anything that `np.asarray` takes. Inputs may also
be a dictionary or NamedTuple of such arrays (not a list or tuple, which `np.asarray` converts to one array)."""


def stack_clients(
    train: Sequence[Examples],
    test: Sequence[Examples] | None = None,
    validation: Sequence[Examples] | None = None,
    client_ids: Sequence[int] | np.ndarray | None = None,
    drop_empty: bool = False,
    client_names: Sequence[str] | None = None,
) -> Federation:
    """Make a federation from clients' arrays. The examples of each split are concatenated without padding.

    Args:
      train: (x [n_i, ...], y [n_i]) for each of m clients. All inputs have the same feature shape. Integer inputs
        become int32 and other inputs float32; if float32 loses digits, inputs stay float64 until they are standardized
        or trained on. Labels are integers >= 0, which become int32, or floats (for a regression), which become float32.
        With d labels per example, y is [n_i, d].
      test, validation: test and validation examples in the same form as ``train``, or None to have none; some clients
        may have no such examples.
      client_ids: distinct integers >= 0, which determine the clients' random streams, [m]; by default 0 .. m - 1.
      drop_empty: whether to leave out clients without training examples, with a warning; the other clients keep their
        ids.
      client_names: names of the clients for tables and plots, [m]; by default, clients are shown by their ids.

    Returns:
      The federation, as NumPy arrays; the capacity of a split is the largest number of examples of any client.

    Raises:
      JaxpflError: if there are no clients, or if lists differ in length; if a client has no training examples (unless
        ``drop_empty``) or not as many labels as inputs; if its inputs or labels have other shapes than earlier
        clients'; if labels are neither integers >= 0 nor floats; or if a number is NaN or infinite. The message names
        the client.

    Examples:
      >>> clients = [(np.ones((3, 2)), [0, 1, 1]), (np.zeros((1, 2)), [0])]
      >>> federation = stack_clients(clients)
      >>> federation.train.examples.x.shape, federation.train.size
      ((4, 2), array([3, 1], dtype=int32))
      >>> federation.train.x.shape  # a padded view
      (2, 3, 2)
    """
    m = len(train)
    if m == 0:
        raise JaxpflError("at least 1 client is required, got 0")
    ids = _check_ids(client_ids, m)
    names = None if client_names is None else Names(map(str, client_names))
    if names is not None and len(names) != m:
        raise JaxpflError(f"client_names must be {m} strings, got {len(names)}")
    who = labels(ids, names)
    parts: dict[str, list[Examples]] = {}
    for split, own in (("train", train), ("validation", validation), ("test", test)):
        if own is not None and len(own) != m:
            raise JaxpflError(f"{split} must have an entry for each of {m} clients, as train has, got {len(own)}")
        parts[split] = [
            _check_client(x, y, f"client {i}, {split}")
            for i, (x, y) in zip(who, () if own is None else own, strict=False)
        ]

    kept = nonempty_clients(np.array([len(y) == 0 for _, y in parts["train"]]), who, drop_empty)
    if not kept.all():
        parts = {split: [p for p, k in zip(own, kept, strict=False) if k] for split, own in parts.items()}
        ids, names, who = ids[kept], names and names.rows(np.flatnonzero(kept)), who[kept]

    feature, label = _common(parts, who)
    one = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves((feature, label)))
    check_memory(np.array([[len(y) for _, y in own] or [0] * len(ids) for own in parts.values()]), who, one)
    stacked = {split: _joined(own, len(ids), feature, label) for split, own in parts.items()}
    wide = jax.tree.map(lambda leaf: digit_loss(leaf) is not None, stacked["train"].examples.x)
    for split, made in stacked.items():
        stacked[split] = made.with_examples(x=jax.tree.map(narrowed_floats, made.examples.x, wide))
    return warn_of_shared(Federation(client_ids=ids, **stacked, client_names=names))


def check_batch_size(federation: Federation, batch_size: int, strict: bool = False) -> None:
    """Warn if batches are larger than some client's training set; such a client's batch has all of its examples.

    Raises:
      JaxpflError: if ``strict`` is true, instead of the warning.
    """
    sizes = np.asarray(federation.train.size)
    smaller = int((sizes < batch_size).sum())
    if smaller:
        warn(
            f"batch size {batch_size} is larger than the training data of {smaller} of {len(sizes)} clients "
            f"(the smallest has {sizes.min()} examples): their batches contain all of their examples",
            strict=strict,
        )


def _check_ids(client_ids: Sequence[int] | np.ndarray | None, m: int) -> np.ndarray:
    if client_ids is None:
        return np.arange(m, dtype=np.int32)
    ids = np.asarray(client_ids)
    if ids.shape != (m,) or not np.issubdtype(ids.dtype, np.integer):
        raise JaxpflError(f"client_ids must be {m} integers, got shape {ids.shape} of {ids.dtype}")
    if ids.min() < 0 or ids.max() >= 2**31 or len(np.unique(ids)) < m:
        raise JaxpflError("client_ids must be distinct and from 0 to 2**31 - 1")
    return ids.astype(np.int32)


def labels(ids: np.ndarray, names: Names | None) -> np.ndarray:
    """Return the clients' names for messages, shortened and in quotes; if they have no names, return their ids."""
    return ids if names is None else np.array([shown(name, 40) for name in names], object)


def nonempty_clients(
    empty: np.ndarray,
    who: np.ndarray,
    drop_empty: bool,
    lack: str = "have no training data",
    remedy: str = "give them some",
) -> np.ndarray:
    """Return the mask of the clients to keep, [m].

    Args:
      empty: mask of the clients that lack examples, [m].
      who: `labels` of all clients, [m].
      drop_empty: whether to leave these clients out with a warning, instead of raising an error.
      lack: predicate for messages that says what these clients lack, such as "have no training data".
      remedy: advice besides ``drop_empty``, for messages.

    Raises:
      JaxpflError: if a client lacks examples (unless ``drop_empty``), or if all clients lack examples.
    """
    if empty.any():
        problem = f"{empty.sum()} of {len(who)} clients {lack} (namely {listed(who[empty])})"
        if not drop_empty:
            raise JaxpflError(f"{problem}: {remedy}, or leave them out with drop_empty (--drop-empty)")
        if empty.all():
            raise JaxpflError(f"{problem}: no client is left")
        warn(f"{problem}: they are left out")
    return ~empty


def warn_of_shared(federation: Federation) -> Federation:
    """Warn if more test examples are equal to a training example, in features and label, than expected by chance.

    Examples with few discrete features can be equal by chance. Two training examples are then equal about as often as a
    test example and a training example. The warning is therefore issued only if equal test examples are more than twice
    as frequent as equal training examples, plus three standard deviations, or if the test set is the training set.
    Examples are compared by their hashes, which takes one pass over the examples (0.15 s for MNIST) and 8 bytes of
    memory per example.

    Args:
      federation: federation of NumPy arrays, with one store for each split.

    Returns:
      The same federation.
    """
    train, test = federation.train.examples, federation.test.examples
    if not len(test.y):
        return federation
    known, own = np.sort(_hashes(train)), _hashes(test)
    found = int((known[np.minimum(np.searchsorted(known, own), len(known) - 1)] == own).sum())
    same = known[1:] == known[:-1]
    chance = (np.append(same, False) | np.insert(same, 0, False)).mean() * len(own)
    if found > 2 * chance + 3 * math.sqrt(chance) or np.array_equal(known, np.sort(own)):
        warn(
            f"{found} of {len(own)} test examples are training examples too, with the same features and label: "
            "use a disjoint test set"
        )
    return federation


def _hashes(examples: store.Store) -> np.ndarray:
    """Hash each of N examples, [N] uint64: multiply its 32-bit words by random weights and add the products."""
    rng, found = np.random.default_rng(0), np.zeros(len(examples.y), np.uint64)
    for leaf in jax.tree.leaves(examples):
        rows, done = leaf.reshape(len(leaf), -1), 0
        # Odd weights are invertible modulo 2^64, so examples that differ in one word always have different hashes.
        weights = rng.integers(2**63, size=rows.shape[1] * rows.itemsize // 4, dtype=np.uint64) * 2 + 1
        for part in host_memory.iterate(rows, _ENTRIES):
            words = (part + part.dtype.type(0)).view(np.uint32)  # adding 0 turns -0.0 into 0.0
            words ^= words >> 16  # small numbers have low bits of zero, which a product alone would preserve
            found[done : done + len(part)] += words.astype(np.uint64) @ weights
            done += len(part)
    return found


def _check_client(x: Any, y: Any, whose: str) -> Examples:
    try:
        x, y = _arrays(x), np.asarray(y)
    except ValueError as error:  # raised by NumPy for nested lists of unequal length
        raise JaxpflError(f"{whose}: cannot convert inputs or labels to an array ({error})") from error
    leaves = jax.tree.leaves(x)
    for leaf in leaves:
        if leaf.ndim == 0 or y.ndim not in (1, 2):
            raise JaxpflError(
                f"{whose}: inputs must be [n, ...] and labels must be [n] or [n, d], got {leaf.shape} and {y.shape}"
            )
        if len(leaf) != len(y):
            raise JaxpflError(f"{whose}: {len(leaf)} inputs but {len(y)} labels")
    if not leaves:
        raise JaxpflError(f"{whose}: inputs must contain an array")
    if len(y) == 0:
        return x, y.astype(np.int32)
    check_finite(x, whose)
    return jax.tree.map(lambda leaf: store_leaf(leaf, whose), x), checked_labels(y, whose)


def _arrays(x: Any) -> Any:
    """Convert inputs to an array, or a dictionary or NamedTuple of arrays."""
    if isinstance(x, Mapping):
        return {key: _arrays(value) for key, value in x.items()}
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*map(_arrays, x))
    return np.asarray(x)


def _common(parts: dict[str, list[Examples]], who: np.ndarray) -> tuple[Any, jax.ShapeDtypeStruct]:
    """Return the shape and dtype (`jax.ShapeDtypeStruct`) of one input and of one label.

    The first client with data defines the shapes, and all other clients with data must have the same shapes. A leaf
    that is integer for some clients and float for others becomes float.
    """
    common: Any = None
    for split, own in parts.items():
        for i, example in zip(who, own, strict=False):
            if not len(example[1]):
                continue
            whose = f"client {i}, {split}"
            found = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), example)
            common = found if common is None else common
            structures = jax.tree.structure(found[0]), jax.tree.structure(common[0])
            if structures[0] != structures[1]:
                raise JaxpflError(f"{whose}: inputs are {structures[0]}, but earlier clients have {structures[1]}")
            inputs = jax.tree.map(partial(_shared, whose=f"{whose}: one input"), found[0], common[0])
            common = inputs, _shared(found[1], common[1], f"{whose}: one label")
    assert common is not None, "some client has training examples"
    return common


def _shared(found: jax.ShapeDtypeStruct, expected: jax.ShapeDtypeStruct, whose: str) -> jax.ShapeDtypeStruct:
    if found.shape != expected.shape:
        raise JaxpflError(f"{whose} has shape {found.shape}, but earlier clients have {expected.shape}")
    return jax.ShapeDtypeStruct(found.shape, _shared_type(found.dtype, expected.dtype))


def _shared_type(a: Any, b: Any) -> Any:
    """Return the dtype in which inputs of two dtypes are stored together; a float dtype if the two differ."""
    return a if a == b else np.float64 if np.float64 in (a, b) else np.float32


def _joined(own: list[Examples], m: int, feature: Any, label: jax.ShapeDtypeStruct) -> ClientData:
    """Concatenate the clients' examples into one store, in client order."""
    sizes = np.array([len(y) for _, y in own] or [0] * m, np.int64)
    parts = [store.Examples(*part) for part in own if len(part[1])]

    def joined(one: jax.ShapeDtypeStruct, *leaves: np.ndarray) -> np.ndarray:
        # The empty first array determines the shape if no client has an example.
        return np.concatenate([np.empty((0, *one.shape), one.dtype), *leaves], dtype=one.dtype)

    return ClientData.stacked(jax.tree.map(joined, store.Examples(feature, label), *parts), sizes)


def listed(ids: Sequence[Any] | np.ndarray, most: int = 10, mark: str = ", ") -> str:
    """Format ids for a one-line message, truncated if there are many."""
    return mark.join(map(str, ids[:most])) + (f" and {len(ids) - most} more" if len(ids) > most else "")


def store_leaf(x: np.ndarray, whose: str) -> np.ndarray:
    """Convert finite inputs to int32 or float32; leave float64 inputs to `narrowed_floats`."""
    if np.issubdtype(x.dtype, np.integer) or x.dtype == bool:
        if x.dtype != bool and x.size and (x.min() < -(2**31) or x.max() >= 2**31):
            raise JaxpflError(f"{whose}: integer inputs must fit in 32 bits, got {x.min()} to {x.max()}")
        return x.astype(np.int32, copy=False)
    if not np.issubdtype(x.dtype, np.floating):
        raise JaxpflError(f"{whose}: inputs must be real numbers, got {x.dtype}")
    return x if x.dtype == np.float64 else narrowed(x, wide=False)


def narrowed_floats(leaf: np.ndarray, wide: bool | None = None) -> np.ndarray:
    """Apply `narrowed` to float64 inputs; other inputs are returned unchanged."""
    return narrowed(leaf, wide=wide) if leaf.dtype == np.float64 else leaf


def check_memory(sizes: np.ndarray, who: np.ndarray, one: int) -> None:
    """Raise an error if examples would not fit in memory, before anything is allocated.

    Args:
      sizes: number of examples of each client, [splits, m].
      who: clients' names for messages, from `labels`, [m].
      one: number of bytes per example.

    Raises:
      JaxpflError: if the examples would not fit.
    """
    of_client = sizes.sum(axis=0, dtype=np.int64)
    largest = int(of_client.argmax())
    host_memory.check(
        one * int(of_client.sum()),
        f"{of_client.sum()} examples of {len(who)} clients (client {who[largest]} has {of_client[largest]} of them) "
        "need",
        "use fewer examples or fewer clients",
    )


class Dealt(NamedTuple):
    """One split's N examples, and their assignment to m clients.

    Attributes:
      x: inputs [N, ...], float32 (float64 if float32 loses digits) or int32, in memory or in memory-mapped files.
      y: labels [N] or [N, d].
      places: indices of each client's examples in x and y, one array per client.
      labels: label that each client gives to each class, [m, num_classes]; None to keep the labels.
      persons: person of each example, [N]; None if unknown. A person's examples must be adjacent in ``places``.
    """

    x: Any
    y: np.ndarray
    places: Sequence[np.ndarray]
    labels: np.ndarray | None
    persons: np.ndarray | None = None


def alike(train: Any, test: Any, name: str) -> tuple[Any, Any]:
    """Convert finite training and test inputs to the dtypes in which they are stored.

    If the dtypes of training and test inputs differ, both are converted to the same float dtype.

    Args:
      train, test: inputs [N, ...] of one data set.
      name: name of the data set.

    Raises:
      JaxpflError: if test inputs differ from training inputs in structure or shape, if a dtype cannot be stored, or if
        integers exceed 32 bits.
    """

    def converted(x: Any, split: str) -> Any:
        return jax.tree.map(lambda leaf: narrowed_floats(store_leaf(leaf, f"data set {name!r}, {split}")), x)

    if train is test:
        stored = converted(train, "train")
        return stored, stored
    if jax.tree.structure(train) != jax.tree.structure(test):
        found, given = (jax.tree.map(np.shape, x) for x in (test, train))
        raise JaxpflError(f"data set {name!r}: test inputs have shapes {found}, but training inputs have {given}")
    for a, b in zip(jax.tree.leaves(train), jax.tree.leaves(test), strict=True):
        if a.shape[1:] != b.shape[1:]:
            raise JaxpflError(
                f"data set {name!r}: a test input has shape {b.shape[1:]}, but a training input has {a.shape[1:]}"
            )
    pair = converted(train, "train"), converted(test, "test")
    kinds = jax.tree.map(lambda a, b: _shared_type(a.dtype, b.dtype), *pair)
    stored, other = (jax.tree.map(lambda leaf, kind: leaf.astype(kind, copy=False), x, kinds) for x in pair)
    return stored, other


def stack_dealt(
    train: Dealt, test: Dealt, validation: Dealt, client_ids: np.ndarray, drop_empty: bool, names: Names | None = None
) -> Federation:
    """Make a federation from examples that were assigned to clients. `stack_clients` would give the same result.

    Args:
      train, test, validation: examples of the clients, not checked again; the inputs are results of `alike`.
      client_ids: ids of the clients, [m].
      drop_empty: whether to leave out clients without training examples, with a warning.
      names: names of the clients, [m].

    Raises:
      JaxpflError: if a client has no training examples (unless ``drop_empty``), or if memory or disk space is too
        small.
    """
    splits = (train, validation, test)
    sizes = np.array([[len(own) for own in split.places] for split in splits], np.int64)
    who = labels(client_ids, names)
    kept = nonempty_clients(sizes[0] == 0, who, drop_empty)
    ids, sizes = client_ids[kept].astype(np.int32), sizes[:, kept]
    in_memory = [leaf for leaf in jax.tree.leaves(train.x) if not host_memory.is_mapped(leaf)]
    one = sum(leaf.dtype.itemsize * int(np.prod(leaf.shape[1:])) for leaf in (*in_memory, train.y))
    check_memory(sizes, who[kept], one)
    real = any(np.issubdtype(split.y.dtype, np.floating) for split in splits if len(split.y))

    def stacked(split: Dealt, sizes: np.ndarray) -> ClientData:
        places = np.concatenate([own for own, k in zip(split.places, kept, strict=True) if k])
        y = np.asarray(split.y[places])
        if split.labels is not None:
            y = np.asarray(split.labels)[kept][np.repeat(np.arange(len(sizes)), sizes), y]
        x = jax.tree.map(lambda leaf: host_memory.gathered(leaf, places), split.x)
        y = np.asarray(y.astype(np.float32 if real else np.int32, copy=False))
        persons = split.persons
        made = store.Examples(x, y) if persons is None else store.PersonExamples(x, y, persons[places])
        return ClientData.stacked(made, sizes)

    return Federation(ids, *map(stacked, splits, sizes), client_names=names and names.rows(np.flatnonzero(kept)))


def even_shares(sizes: np.ndarray, room: Sequence[int]) -> list[np.ndarray]:
    """Divide clients into groups ("shares") with nearly equal numbers of examples and limited numbers of clients.

    Clients are assigned in decreasing order of size, each to the share with the smallest load among the shares that
    have room for another client (Graham's rule of the longest processing time first). There can be several kinds of
    examples, such as training and test examples. Of each kind, a client has a fraction of all examples; the size of the
    client is the largest of these fractions. The load of a share is the size that one client with all its examples
    would have.

    Args:
      sizes: number of examples of each kind at each client, [m, kinds].
      room: largest allowed number of clients in each share; the sum is at least m.

    Returns:
      The clients of each share, in ascending order.
    """
    sizes = np.asarray(sizes, np.float64)
    parts = sizes / np.maximum(sizes.sum(axis=0), 1)
    loads = [np.zeros(sizes.shape[1]) for _ in room]
    members: list[list[int]] = [[] for _ in room]
    open_shares = [(0.0, share) for share, most in enumerate(room) if most]
    for client in np.argsort(-parts.max(axis=1), kind="stable"):
        _, share = heapq.heappop(open_shares)
        members[share].append(int(client))
        loads[share] += parts[client]
        if len(members[share]) < room[share]:
            heapq.heappush(open_shares, (float(loads[share].max()), share))
    return [np.sort(np.asarray(own, np.int64)) for own in members]


def examples_held(sizes: np.ndarray, members: Sequence[np.ndarray]) -> int:
    """Total number of examples in all shares (`even_shares`), if every share is padded to the size of the largest."""
    totals = np.array([sizes[own].sum(axis=0, dtype=np.int64) for own in members])
    return int(totals.max(axis=0).sum()) * len(members)
