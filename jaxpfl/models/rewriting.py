"""Replacement of a user's own convolutions and pools by the forms in `products`, in the traced program of a model.

The model is traced, and the traced operations are applied one by one, with convolutions and pools replaced. The
replacement is therefore independent of the library that made the layers. The context `convolution.form` determines,
during tracing, whether layers are replaced; for a single client on an accelerator, the original convolution is already
fast.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives as p

from jaxpfl.core.types import Array, Key, PyTree
from jaxpfl.models import conv_kernel, convolution, products

_POOLS = {p.reduce_window_max_p: "max", p.reduce_window_sum_p: "sum"}
_PLAIN = {p.reduce_window_min_p: "it takes the minimum", p.reduce_window_p: "it reduces with a custom function"}


class Layer(NamedTuple):
    """A convolution or pool of a model.

    Attributes:
      name: path of the kernel, name of the module, or shape of the input.
      what: "convolution" or "pool".
      why_not: reason why the layer is not replaced; None if the layer is replaced.
    """

    name: str
    what: str
    why_not: str | None = None


def layers(apply: Callable[..., Any], params: PyTree, x: Any, key: Any) -> tuple[Layer, ...]:
    """Return the convolutions and pools of a model, in the order in which they are applied.

    Args:
      apply: `Model.apply`, with all four arguments.
      params: parameters of the model. ``params``, ``x`` and ``key`` can be arrays or ``jax.ShapeDtypeStruct``.
      x: a batch of inputs.
      key: key for dropout.
    """
    traced = jax.make_jaxpr(lambda params, x, key: apply(params, x, key=key, train=True))(params, x, key)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(params)]
    names: list[str | None] = [path.removesuffix("/kernel").removesuffix("/weight") for path in paths]
    names += [None] * (len(traced.jaxpr.invars) - len(names))
    return tuple(_iter_layers(traced.jaxpr, names))


@dataclass(frozen=True)
class Exchanged:
    """`Model.apply` or `Statistics.observe` with convolutions and pools replaced, unless `convolution.form` is "plain".

    Values and gradients are equal up to the order of additions. Differentiate in reverse mode first, because `products`
    defines only reverse-mode rules; forward mode over reverse mode works.

    Attributes:
      plain: original function of the model, with all its arguments.
    """

    plain: Callable[..., Any]

    def __call__(self, params: PyTree, x: Array, key: Key | None = None, train: bool = False, **arrays: Array) -> Any:
        if convolution.chosen() == "plain":
            return self.plain(params, x, key=key, train=train, **arrays)
        leaves, tree = jax.tree.flatten((params, x, key, arrays))

        def flat(*leaves: Any) -> Any:
            params, x, key, arrays = jax.tree.unflatten(tree, leaves)
            return self.plain(params, x, key=key, train=train, **arrays)

        make: Callable[..., Any] = jax.make_jaxpr(flat, return_shape=True)
        traced, shapes = make(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), _evaluated(traced.jaxpr, traced.consts, leaves))


def _why_not(eqn: Any) -> str | None:
    """Return the reason why a convolution or pool is not replaced; None if it can be replaced."""
    if eqn.primitive is p.conv_general_dilated_p:
        return products.why_not_conv(eqn.invars[1].aval.shape, eqn.params)
    if eqn.primitive in _POOLS:
        return products.why_not_pool(_POOLS[eqn.primitive], eqn.params, eqn.invars[0].aval.dtype)
    return _PLAIN[eqn.primitive]


def _is_layer(eqn: Any) -> bool:
    return eqn.primitive is p.conv_general_dilated_p or eqn.primitive in _POOLS or eqn.primitive in _PLAIN


def _holds_layer(eqn: Any) -> bool:
    """Return True if an operation calls a program with a convolution or pool."""
    return any(_is_layer(inner) or _holds_layer(inner) for jaxpr in _inner(eqn) for inner in jaxpr.eqns)


def _inner(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, core.ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, core.Jaxpr):
                yield one


@dataclass
class _Pending:
    """A convolution that may be computed together with a later pool, and the operations applied to it so far.

    Attributes:
      eqn: the convolution.
      x: input of the convolution.
      kernel: kernel of one client.
      bias: bias that was added at each position, [O]; None if no bias has been added.
      relu: whether ``jax.nn.relu`` has been applied.
    """

    eqn: Any
    x: Array
    kernel: Array
    bias: Array | None = None
    relu: bool = False

    @property
    def result(self) -> Array:
        """Result of the convolution and of the operations applied so far, computed without a pool."""
        y = _exchanged(self.eqn, products.conv, self.x, self.kernel, self.eqn.params)
        if self.bias is not None:
            shape = [1] * y.ndim
            shape[self.eqn.params["dimension_numbers"].out_spec[1]] = -1
            y = y + self.bias.reshape(shape)
        return jax.nn.relu(y) if self.relu else y

    def pooled(self) -> Array:
        """Compute the convolution and 2 x 2 max pooling with one matrix product."""
        x, kernel = products.conv_to_pool(self.x, self.kernel, self.eqn.params)
        bias = jnp.zeros(kernel.shape[-1], kernel.dtype) if self.bias is None else self.bias
        if self.relu:
            y = conv_kernel.conv_pool(x, kernel, bias)
        else:
            y = convolution.conv_max(x, kernel) + bias[:, None, None, None]
        return products.restore_layout(y, self.eqn.params)

    def extend(self, eqn: Any, given: list[Any]) -> _Pending | Array | None:
        """Apply the next operation if it is a bias, a relu or the pool; return None for any other operation."""
        of = self.eqn.params["dimension_numbers"].out_spec
        if eqn.primitive is p.add_p and self.bias is None and not self.relu:
            other = given[1] if given[0] is self else given[0]
            shape = eqn.outvars[0].aval.shape
            vector = tuple(size if axis == of[1] else 1 for axis, size in enumerate(shape))
            if not isinstance(other, _Pending) and jnp.shape(other) == vector:
                return replace(self, bias=other.reshape(-1))
        if _is_relu(eqn) and not self.relu:
            return replace(self, relu=True)
        if eqn.primitive is p.reduce_window_max_p and products.is_half_max(eqn.params, of[2:]):
            return _exchanged(eqn, self.pooled)
        return None


def _is_relu(eqn: Any) -> bool:
    """Return True for ``jax.nn.relu``, whose gradient at zero is zero."""
    return eqn.primitive is p.custom_jvp_call_p and _source(eqn) == _source_of_relu()


def _source(eqn: Any) -> str | None:
    """Return name, file and line of a function with a custom derivative."""
    debug = eqn.params["call_jaxpr"].jaxpr.debug_info
    return None if debug is None else debug.func_src_info


@functools.cache
def _source_of_relu() -> str | None:
    (eqn,) = jax.make_jaxpr(jax.nn.relu)(jax.ShapeDtypeStruct((), jnp.float32)).eqns
    return _source(eqn)


def _exchanged(eqn: Any, function: Callable[..., Array], *given: Any) -> Array:
    """Compute the result of a layer by another function; profiles show it under the name of the layer's module."""
    with jax.named_scope(str(eqn.source_info.name_stack) or "layer"):
        return function(*given).astype(eqn.outvars[0].aval.dtype)


