"""Conversion of flax.linen, flax.nnx and equinox modules to pure functions of their parameters.

Only flax.linen modules can have running statistics of batch normalization. The statistics are part of the parameters:
``batch_stats/PATH/mean`` and ``batch_stats/PATH/var`` for the layer at PATH. Every method that averages, sends or
stores a model therefore includes the statistics. Statistics have no gradient. In training, a batch is normalized by its
own mean and variance, and the forward pass returns running statistics that are updated toward the batch's statistics.
Padded examples have no effect.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxpfl.core.types import Array, Key, PyTree
from jaxpfl.models.layers import BatchNorm
from jaxpfl.support.errors import JaxpflError, missing_extra, shown

STATISTICS = "batch_stats"
"""Name of flax's collection of running statistics, and of the statistics' entry in the parameters."""


LinenFunctions: TypeAlias = tuple[Callable[..., PyTree], Callable[..., Array], Callable[..., tuple[Array, PyTree]]]
"""Functions of a module: ``init`` and ``apply`` as in `Model`, and ``observe`` as in `Statistics`."""


@functools.lru_cache(maxsize=64)
def linen_functions(module: nn.Module) -> LinenFunctions:
    """Return the functions of a module. They pass ``train`` to the module's ``__call__`` if it has this argument.

    Equal modules get the same functions, so that compiled programs are reused. Layers of ``flax.linen.BatchNorm`` whose
    mode is not set use the running averages outside of training.
    """
    name = type(module).__name__
    takes_train = "train" in inspect.signature(type(module).__call__).parameters

    def run(call: Callable[..., Any], train: bool, valid: Array | None, found: set[tuple[str, ...]]) -> Any:
        with nn.intercept_methods(functools.partial(_pass_mask, name, train, valid, found)):
            return call(**({"train": train} if takes_train else {}))

    def init(key: Key, x: Array) -> PyTree:
        layers: set[tuple[str, ...]] = set()
        variables = run(lambda **flag: module.init(key, x, **flag), False, None, layers)
        others = sorted(set(variables) - {"params", STATISTICS})
        if others:
            raise JaxpflError(
                f"{name} must have no mutable collections other than 'params' and BatchNorm's 'batch_stats', got "
                f"{others[0]!r}"
            )
        params, statistics = variables.get("params", {}), variables.get(STATISTICS, {})
        if not statistics:
            return params
        if STATISTICS in params:
            raise JaxpflError(f"{name} must not have a parameter named {STATISTICS!r}: rename it")
        for path, _ in jax.tree.leaves_with_path(statistics):
            names = _names(path)
            if names[:-1] not in layers:
                raise JaxpflError(
                    f"{name} has the running statistic {'/'.join(names)!r}, whose layer is not a flax.linen.BatchNorm, "
                    "so that padded examples would change it: use GroupNorm"
                )
        # Convert the statistics to the parameters' default float dtype, because flax always makes them float32.
        return {**params, STATISTICS: jax.tree.map(lambda a: a.astype(jnp.result_type(float)), statistics)}

    def apply(params: PyTree, x: Array, key: Key | None = None, train: bool = False) -> Array:
        variables = _variables(params)
        if train and STATISTICS in variables:
            raise JaxpflError(
                f"{name} has running statistics (BatchNorm), which this training would not update: use GroupNorm, or a "
                "method that updates them, such as fedbn or fedavg"
            )
        rngs = None if key is None else {"dropout": key}
        # flax declares the result as output or (output, updates); without `mutable` it is only the output.
        return cast(Array, run(lambda **flag: module.apply(variables, x, rngs=rngs, **flag), train, None, set()))

    def observe(params: PyTree, x: Array, *, key: Key | None = None, train: bool = True, valid: Array) -> Any:
        rngs, variables = None if key is None else {"dropout": key}, _variables(params)
        anybody = valid.any()
        # In a batch without valid examples, use all slots to avoid 0/0, and keep the old statistics.
        used = valid | ~anybody

        def forward(**flag: Any) -> Any:
            return module.apply(variables, x, rngs=rngs, mutable=[STATISTICS], **flag)

        logits, updates = run(forward, train, used, set())

        def update(old: Array, new: Array) -> Array:
            return jnp.where(anybody, new.astype(old.dtype), old)

        statistics = jax.tree.map(update, params[STATISTICS], updates[STATISTICS])
        return logits, {**params, STATISTICS: jax.lax.stop_gradient(statistics)}

    return init, apply, observe


def _variables(params: PyTree) -> dict[str, PyTree]:
    """Return the collections of a flax.linen module."""
    if not isinstance(params, dict) or STATISTICS not in params:
        return {"params": params}
    rest = {name: part for name, part in params.items() if name != STATISTICS}
    return {"params": rest, STATISTICS: jax.tree.map_with_path(_usable, params[STATISTICS])}


def _usable(path: Any, leaf: Array) -> Array:
    """Clip a variance at zero, because compressed or extrapolated updates can make it negative."""
    return jnp.maximum(leaf, 0) if jax.tree_util.keystr(path[-1:], simple=True) == "var" else leaf


def _pass_mask(
    name: str,
    train: bool,
    valid: Array | None,
    found: set[tuple[str, ...]],
    call: Any,
    args: Any,
    kwargs: Any,
    context: Any,
) -> Any:
    """Intercept the calls of batch normalization layers, to pass the mask of real examples and the mode."""
    layer = context.module
    if context.method_name != "__call__" or not isinstance(layer, nn.BatchNorm | BatchNorm):
        return call(*args, **kwargs)
    found.add(tuple(layer.path))
    bound = inspect.signature(type(layer).__call__).bind(layer, *args, **kwargs)
    bound.apply_defaults()
    x, given, mask = (bound.arguments[key] for key in ("x", "use_running_average", "mask"))
    at = "/".join(layer.path)
    own = layer.use_running_average if given is None else given
    running = not train if own is None else own
    if not train and not running:
        raise JaxpflError(f"{name}/{at} normalizes by batches in evaluation: set use_running_average = not train")
    if valid is not None:
        mask = _mask(name, at, layer, x, valid, mask)
    told = None if layer.use_running_average is not None else running
    return call(x, use_running_average=told, mask=mask)


def _mask(name: str, at: str, layer: Any, x: Array, valid: Array, mask: Array | None) -> Array:
    """Combine the mask of valid examples and the layer's own mask into one mask over the entries of x."""
    if isinstance(layer, BatchNorm):
        axis = x.ndim - 1
    else:
        axis, features = 0, layer.axis if isinstance(layer.axis, tuple | list) else (layer.axis,)
        if getattr(layer, "axis_name", None) is not None:
            raise JaxpflError(
                f"{name}/{at} must not have an axis_name, got {layer.axis_name}: every client normalizes alone"
            )
        if any(one % x.ndim == 0 for one in features):
            raise JaxpflError(f"{name}/{at} must not normalize over the examples' axis, got axis = {layer.axis}")
    if x.shape[axis] != len(valid):
        raise JaxpflError(
            f"{name}/{at} must get one row per example, so that padding has no effect, got {x.shape[axis]} rows for "
            f"{len(valid)} examples"
        )
    shape = [1] * x.ndim
    shape[axis] = -1
    of_examples = valid.reshape(shape)
    return of_examples if mask is None else of_examples & mask


