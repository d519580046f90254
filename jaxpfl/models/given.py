"""Models that start from given parameters in place of random ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.errors import JaxpflError
from jaxpfl.models.base import Task
from jaxpfl.types import PyTree


def by_path(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by their paths, such as ``dense0/kernel``; ``parameters`` for a tree that is one array.

    A dictionary of paths is left as it is, so that a tree and what was written of it compare.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/") or "parameters": leaf for path, leaf in leaves}


def start_from(task: Task, parameters: PyTree) -> Task:
    """The task whose `Task.init` gives these parameters, whatever the key.

    Args:
      task: any task.
      parameters: a tree like its model's, or a dictionary of arrays by path.

    Raises:
      JaxpflError: names the first parameter that is missing, not the model's, of another shape, or not finite.
    """
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    wanted, given = by_path(shapes), by_path(parameters)
    values = {}
    for path in wanted | given:
        here, there = (f"{np.shape(d[path])}" if path in d else "absent" for d in (given, wanted))
        if here != there:
            raise JaxpflError(
                f"the given parameters do not fit the model: {path!r} is {here} in them and {there} in the model"
            )
        value = np.asarray(given[path])
        if not (jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)):
            raise JaxpflError(f"the given parameters must be numbers, {path!r} is {value.dtype}")
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused
            values[path] = value.astype(wanted[path].dtype)
        if not np.isfinite(values[path]).all():
            raise JaxpflError(f"the given parameters must be finite, {path!r} holds a NaN or infinite value")
    tree = jax.tree.unflatten(jax.tree.structure(shapes), list(values.values()))
    return task._replace(model=task.model._replace(init=lambda key, x: jax.tree.map(jnp.asarray, tree)))