def _evaluated(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Evaluate a program, with layers replaced where possible."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))
    uses = Counter(var for eqn in jaxpr.eqns for var in eqn.invars if not isinstance(var, core.Literal))
    uses.update(var for var in jaxpr.outvars if not isinstance(var, core.Literal))

    def read(var: Any) -> Any:
        value = var.val if isinstance(var, core.Literal) else values[var]
        return value.result if isinstance(value, _Pending) else value

    for eqn in jaxpr.eqns:
        if (found := _joined(eqn, values, uses)) is not None:
            values[eqn.outvars[0]] = found
        else:
            results = _applied(eqn, [read(var) for var in eqn.invars], jaxpr.debug_info)
            values.update(zip(eqn.outvars, results, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _joined(eqn: Any, values: dict[Any, Any], uses: Counter[Any]) -> _Pending | Array | None:
    """Return the result of an operation that begins or continues a `_Pending`, or None for any other operation."""
    given = [var.val if isinstance(var, core.Literal) else values[var] for var in eqn.invars]
    once = [var for var in eqn.invars if not isinstance(var, core.Literal) and uses[var] == 1]
    pending = [values[var] for var in once if isinstance(values[var], _Pending)]
    if len(pending) == 1:
        return pending[0].extend(eqn, given)
    if eqn.primitive is not p.conv_general_dilated_p or _why_not(eqn) is not None:
        return None
    if any(isinstance(value, _Pending) for value in given):
        return None
    return _Pending(eqn, *given) if products.fits_pool(given[1].shape, eqn.params) else None


def _applied(eqn: Any, given: list[Any], debug: Any) -> list[Any]:
    """Apply one operation of a program, or its replacement, to values; ``debug`` is the program's debug information."""
    if _is_layer(eqn):
        if _why_not(eqn) is None:
            if eqn.primitive is p.conv_general_dilated_p:
                return [_exchanged(eqn, products.conv, *given, eqn.params)]
            return [_exchanged(eqn, products.pool, *given, _POOLS[eqn.primitive], eqn.params)]
    elif eqn.primitive is p.jit_p and _holds_layer(eqn):
        inner = eqn.params["jaxpr"]
        return _evaluated(inner.jaxpr, inner.consts, given)
    if eqn.primitive in _REBUILT and _holds_layer(eqn):
        programs = {name: _rebuilt(value) for name, value in eqn.params.items() if name in ("jaxpr", "branches")}
        eqn = eqn.replace(params=eqn.params | programs)
    return alone(eqn, given, debug)


def alone(eqn: Any, given: list[Any], debug: Any) -> list[Any]:
    """Apply one operation of a program unchanged to values; ``debug`` is the program's debug information."""
    # Wrap the operation in a program, because JAX can evaluate a program with any operation and any parameters.
    named = {var: value for var, value in zip(eqn.invars, given, strict=True) if not isinstance(var, core.Literal)}
    program = core.Jaxpr((), list(named), eqn.outvars, [eqn], eqn.effects, debug.with_unknown_names())
    return core.jaxpr_as_fun(core.ClosedJaxpr(program, []))(*named.values())


_REBUILT = (p.scan_p, p.remat_p, p.cond_p)
"""Operations with inner programs that are rebuilt with replaced layers."""


def _rebuilt(program: Any) -> Any:
    """Replace the layers in a program of a scan, a checkpoint or a conditional."""
    if isinstance(program, tuple):
        return tuple(map(_rebuilt, program))
    closed = program if isinstance(program, core.ClosedJaxpr) else core.ClosedJaxpr(program, [])
    make: Callable[..., Any] = jax.make_jaxpr(lambda *given: _evaluated(closed.jaxpr, closed.consts, given))
    made = make(*(jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in closed.in_avals))
    return made if isinstance(program, core.ClosedJaxpr) else made.jaxpr


def _iter_layers(jaxpr: Any, names: Sequence[str | None], inside: str | None = None) -> Iterator[Layer]:
    """Iterate over the layers of a program.

    Args:
      jaxpr: program to search.
      names: name of the parameter at each input; None if an input does not come from exactly one parameter.
      inside: reason why no layer of this program is replaced, if it lies within an operation that is left unchanged;
        otherwise None.
    """
    known = {var: name for var, name in zip(jaxpr.invars, names, strict=True) if name is not None}
    for eqn in jaxpr.eqns:
        given = [None if isinstance(var, core.Literal) else known.get(var) for var in eqn.invars]
        if _is_layer(eqn):
            conv = eqn.primitive is p.conv_general_dilated_p
            shape = f"{list(eqn.invars[0].aval.shape)}"
            name = (given[1] if conv else None) or str(eqn.source_info.name_stack) or f"of the input {shape}"
            yield Layer(name, "convolution" if conv else "pool", inside or _why_not(eqn))
        elif _holds_layer(eqn):
            opaque = eqn.primitive not in (p.jit_p, *_REBUILT)
            for inner in _inner(eqn):
                # The operands of a call are the inputs of its program, but a conditional's first operand is its index.
                more = given[len(given) - len(inner.invars) :] if len(inner.invars) <= len(given) else []
                more += [None] * (len(inner.invars) - len(more))
                yield from _iter_layers(inner, more, inside or (f"it is within a {eqn.primitive}" if opaque else None))
        of_params = {one for var, one in zip(eqn.invars, given, strict=True) if not isinstance(var, core.Literal)}
        if len(of_params) == 1 and None not in of_params:
            known.update(dict.fromkeys(eqn.outvars, of_params.pop()))
