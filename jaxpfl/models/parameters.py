"""Parameters of modules as nested dictionaries by path, whatever the library holds them in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Key, PyTree


class Given:
    """``init`` of a module that has its parameters already: the same for every key.

    Attributes:
      name: of the module's class.
      parameters: nested dictionaries of arrays.
    """

    def __init__(self, name: str, parameters: PyTree):
        self.name, self.parameters = name, parameters

    def __call__(self, key: Key, x: Any) -> PyTree:
        return jax.tree.map(jnp.asarray, self.parameters)


def nested(values: Mapping[Iterable[Any], Any]) -> PyTree:
    """Nested dictionaries from values by path.

    Examples:
      >>> nested({("conv", "kernel"): 1, ("layers", 0): 2})
      {'conv': {'kernel': 1}, 'layers': {'0': 2}}
    """
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parents, name = map(str, path)
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def value_at(tree: PyTree, path: Iterable[Any]) -> Any:
    """The value at a path of `nested`."""
    for name in path:
        tree = tree[str(name)]
    return tree
