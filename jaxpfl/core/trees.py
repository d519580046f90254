"""Tree operations that optax.tree lacks: selection, finiteness, splits by path, weighted means, rows of stacks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core.types import Array, PyTree
from jaxpfl.support import host_memory

PathPredicate = Callable[[tuple[str, ...]], bool]
"""Predicate that selects leaves by their path, such as ``("head", "kernel")``."""


def where(condition: Array, if_true: PyTree, if_false: PyTree) -> PyTree:
    """Select one of two trees by a scalar condition; NaN in the tree that is not selected has no effect."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true, if_false)


leaves_apart = jax.make_user_context(False)
"""Context in which programs are traced without concatenating leaves. Concatenation would copy sharded leaves in full to
every device."""


def all_finite(tree: PyTree) -> Array:
    """True if every floating-point entry of the tree is finite, [] bool."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    if leaves and leaves_apart.value:
        return jnp.stack([jnp.isfinite(x).all() for x in leaves]).all()
    return jnp.isfinite(jnp.concatenate([x.reshape(-1) for x in leaves])).all() if leaves else jnp.array(True)


@partial(jax.tree_util.register_dataclass, data_fields=["vectors"], meta_fields=["structure", "shapes"])
@dataclass(frozen=True)
class Packed:
    """A tree stored as a few vectors, one per dtype in order of first appearance; made by `pack`.

    An operation on the vectors is one kernel per dtype instead of one per leaf, so programs compile faster. Within
    `leaves_apart` nothing is concatenated: ``vectors`` are the leaves themselves, and ``shapes`` is None.
    """

    vectors: tuple[Array, ...]
    structure: Any
    shapes: tuple[tuple[tuple[int, ...], Any], ...] | None

    def unpack(self) -> PyTree:
        """The original tree. If the vectors are rows of a stack, so are the leaves."""
        if self.shapes is None:
            return jax.tree.unflatten(self.structure, self.vectors)
        by_dtype = dict(zip(dict.fromkeys(dtype for _, dtype in self.shapes), self.vectors, strict=True))
        used = dict.fromkeys(by_dtype, 0)
        leaves = []
        for shape, dtype in self.shapes:
            start = used[dtype]
            used[dtype] += math.prod(shape)
            vector = by_dtype[dtype][..., start : used[dtype]]
            leaves.append(vector.reshape(*vector.shape[:-1], *shape))
        return jax.tree.unflatten(self.structure, leaves)


def unpack(tree: PyTree) -> PyTree:
    """The original tree, if the tree was packed; otherwise the tree itself."""
    return tree.unpack() if isinstance(tree, Packed) else tree


def pack(tree: PyTree) -> Packed:
    """Concatenate all leaves of each dtype into one vector."""
    leaves, structure = jax.tree.flatten(tree)
    if leaves_apart.value:
        return Packed(tuple(leaves), structure, None)
    groups: dict[Any, list[Array]] = {}
    for leaf in leaves:
        groups.setdefault(leaf.dtype, []).append(leaf.reshape(-1))
    vectors = tuple(jnp.concatenate(group) for group in groups.values())
    return Packed(vectors, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))


def prefix_divide(total: PyTree, weight: PyTree) -> PyTree:
    """``total / weight``, zero where the weight is zero.

    Args:
      total: a tree of arrays.
      weight: a tree prefix of ``total``. Each of its leaves divides all arrays of ``total`` that lie below it. A leaf
        [k] has one divisor for each row of these arrays.
    """

    def divide(w: Array, leaf: Array) -> Array:
        w = jnp.reshape(w, w.shape + (1,) * (leaf.ndim - w.ndim))
        return jnp.where(w > 0, leaf / jnp.where(w > 0, w, 1), 0).astype(leaf.dtype)

    return jax.tree.map(lambda w, part: jax.tree.map(lambda leaf: divide(w, leaf), part), weight, total)


def prefix_multiply(tree: PyTree, weight: PyTree) -> PyTree:
    """``weight * tree`` for a tree prefix of weights, as in `prefix_divide`."""

    def multiply(w: Array, leaf: Array) -> Array:
        return (jnp.reshape(w, w.shape + (1,) * (leaf.ndim - w.ndim)) * leaf).astype(leaf.dtype)

    return jax.tree.map(lambda w, part: jax.tree.map(lambda leaf: multiply(w, leaf), part), weight, tree)


def split_by_path(tree: PyTree, predicate: PathPredicate) -> tuple[PyTree, PyTree]:
    """Split a tree into the leaves whose path the predicate accepts, and the other leaves.

    Both parts have the nodes of the whole tree, with None (which JAX treats as a node without leaves) instead of each
    missing leaf. `merge` combines the two parts again.
    """
    accepted = jax.tree.map_with_path(lambda path, leaf: bool(predicate(names(path))), tree)
    part = jax.tree.map(lambda yes, leaf: leaf if yes else None, accepted, tree)
    rest = jax.tree.map(lambda yes, leaf: None if yes else leaf, accepted, tree)
    return part, rest


def merge(part: PyTree, rest: PyTree) -> PyTree:
    """Combine the two parts that `split_by_path` returns."""
    return jax.tree.map(lambda a, b: b if a is None else a, part, rest, is_leaf=lambda node: node is None)


def names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Convert a JAX key path to the tuple of names that a `PathPredicate` takes."""
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def valid_count(valid: Array) -> Array:
    """Number [] of true entries of the mask ``valid``, but at least one."""
    return jnp.maximum(valid.sum(), 1)


