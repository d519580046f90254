"""Modules of equinox, an optional package, as pairs of pure functions of their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax

from jaxpfl.core.types import Array, Key, PyTree
from jaxpfl.models.parameters import Given, nested, value_at
from jaxpfl.support.errors import JaxpflError, shown


def functions(made: Any) -> tuple[Callable[..., PyTree], Callable[..., Array]]:
    """``init`` and ``apply`` of an ``equinox.Module``, or of a function ``key -> equinox.Module``.

    Parameters are the arrays of floats. A module is applied to one example, as is the custom, with a key of its own if
    it takes one.

    Raises:
      JaxpflError: for a module with state (running statistics), for what makes no module, and without equinox.
    """
    try:
        import equinox as eqx
    except ImportError:
        raise JaxpflError("equinox is not installed: pip install 'jaxpfl[equinox]'") from None

    instance = isinstance(made, eqx.Module)
    example: Any = made if instance else eqx.filter_eval_shape(made, jax.random.key(0))
    if not isinstance(example, eqx.Module):
        raise JaxpflError(
            f"from_equinox takes an equinox.Module or a function of a key that makes one, got {shown(made)}"
        )
    name = type(example).__name__

    def is_state(leaf: Any) -> bool:
        return isinstance(leaf, eqx.nn.StateIndex)

    if any(map(is_state, jax.tree.leaves(example, is_leaf=is_state))):
        raise JaxpflError(f"{name} has state (equinox.nn.StateIndex): only parameters are supported, use GroupNorm")

    def is_parameter(leaf: Any) -> bool:
        return eqx.is_inexact_array(leaf) or (
            isinstance(leaf, jax.ShapeDtypeStruct) and jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
        )

    variables, rest = eqx.partition(example, is_parameter)
    for path, leaf in jax.tree.leaves_with_path(rest):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise JaxpflError(
                f"{name}{jax.tree_util.keystr(path)} is an array of {leaf.dtype}: give an instance instead"
            )
    paths = [_names(path) for path, _ in jax.tree.leaves_with_path(variables)]
    structure = jax.tree.structure(variables)
    at_rest = {train: eqx.nn.inference_mode(rest, value=not train) for train in (False, True)}
    takes_key = "key" in inspect.signature(type(example).__call__).parameters

    def parameters(module: Any) -> PyTree:
        arrays = jax.tree.leaves(eqx.filter(module, eqx.is_inexact_array))
        return nested(dict(zip(paths, arrays, strict=True)))

    def init(key: Key, x: Array) -> PyTree:
        return parameters(made(key))

    def apply(params: PyTree, x: Array, key: Key | None = None, train: bool = False) -> Array:
        leaves = [value_at(params, path) for path in paths]
        # Without a key nothing may be drawn: as in evaluation.
        module: Any = eqx.combine(jax.tree.unflatten(structure, leaves), at_rest[train and key is not None])
        if not takes_key or key is None:
            return jax.vmap(module)(x)
        return jax.vmap(lambda one, key: module(one, key=key))(x, jax.random.split(key, x.shape[0]))

    return (Given(name, parameters(made)) if instance else init), apply


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((part,), simple=True) for part in path)
