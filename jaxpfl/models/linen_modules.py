"""Modules of flax.linen as pure functions of their parameters, running statistics of batch normalisation among them.

Running statistics are the part ``batch_stats`` of the parameters, ``batch_stats/PATH/mean`` and
``batch_stats/PATH/var`` of the layer at PATH, so that whatever averages, sends, keeps or stores a model does so with
them. No gradient moves them: in training a batch is normalised by its own mean and variance, and the forward pass
returns the statistics moved towards these. Padded examples count in neither.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxpfl.core.types import Array, Key, PyTree
from jaxpfl.models.normalisation import BatchNorm
from jaxpfl.support.errors import JaxpflError

STATISTICS = "batch_stats"
"""Name of the collection, and of the part of the parameters."""


class Functions(NamedTuple):
    """Functions of a module: ``init`` and ``apply`` as in `Model`, and ``observe`` as in `Statistics`."""

    init: Callable[[Key, Any], PyTree]
    apply: Callable[..., Array]
    observe: Callable[..., tuple[Array, PyTree]]


def functions(module: nn.Module) -> Functions:
    """Functions of a module; if its ``__call__`` takes ``train``, it is passed. Equal modules have the same ones, so
    that what was traced of them is known.

    Layers of ``flax.linen.BatchNorm`` that were not told use the running averages where nothing is trained.
    """
    try:
        return _functions(module)
    except TypeError:  # an attribute has no hash
        return _functions.__wrapped__(module)


@functools.lru_cache(maxsize=64)
def _functions(module: nn.Module) -> Functions:
    name = type(module).__name__
    takes_train = "train" in inspect.signature(type(module).__call__).parameters

    def run(given: Callable[..., Any], train: bool, valid: Array | None, found: set[tuple[str, ...]]) -> Any:
        with nn.intercept_methods(_interceptor(name, train, valid, found)):
            return given(**({"train": train} if takes_train else {}))

    def init(key: Key, x: Array) -> PyTree:
        layers: set[tuple[str, ...]] = set()
        variables = run(lambda **flag: module.init(key, x, **flag), False, None, layers)
        others = sorted(set(variables) - {"params", STATISTICS})
        if others:
            raise JaxpflError(
                f"{name} has the mutable collection {others[0]!r}: only 'params', and the 'batch_stats' of BatchNorm, "
                "are supported"
            )
        params, statistics = variables.get("params", {}), variables.get(STATISTICS, {})
        if not statistics:
            return params
        if STATISTICS in params:
            raise JaxpflError(f"{name} has parameters called {STATISTICS!r}, the name of its running statistics")
        for path, _ in jax.tree.leaves_with_path(statistics):
            names = tuple(jax.tree_util.keystr((part,), simple=True) for part in path)
            if names[:-1] not in layers:
                raise JaxpflError(
                    f"{name} has the running statistic {'/'.join(names)!r} of no flax.linen.BatchNorm: padded examples "
                    "would count in it"
                )
        # Of the parameters' default type: flax has them in float32 throughout.
        return {**params, STATISTICS: jax.tree.map(lambda a: a.astype(jnp.result_type(float)), statistics)}

    def apply(params: PyTree, x: Array, key: Key | None = None, train: bool = False) -> Array:
        variables = _variables(params)
        if train and STATISTICS in variables:
            raise JaxpflError(
                f"{name} has running statistics (BatchNorm), which this training would not move: use GroupNorm, or a "
                "method that carries them, such as fedbn or fedavg"
            )
        rngs = None if key is None else {"dropout": key}
        # Declared as output or (output, updates); without `mutable` it is the output alone.
        return cast(Array, run(lambda **flag: module.apply(variables, x, rngs=rngs, **flag), train, None, set()))

    def observe(params: PyTree, x: Array, *, key: Key | None = None, train: bool = True, valid: Array) -> Any:
        rngs, variables = None if key is None else {"dropout": key}, _variables(params)
        anybody = valid.any()
        # Of an empty batch all slots are normalised, so that there is no 0/0, and nothing is kept.
        used = valid | ~anybody

        def given(**flag: Any) -> Any:
            return module.apply(variables, x, rngs=rngs, mutable=[STATISTICS], **flag)

        logits, updates = run(given, train, used, set())

        def moved(old: Array, new: Array) -> Array:
            return jnp.where(anybody, new.astype(old.dtype), old)

        statistics = jax.tree.map(moved, params[STATISTICS], updates[STATISTICS])
        return logits, {**params, STATISTICS: jax.lax.stop_gradient(statistics)}

    return Functions(init, apply, observe)


def _variables(params: PyTree) -> dict[str, PyTree]:
    """Collections of the module."""
    if not isinstance(params, dict) or STATISTICS not in params:
        return {"params": params}
    rest = {name: part for name, part in params.items() if name != STATISTICS}
    return {"params": rest, STATISTICS: jax.tree.map_with_path(_usable, params[STATISTICS])}


def _usable(path: Any, leaf: Array) -> Array:
    """A variance that lossy or extrapolating updates took below zero counts as zero."""
    return jnp.maximum(leaf, 0) if jax.tree_util.keystr(path[-1:], simple=True) == "var" else leaf


def _interceptor(name: str, train: bool, valid: Array | None, found: set[tuple[str, ...]]) -> Any:
    """Interceptor that gives layers of batch normalisation the mask of real examples and their mode."""

    def interceptor(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        layer = context.module
        if context.method_name != "__call__" or not isinstance(layer, nn.BatchNorm | BatchNorm):
            return call(*args, **kwargs)
        found.add(tuple(layer.path))
        bound = inspect.signature(type(layer).__call__).bind(layer, *args, **kwargs)
        bound.apply_defaults()
        (x, given, mask), at = (
            (bound.arguments[key] for key in ("x", "use_running_average", "mask")),
            "/".join(layer.path),
        )
        own = layer.use_running_average if given is None else given
        running = not train if own is None else own
        if not train and not running:
            raise JaxpflError(f"{name}: {at} normalises by batches in evaluation too: use_running_average = not train")
        if valid is not None:
            mask = _mask(name, at, layer, x, valid, mask)
        told = None if layer.use_running_average is not None else running
        return call(x, use_running_average=told, mask=mask)

    return interceptor


def _mask(name: str, at: str, layer: Any, x: Array, valid: Array, mask: Array | None) -> Array:
    """Mask of the entries of x that count, of the examples that are real and of the layer's own."""
    if isinstance(layer, BatchNorm):
        axis = x.ndim - 1
    else:
        axis, features = 0, layer.axis if isinstance(layer.axis, tuple | list) else (layer.axis,)
        if getattr(layer, "axis_name", None) is not None:
            raise JaxpflError(f"{name}: {at} has axis_name = {layer.axis_name}: statistics are those of one client")
        if any(one % x.ndim == 0 for one in features):
            raise JaxpflError(f"{name}: {at} has examples as features (axis = {layer.axis})")
    if x.shape[axis] != len(valid):
        raise JaxpflError(f"{name}: {at} sees {x.shape[axis]} rows of {len(valid)} examples: padding would count in it")
    shape = [1] * x.ndim
    shape[axis] = -1
    of_examples = valid.reshape(shape)
    return of_examples if mask is None else of_examples & mask