def valid_sum(valid: Array, values: Array) -> Array:
    """Sum of values [b] where the mask ``valid`` [b] is true, []; NaN elsewhere has no effect."""
    return jnp.where(valid, values, 0).sum()


def where_rows(valid: Array, leaf: Array) -> Array:
    """Set the rows of a leaf [b, ...] to zero where the mask ``valid`` [b] is false."""
    return jnp.where(valid.reshape(valid.shape + (1,) * (leaf.ndim - valid.ndim)), leaf, jnp.zeros((), leaf.dtype))


def valid_mean(valid: Array, values: Array) -> Array:
    """Mean of values [b] where the mask ``valid`` [b] is true, []; zero if no entry is true."""
    return valid_sum(valid, values) / valid_count(valid)


_TOGETHER = 32
"""Number of rows in a block of `sum_products`; larger blocks are not faster on a CPU."""


def sum_products(weights: Array, rows: Array) -> Array:
    """Weighted sums over many rows, ``sum_i weights_i rows_i``.

    A plain matrix product adds the m terms sequentially if k is small or the rows are short. A sum of a million float32
    terms then loses three of its seven digits. This function multiplies blocks of rows, and then adds the blocks' sums.

    Args:
      weights: weights of the m rows, [m], or k weights of each row, [m, k].
      rows: the rows, [m, ...].

    Returns:
      The sum, [...], or the k sums, [k, ...].
    """
    parts = -(-weights.shape[0] // _TOGETHER)

    def divided(a: Array) -> Array:
        a = jnp.pad(a, [(0, parts * _TOGETHER - a.shape[0])] + [(0, 0)] * (a.ndim - 1))
        return a.reshape(parts, _TOGETHER, *a.shape[1:])

    if parts <= 1:
        return jnp.tensordot(weights, rows, axes=(0, 0))
    return jax.vmap(partial(jnp.tensordot, axes=(0, 0)))(divided(weights), divided(rows)).sum(axis=0)


def num_bytes(tree: PyTree) -> int:
    """Size of all leaves in bytes; leaves may be arrays or ``jax.ShapeDtypeStruct``."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def checksum(tree: PyTree) -> int:
    """CRC-32 of a tree's arrays, computed on the host."""
    found = 0
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(leaf)
        for part in host_memory.iterate(array) if host_memory.is_mapped(array) else (array,):
            found = zlib.crc32(np.ascontiguousarray(part).data, found)
    return found


def take_rows(tree: PyTree, rows: Array) -> PyTree:
    """Gather k rows of a tree with leaves [m, ...]. A row number of m or more reads the last row.

    The row number m stands for no client; reading a client's real data there avoids NaN, and the results are masked out
    later. Filling such rows with zeros would cost another pass over the data.
    """
    # Cohorts are drawn as sorted row numbers (`Participation`).
    return jax.tree.map(lambda a: a.at[rows].get(mode="clip", indices_are_sorted=True), tree)


def put_rows(tree: PyTree, rows: Array, values: PyTree) -> PyTree:
    """Write rows into a stacked tree; values for row numbers of m or more (no client) are dropped."""
    return jax.tree.map(lambda a, v: a.at[rows].set(v, mode="drop", indices_are_sorted=True), tree, values)