def nnx_functions(made: Any) -> tuple[Callable[..., PyTree], Callable[..., Array]]:
    """Return ``init`` and ``apply`` for an ``nnx.Module``, or for a function ``rngs -> nnx.Module``.

    Raises:
      JaxpflError: if there are variables other than parameters and random streams (such as running statistics or
        caches), or if no module is given or made.
    """
    from flax import nnx

    def split_module(module: Any) -> tuple[Any, Mapping[Any, Any], Any]:
        """Return the structure, the parameters by path, and the random streams of a module."""
        structure, params, streams, others = nnx.split(module, nnx.Param, nnx.RngState, ...)
        for path, variable in nnx.to_flat_state(others):
            raise JaxpflError(
                f"{type(module).__name__} must have only variables of type nnx.Param, got {type(variable).__name__} "
                f"{'/'.join(map(str, path))!r}: use GroupNorm in place of BatchNorm"
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
        example.train() if train else example.eval()  # sets attributes of layers such as dropout, which are not arrays
        structures[train], variables, streams = split_module(example)
    paths = list(variables)
    kinds = {path: jax.tree.structure(variable) for path, variable in variables.items()}
    of_streams, leaves = jax.tree.structure(streams), jax.tree.leaves(streams)
    shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
    takes_train = "train" in inspect.signature(type(example).__call__).parameters

    def parameters(found: Mapping[Any, Any]) -> PyTree:
        return nested({path: jnp.asarray(variable.get_value()) for path, variable in found.items()})

    def init(key: Key, x: Array) -> PyTree:
        return parameters(split_module(made(nnx.Rngs(key)))[1])

    def apply(params: PyTree, x: Array, key: Key | None = None, train: bool = False) -> Array:
        # Make a new module for each call, because nnx does not allow one trace to change a counter of another trace.
        state = nnx.from_flat_state({path: jax.tree.unflatten(kinds[path], [value_at(params, path)]) for path in paths})
        source = jax.random.key(0) if key is None else key
        values = [
            jax.random.fold_in(source, i) if jnp.issubdtype(dtype, jax.dtypes.prng_key) else jnp.zeros(shape, dtype)
            for i, (shape, dtype) in enumerate(shapes)
        ]
        # Without a key there must be no randomness, so the module is in evaluation mode.
        module = nnx.merge(structures[train and key is not None], state, jax.tree.unflatten(of_streams, values))
        return module(x, train=train) if takes_train else module(x)

    return (Given(name, parameters(dict(split_module(made)[1]))) if instance else init), apply


def equinox_functions(made: Any) -> tuple[Callable[..., PyTree], Callable[..., Array]]:
    """Return ``init`` and ``apply`` for an ``equinox.Module``, or for a function ``key -> equinox.Module``.

    Parameters are the module's float arrays. As usual in equinox, the module is applied to one example at a time; if
    the module has an argument `key`, each example gets a separate key.

    Raises:
      JaxpflError: if the module has state (running statistics), if no module is given or made, or if equinox is not
        installed.
    """
    try:
        import equinox as eqx
    except ImportError:
        raise missing_extra("from_equinox", "equinox", "equinox") from None

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
        raise JaxpflError(f"{name} must not have state (equinox.nn.StateIndex): use GroupNorm in place of BatchNorm")

    def is_parameter(leaf: Any) -> bool:
        return eqx.is_inexact_array(leaf) or (
            isinstance(leaf, jax.ShapeDtypeStruct) and jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
        )

    variables, rest = eqx.partition(example, is_parameter)
    for path, leaf in jax.tree.leaves_with_path(rest):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise JaxpflError(
                f"{name}{jax.tree_util.keystr(path)} is an array of {leaf.dtype}, which cannot be a parameter: pass an "
                "instance of the module instead of a function"
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
        # Without a key there must be no randomness, so the module is in inference mode.
        module: Any = eqx.combine(jax.tree.unflatten(structure, leaves), at_rest[train and key is not None])
        if not takes_key or key is None:
            return jax.vmap(module)(x)
        return jax.vmap(lambda one, key: module(one, key=key))(x, jax.random.split(key, x.shape[0]))

    return (Given(name, parameters(made)) if instance else init), apply


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((part,), simple=True) for part in path)


class Given:
    """Function `Model.init` for a module that already has parameters; it returns these parameters for every key.

    Attributes:
      name: name of the module's class.
      parameters: nested dictionaries of arrays.
    """

    def __init__(self, name: str, parameters: PyTree):
        self.name, self.parameters = name, parameters

    def __call__(self, key: Key, x: Any) -> PyTree:
        return jax.tree.map(jnp.asarray, self.parameters)


def nested(values: Mapping[Iterable[Any], Any]) -> PyTree:
    """Build nested dictionaries from values by path.

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
    """Return the value at a path in the result of `nested`."""
    for name in path:
        tree = tree[str(name)]
    return tree
