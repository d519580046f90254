"""Separation of clients' data into what is by client (places and sizes) and the stores that all of them share.

A function of one client is mapped over the former alone: a store is an argument that is never gathered or copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxpfl.core.types import Array, ClientData, Examples, PyTree


def split(tree: PyTree) -> tuple[PyTree, tuple[Examples, ...]]:
    """A tree stacked by client without its stores (leaves [m, ...]), and these (leaves [N, ...]), in order."""
    stores = [node.examples for node in jax.tree.leaves(tree, is_leaf=_is_data) if _is_data(node)]
    return _with(tree, [None] * len(stores)), tuple(stores)


def join(tree: PyTree, stores: Sequence[Examples]) -> PyTree:
    """Inverse of `split`, for one client or a stack."""
    return _with(tree, stores)


def here(tree: PyTree, stores: Sequence[Examples], device: Array) -> PyTree:
    """The tree with places in a device's parts of stores that lie on several in equal parts.

    Args:
      tree: without its stores, stacked or one client's.
      stores: this device's parts.
      device: [] int32, its index.
    """
    parts = iter(stores)

    def moved(node: Any) -> Any:
        return replace(node, start=node.start - device * len(next(parts).y)) if _is_data(node) else node

    return jax.tree.map(moved, tree, is_leaf=_is_data)


def _with(tree: PyTree, stores: Sequence[Any]) -> PyTree:
    given = iter(stores)
    return jax.tree.map(
        lambda node: replace(node, examples=next(given)) if _is_data(node) else node, tree, is_leaf=_is_data
    )


def _is_data(node: Any) -> bool:
    return isinstance(node, ClientData)
