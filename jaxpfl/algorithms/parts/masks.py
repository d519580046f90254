r"""Masks of shared and personal parameters by path: M and N of Zhao et al.

.. math:: \theta_n = M x + N z_n

Rows of M and of N have at most one 1: a parameter may be shared (part of x), personal (part of client n's z_n), both,
where the two are added, or neither, where it keeps its initial value. M^T and N^T, inverses in the paper, are
`Masks.of_shared` and `Masks.of_personal`. Shared, personal and fixed parts are trees of the model's nodes, None where
they have no leaf.

Reference: Zhao et al., Figure 3.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import trees
from jaxpfl.core.trees import PathPredicate
from jaxpfl.core.types import Array, Key, PyTree
from jaxpfl.models import Task
from jaxpfl.models.base import by_path
from jaxpfl.support.errors import JaxpflError, listed

NONE = "none"


class Parts(NamedTuple):
    """Model in three parts: shared x, personal z, and fixed."""

    shared: PyTree
    personal: PyTree
    fixed: PyTree

    def model(self) -> PyTree:
        """Whole model ``M x + N z``, with the fixed values where neither has a leaf."""

        def add(*parts: Array | None) -> Array:
            return reduce(jnp.add, [part for part in parts if part is not None])

        return jax.tree.map(add, *self, is_leaf=lambda node: node is None)


class Masks(NamedTuple):
    """Predicates of shared and of personal paths."""

    shared: PathPredicate
    personal: PathPredicate

    def is_trained(self, path: tuple[str, ...]) -> bool:
        """True for a shared or personal path."""
        return self.shared(path) or self.personal(path)

    def of_shared(self, tree: PyTree) -> PyTree:
        """Shared leaves, M^T of the tree."""
        return trees.split_by_path(tree, self.shared)[0]

    def of_personal(self, tree: PyTree) -> PyTree:
        """Personal leaves, N^T of the tree."""
        return trees.split_by_path(tree, self.personal)[0]

    def split(self, params: PyTree) -> Parts:
        """Initial parts of a model; z is zero where a leaf is also shared."""
        trained, fixed = trees.split_by_path(params, self.is_trained)
        shared, rest = trees.split_by_path(trained, self.shared)
        zero = jax.tree.map(jnp.zeros_like, self.of_personal(shared))
        return Parts(shared, trees.merge(self.of_personal(rest), zero), fixed)


def masks(method: str, task: Task, shared: str, personal: str) -> Masks:
    """Masks by patterns of paths, such as ``conv*,dense0/kernel``.

    Args:
      method: the method's name, for errors.
      task: the task of the model.
      shared, personal: comma-separated shell patterns of whole paths (``dense0/kernel``; ``*`` also matches slashes);
        ``none`` for no parameter.

    Raises:
      JaxpflError: for a pattern that matches no parameter, and where nothing is shared or personal.
    """
    paths = list(by_path(jax.eval_shape(task.init, jax.random.key(0))))

    def predicate(option: str, text: str) -> PathPredicate:
        patterns = [] if text.strip() == NONE else [pattern.strip() for pattern in text.split(",")]
        for pattern in patterns:
            if not any(fnmatchcase(path, pattern) for path in paths):
                raise JaxpflError(
                    f"{method}.{option}: no parameter fits {pattern!r} (there are {listed(paths, pattern)})"
                )

        # A model that is one array has a path without names, and is called "parameters".
        return lambda path: any(fnmatchcase("/".join(path) or paths[0], pattern) for pattern in patterns)

    chosen = Masks(predicate("shared", shared), predicate("personal", personal))
    if NONE == shared.strip() == personal.strip():
        raise JaxpflError(f"{method} has nothing to train: shared and personal are both {NONE!r}")
    return chosen


def with_fixed(task: Task, fixed: PyTree) -> Task:
    """Task of the remaining parameters, with some fixed."""

    def apply(params: PyTree, x: PyTree, key: Key | None = None, train: bool = False) -> Array:
        return task.model.apply(trees.merge(params, fixed), x, key=key, train=train)

    return task._replace(model=task.model._replace(apply=apply, statistics=None))
