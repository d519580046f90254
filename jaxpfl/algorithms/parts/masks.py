r"""Which parameters all clients share and which are a client's own, by path: the masks M and N of Zhao et al.

.. math:: \theta_n = M x + N z_n

Rows of M and of N have at most one 1: a parameter may be shared (part of x), personal (part of z_n), both, where the
two are added, or neither, where it keeps its first value. M^T and N^T, which the print writes as inverses, are
`Masks.of_shared` and `Masks.of_personal`. x, z and what is fixed are trees of the model's nodes, None where they have
no part.

Reference: Zhao et al., Figure 3.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl import trees
from jaxpfl.errors import JaxpflError
from jaxpfl.models import Task
from jaxpfl.models.given import by_path
from jaxpfl.trees import PathPredicate
from jaxpfl.types import Array, Key, PyTree

NONE = "none"


class Parts(NamedTuple):
    """A model as what is shared, x, what is the client's own, z, and what is fixed."""

    shared: PyTree
    personal: PyTree
    fixed: PyTree

    def model(self) -> PyTree:
        """``M x + N z`` and, where neither has a part, the fixed values."""

        def add(*parts: Array | None) -> Array:
            return reduce(jnp.add, [part for part in parts if part is not None])

        return jax.tree.map(add, *self, is_leaf=lambda node: node is None)


class Masks(NamedTuple):
    """Which paths are shared, and which personal."""

    shared: PathPredicate
    personal: PathPredicate

    def is_trained(self, path: tuple[str, ...]) -> bool:
        """Whether a path is shared or personal."""
        return self.shared(path) or self.personal(path)

    def of_shared(self, tree: PyTree) -> PyTree:
        """M^T: the leaves that are shared."""
        return trees.split_by_path(tree, self.shared)[0]

    def of_personal(self, tree: PyTree) -> PyTree:
        """N^T: the leaves that are personal."""
        return trees.split_by_path(tree, self.personal)[0]

    def split(self, params: PyTree) -> Parts:
        """The parts of a model to begin with; where both have a part, z is zero."""
        trained, fixed = trees.split_by_path(params, self.is_trained)
        shared, rest = trees.split_by_path(trained, self.shared)
        zero = jax.tree.map(jnp.zeros_like, self.of_personal(shared))
        return Parts(shared, trees.merge(self.of_personal(rest), zero), fixed)


def masks(method: str, task: Task, shared: str, personal: str) -> Masks:
    """The masks that patterns of paths name, such as ``conv*,dense0/kernel``.

    Args:
      method: whose options they are, for errors.
      task: its model's parameters are named.
      shared, personal: patterns of the shell's kind, with commas between them, of whole paths (``dense0/kernel``; a
        ``*`` takes slashes too); ``none`` for no parameter.

    Raises:
      JaxpflError: for a pattern that fits no parameter, and where nothing is shared or personal.
    """
    paths = list(by_path(jax.eval_shape(task.init, jax.random.key(0))))

    def predicate(option: str, text: str) -> PathPredicate:
        patterns = [] if text.strip() == NONE else [pattern.strip() for pattern in text.split(",")]
        for pattern in patterns:
            if not any(fnmatchcase(path, pattern) for path in paths):
                raise JaxpflError(f"{method}.{option}: no parameter fits {pattern!r} (there are {', '.join(paths)})")

        # A model that is one array has a path without names, and is called "parameters".
        return lambda path: any(fnmatchcase("/".join(path) or paths[0], pattern) for pattern in patterns)

    chosen = Masks(predicate("shared", shared), predicate("personal", personal))
    if NONE == shared.strip() == personal.strip():
        raise JaxpflError(f"{method} has nothing to train: shared and personal are both {NONE!r}")
    return chosen


def with_fixed(task: Task, fixed: PyTree) -> Task:
    """The task of the other parameters where some are fixed."""

    def apply(params: PyTree, x: PyTree, key: Key | None = None, train: bool = False) -> Array:
        return task.model.apply(trees.merge(params, fixed), x, key=key, train=train)

    return task._replace(model=task.model._replace(apply=apply))
