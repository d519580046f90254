"""Models initialised with given instead of random parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core.types import PyTree
from jaxpfl.models.base import Task
from jaxpfl.support.errors import JaxpflError


def by_path(tree: PyTree) -> dict[str, Any]:
    """Leaves of a tree by path, such as ``dense0/kernel``; ``parameters`` for a tree that is one array.

    A dictionary by path is returned unchanged, so that a tree and its stored form can be compared.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/") or "parameters": leaf for path, leaf in leaves}


def start_from(task: Task, parameters: PyTree) -> Task:
    """The task with `Task.init` returning the given parameters for every key.

    Args:
      task: any task.
      parameters: a tree like its model's, or a dictionary of arrays by path.

    Raises:
      JaxpflError: if a parameter is missing, unknown, of another shape, or not finite; the first such is named.
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
        with np.errstate(over="ignore"):  # values that overflow become infinite, and are refused
            values[path] = value.astype(wanted[path].dtype)
        if not np.isfinite(values[path]).all():
            raise JaxpflError(f"the given parameters must be finite, {path!r} holds a NaN or infinite value")
    tree = jax.tree.unflatten(jax.tree.structure(shapes), list(values.values()))
    return task._replace(model=task.model._replace(init=lambda key, x: jax.tree.map(jnp.asarray, tree)))
