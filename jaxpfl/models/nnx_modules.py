"""Modules of flax.nnx as pairs of pure functions of their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array, Key, PyTree
from jaxpfl.models.parameters import Given, nested, value_at
from jaxpfl.support.errors import JaxpflError, shown


def functions(made: Any) -> tuple[Callable[..., PyTree], Callable[..., Array]]:
    """``init`` and ``apply`` of an ``nnx.Module``, or of a function ``rngs -> nnx.Module``.

    Raises:
      JaxpflError: for variables other than parameters and random streams (running statistics, caches), and for what
        makes no module.
    """
    from flax import nnx

    def kept_apart(module: Any) -> tuple[Any, Mapping[Any, Any], Any]:
        """Structure, parameters by path, and random streams of a module."""
        structure, params, streams, others = nnx.split(module, nnx.Param, nnx.RngState, ...)
        for path, variable in nnx.to_flat_state(others):
            raise JaxpflError(
                f"{type(module).__name__} has the mutable variable {'/'.join(map(str, path))!r} "
                f"({type(variable).__name__}): only nnx.Param is supported, use GroupNorm in place of BatchNorm"
            )
        return structure, dict(nnx.to_flat_state(params)), streams

    instance = isinstance(made, nnx.Module)
    example: Any = made if instance else nnx.eval_shape(lambda: made(nnx.Rngs(0)))
    if not isinstance(example, nnx.Module):
        raise JaxpflError(f"from_nnx takes an nnx.Module or a function of rngs that makes one, got {shown(made)}")
    name = type(example).__name__
    example = nnx.clone(example)
    structures = {}
    for train in (False, True):
        example.train() if train else example.eval()  # attributes of dropout and its like, not arrays
        structures[train], variables, streams = kept_apart(example)
    paths = list(variables)
    kinds = {path: jax.tree.structure(variable) for path, variable in variables.items()}
    of_streams, leaves = jax.tree.structure(streams), jax.tree.leaves(streams)
    shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
    takes_train = "train" in inspect.signature(type(example).__call__).parameters

    def parameters(found: Mapping[Any, Any]) -> PyTree:
        return nested({path: jnp.asarray(variable.get_value()) for path, variable in found.items()})

    def init(key: Key, x: Array) -> PyTree:
        return parameters(kept_apart(made(nnx.Rngs(key)))[1])

    def apply(params: PyTree, x: Array, key: Key | None = None, train: bool = False) -> Array:
        # Made anew for each call: nnx does not allow a stream's counter to change that another program made.
        state = nnx.from_flat_state({path: jax.tree.unflatten(kinds[path], [value_at(params, path)]) for path in paths})
        source = jax.random.key(0) if key is None else key
        values = [
            jax.random.fold_in(source, i) if jnp.issubdtype(dtype, jax.dtypes.prng_key) else jnp.zeros(shape, dtype)
            for i, (shape, dtype) in enumerate(shapes)
        ]
        # Without a key nothing may be drawn: as in evaluation.
        module = nnx.merge(structures[train and key is not None], state, jax.tree.unflatten(of_streams, values))
        return module(x, train=train) if takes_train else module(x)

    return (Given(name, parameters(dict(kept_apart(made)[1]))) if instance else init), apply
