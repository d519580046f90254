"""Tree operations beyond optax.tree: selection, finiteness, parts by path, prefix-weighted means, rows of stacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpfl.types import Array, PyTree

PathPredicate = Callable[[tuple[str, ...]], bool]
"""Maps a leaf's path, such as ``("head", "kernel")``, to whether it belongs to the part in question."""


def where(condition: Array, if_true: PyTree, if_false: PyTree) -> PyTree:
    """Select one of two trees by a scalar condition, without arithmetic: NaN on the other side is dropped."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true, if_false)


def all_finite(tree: PyTree) -> Array:
    """True if every floating-point entry of the tree is finite, [] bool."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.isfinite(jnp.concatenate([x.reshape(-1) for x in leaves])).all() if leaves else jnp.array(True)


@partial(jax.tree_util.register_dataclass, data_fields=["vectors"], meta_fields=["structure", "shapes"])
@dataclass(frozen=True)
class Packed:
    """A tree stored as a few vectors, one per dtype in order of first appearance; made by `pack`.

    An operation on the vectors is one kernel instead of one per leaf, so such a program compiles faster.
    """

    vectors: tuple[Array, ...]
    structure: Any
    shapes: tuple[tuple[tuple[int, ...], Any], ...]

    def unpack(self) -> PyTree:
        """The original tree."""
        by_dtype = dict(zip(dict.fromkeys(dtype for _, dtype in self.shapes), self.vectors, strict=True))
        used = dict.fromkeys(by_dtype, 0)
        leaves = []
        for shape, dtype in self.shapes:
            start = used[dtype]
            used[dtype] += math.prod(shape)
            leaves.append(by_dtype[dtype][start : used[dtype]].reshape(shape))
        return jax.tree.unflatten(self.structure, leaves)


def pack(tree: PyTree) -> Packed:
    """Concatenate all leaves of each dtype into one vector."""
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[Any, list[Array]] = {}
    for leaf in leaves:
        groups.setdefault(leaf.dtype, []).append(leaf.reshape(-1))
    vectors = tuple(jnp.concatenate(group) for group in groups.values())
    return Packed(vectors, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))


def prefix_divide(total: PyTree, weight: PyTree) -> PyTree:
    """``total / weight``, zero where the weight is zero.

    Args:
      total: a tree of arrays.
      weight: a tree prefix of ``total``: each leaf, of shape [] or [k], divides the leading axes of its subtree.
    """

    def divide(w: Array, leaf: Array) -> Array:
        w = jnp.reshape(w, w.shape + (1,) * (leaf.ndim - w.ndim))
        return jnp.where(w > 0, leaf / jnp.where(w > 0, w, 1), 0).astype(leaf.dtype)

    return jax.tree.map(lambda w, part: jax.tree.map(lambda leaf: divide(w, leaf), part), weight, total)


def split_by_path(tree: PyTree, predicate: PathPredicate) -> tuple[PyTree, PyTree]:
    """Split a tree into the leaves whose path the predicate accepts, and the others.

    Both parts have the nodes of the whole tree, with None (to JAX, a node without leaves) in place of a missing leaf;
    `merge` puts them together again.
    """

    def keep(accepted: bool) -> PyTree:
        return jax.tree.map_with_path(
            lambda path, leaf: leaf if bool(predicate(_names(path))) == accepted else None, tree
        )

    return keep(True), keep(False)


def merge(part: PyTree, rest: PyTree) -> PyTree:
    """Inverse of `split_by_path`."""
    return jax.tree.map(lambda a, b: b if a is None else a, part, rest, is_leaf=lambda node: node is None)


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def valid_count(valid: Array) -> Array:
    """Number of valid slots, at least one, []."""
    return jnp.maximum(valid.sum(), 1)


def valid_sum(valid: Array, values: Array) -> Array:
    """Sum of values [b] over the valid slots [b], []; NaN in others is dropped."""
    return jnp.where(valid, values, 0).sum()


def valid_mean(valid: Array, values: Array) -> Array:
    """Mean of values [b] over the valid slots [b], []; zero where none is valid."""
    return valid_sum(valid, values) / valid_count(valid)


def num_bytes(tree: PyTree) -> int:
    """Size of all leaves in bytes; leaves may be arrays or ``jax.ShapeDtypeStruct``."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def take_rows(tree: PyTree, rows: Array) -> PyTree:
    """Gather rows of a stacked tree, leaves [m, ...] -> [k, ...]. A row outside [0, m) reads the nearest row.

    An empty slot of a cohort carries the row m. What it reads is real data of some client, so it cannot make NaN, and
    what it computes is dropped by the mask; clipping spares the pass over the data that filling would cost.
    """
    return jax.tree.map(lambda a: a.at[rows].get(mode="clip", indices_are_sorted=True), tree)


def put_rows(tree: PyTree, rows: Array, values: PyTree) -> PyTree:
    """Write rows into a stacked tree; rows outside [0, m) (empty slots) are dropped."""
    return jax.tree.map(lambda a, v: a.at[rows].set(v, mode="drop", indices_are_sorted=True), tree, values)
