r"""Low-rank adapters (LoRA) for a model whose own parameters are frozen.

In the adapted model, a kernel W is frozen, reshaped to a matrix [p, q], and replaced by

.. math:: W + \frac{\alpha}{r} A B, \qquad A \in R^{p \times r}, \; B \in R^{r \times q},

where only A and B are trained. B is initially zero, so training starts from the given model. The parameters of the
adapted `Model` are A and B, so a federated method sends, averages, personalizes or regularizes only A and B.

Reference: Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models", https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array, Key, PyTree
from jaxpfl.models.base import Model, as_model, leaves_by_path, nested
from jaxpfl.support.errors import JaxpflError, listed


def lora(
    model: Any,
    base: PyTree,
    *,
    rank: int = 4,
    alpha: float | None = None,
    at: str = "*",
    trained: str = "",
    personal: str = "",
) -> Model:
    """Add low-rank adapters to a model; return a model with only the trained parameters.

    The returned model's parameters are ``adapters/PATH/a`` and ``adapters/PATH/b`` for each adapted kernel, and
    ``trained/PATH`` for each parameter that is trained in full from its given value, such as a classifier. Patterns are
    comma-separated shell patterns that match whole paths; ``*`` also matches slashes.

    Examples:
      >>> from jaxpfl.models import build_model
      >>> mlp = build_model("mlp:8", num_classes=3, input_shape=(5,))
      >>> base = mlp.init(jax.random.key(0), jnp.zeros((1, 5)))
      >>> adapted = lora(mlp, base, rank=2, at="dense0/*", trained="head/*", personal="trained/*")
      >>> sorted(leaves_by_path(adapted.init(jax.random.key(1), jnp.zeros((1, 5)))))
      ['adapters/dense0/kernel/a', 'adapters/dense0/kernel/b', 'trained/head/bias', 'trained/head/kernel']

    Args:
      model: a `Model`, or a module of flax.linen, flax.nnx or equinox.
      base: parameters of the model, which are frozen unless a pattern in ``trained`` matches their path.
      rank: rank r of A and B, at least 1.
      alpha: scale alpha of the adapters; by default r, so that the factor alpha / r is 1.
      at: patterns of parameters to adapt; parameters with fewer than two axes are not adapted. If a parameter has more
        than two axes, the axes are divided into rows and columns so that A and B are smallest.
      trained: patterns of parameters that are trained in full instead of adapted.
      personal: patterns of the adapted model's parameters that form its head (`Model.head`), for methods with a
        personal part; none by default.

    Raises:
      JaxpflError: if the rank is below 1, if the model has running statistics, or if a pattern matches no parameter.
    """
    model, frozen = as_model(model), {path: jnp.asarray(leaf) for path, leaf in leaves_by_path(base).items()}
    if model.statistics is not None and jax.tree.leaves(model.statistics.select(base)):
        raise JaxpflError("lora never updates running statistics, but the model has some (BatchNorm): use GroupNorm")
    if rank < 1:
        raise JaxpflError(f"rank must be at least 1, got {rank}")
    whole = _fitting("trained", trained, frozen)
    matrices = {path: leaf for path, leaf in frozen.items() if leaf.ndim > 1 and path not in whole}
    kernels = {path: _sides(matrices[path].shape) for path in _fitting("at", at, matrices)}
    scale = (rank if alpha is None else alpha) / rank
    structure = jax.tree.structure(base)

    def init(key: Key, x: Array) -> PyTree:
        values: dict[Iterable[Any], Array] = {("trained", *path.split("/")): frozen[path] for path in whole}
        for i, (path, (rows, columns)) in enumerate(kernels.items()):
            own, kind = ("adapters", *path.split("/")), frozen[path].dtype
            values[*own, "a"] = jax.random.normal(jax.random.fold_in(key, i), (rows, rank), kind) / math.sqrt(rows)
            values[*own, "b"] = jnp.zeros((rank, columns), kind)
        return nested(values)

    def apply(params: PyTree, x: Array, key: Key | None = None, train: bool = False) -> Array:
        given = leaves_by_path(params)

        def used(path: str, leaf: Array) -> Array:
            if path in whole:
                return given[f"trained/{path}"]
            if path not in kernels:
                return leaf
            product = given[f"adapters/{path}/a"] @ given[f"adapters/{path}/b"]
            return leaf + scale * product.reshape(leaf.shape)

        leaves = [used(path, leaf) for path, leaf in frozen.items()]
        return model.apply(jax.tree.unflatten(structure, leaves), x, key=key, train=train)

    own = _fitting("personal", personal, list(leaves_by_path(jax.eval_shape(init, jax.random.key(0), None))))

    def head(path: tuple[str, ...]) -> bool:
        return "/".join(path) in own

    return Model(init, apply, head if personal else None, vocabulary=model.vocabulary)


def _fitting(option: str, text: str, paths: Any) -> list[str]:
    """Return the paths that match a pattern; each pattern must match at least one path."""
    patterns = [pattern.strip() for pattern in text.split(",") if pattern.strip()]
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise JaxpflError(f"lora.{option}: no parameter matches {pattern!r} (parameters: {listed(paths, pattern)})")
    return [path for path in paths if any(fnmatchcase(path, pattern) for pattern in patterns)]


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Choose the matrix shape (rows, columns) to which a kernel is reshaped: the one with the smallest sum."""
    ways = [(math.prod(shape[:axis]), math.prod(shape[axis:])) for axis in range(1, len(shape))]
    return min(ways, key=sum)
