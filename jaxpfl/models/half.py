"""Models that compute in bfloat16, with parameters in their own type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array, Key, PyTree
from jaxpfl.models.base import Task
from jaxpfl.support.errors import JaxpflError


@dataclass(frozen=True)
class Half:
    """`Model.apply` in bfloat16: parameters and inputs are rounded where they enter, and logits are widened.

    Gradients pass through the rounding unchanged and come out in the parameters' type, in which steps, sums, clipping
    and noise are computed.

    Attributes:
      plain: the model's own function of all four arguments.
    """

    plain: Callable[..., Array]

    def __call__(self, params: PyTree, x: Array, key: Key | None = None, train: bool = False) -> Array:
        leaves = [leaf for leaf in jax.tree.leaves(params) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
        wide = jnp.result_type(*leaves) if leaves else jnp.result_type(float)
        return self.plain(*jax.tree.map(_rounded, (params, x)), key=key, train=train).astype(wide)


def in_bfloat16(task: Task) -> Task:
    """The task with its model in `Half` precision; its loss and metrics see logits in the parameters' type.

    Raises:
      JaxpflError: for a model with running statistics, whose small moves would be rounded away.
    """
    if task.statistics is not None:
        raise JaxpflError("precision = bfloat16 rounds away the moves of running statistics (BatchNorm): use float32")
    return task._replace(model=task.model._replace(apply=Half(task.model.apply)))


def _rounded(leaf: Any) -> Any:
    return leaf.astype(jnp.bfloat16) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else leaf
