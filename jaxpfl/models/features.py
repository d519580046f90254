"""Features of a model (the inputs of its head), found by tracing `Model.apply`.

The traced program is cut where the parameters of the head (`Model.head`) are first combined with the data. Models from
every library can be cut if their head reads a single array from the body (see `halves`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives as p
from jax.interpreters.partial_eval import dce_jaxpr

from jaxpfl.core import trees
from jaxpfl.core.types import Array, Key, PyTree
from jaxpfl.models import rewriting
from jaxpfl.models.base import Task
from jaxpfl.support.errors import JaxpflError

_BODY, _HEAD, _DATA = frozenset[str](), frozenset(["head"]), frozenset(["data"])
"""Kinds of variables by what they depend on: nothing but the body's parameters, the head's parameters, or data."""


class Halves(NamedTuple):
    """A model as two functions, ``apply(params, x) = head(params, features(params, x))``.

    Attributes:
      features: function ``(params, x, key=None, train=False) -> [N, width]`` that computes N examples' features; it
        reads only the body's parameters.
      head: function ``(params, features [N, width]) -> predictions [N, K]`` of K classes; it reads only the head's
        parameters.
      width: number of features of an example.
    """

    features: Callable[..., Array]
    head: Callable[[PyTree, Array], Array]
    width: int


class _Cut(NamedTuple):
    """A model's program as a flat list of operations, and the variable of this program that holds the features."""

    jaxpr: Any
    consts: Sequence[Any]
    at: Any


def halves(method: str, task: Task) -> Halves:
    """Split the task's model into its body and its head.

    Args:
      method: name of the method, for errors.
      task: task whose model names its head.

    Raises:
      JaxpflError: if the task has a prediction at each position, if the model has no head or no body, or if the head's
        input is not a single array from the body with one row per example.
    """
    if task.counted is not None:
        raise JaxpflError(
            f"{method} requires a task with one prediction per example, got {task.kind!r}, with one per position"
        )
    params = jax.eval_shape(task.init, jax.random.key(0))
    # Trace with two batch sizes, to find the axis of the examples: its length depends on the batch size.
    few, more = (_cut(method, task, params, _inputs(task, n), None, False).at.aval.shape for n in (2, 3))
    axes = [axis for axis, (a, b) in enumerate(zip(few, more, strict=True)) if (a, b) == (2, 3)]
    if len(axes) != 1:
        raise JaxpflError(
            f"{method} requires a head that reads one row per example, got one that reads the shape {few}"
        )
    (axis,) = axes
    shape = few[:axis] + few[axis + 1 :]

    def features(params: PyTree, x: PyTree, key: Key | None = None, train: bool = False) -> Array:
        cut = _cut(method, task, params, x, key, train)
        found = _between(cut, cut.jaxpr.invars, cut.at, jax.tree.leaves((params, x, key)))
        rows = jnp.moveaxis(found, axis, 0).reshape(found.shape[axis], -1)
        return rows.astype(jnp.result_type(rows, *jax.tree.leaves(params)))  # undoes half precision

    def head(params: PyTree, rows: Array) -> Array:
        cut = _cut(method, task, params, _inputs(task, len(rows)), None, False)
        own = jax.tree.leaves(params)
        read = jnp.moveaxis(rows.reshape(-1, *shape), 0, axis).astype(cut.at.aval.dtype)
        return _between(cut, [*cut.jaxpr.invars[: len(own)], cut.at], cut.jaxpr.outvars[0], [*own, read])

    return Halves(features, head, math.prod(shape))


def _inputs(task: Task, n: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((n, *task.input_shape), task.input_dtype or jnp.result_type(float))


def _cut(method: str, task: Task, params: PyTree, x: PyTree, key: Any, train: bool) -> _Cut:
    """Trace the program for a batch, and find where the head begins."""
    is_head = task.model.head
    if is_head is None:
        raise JaxpflError(f"{method} requires a model that names its head, got one without Model.head")
    numbered = jax.tree.unflatten(jax.tree.structure(params), range(len(jax.tree.leaves(params))))
    own, rest = map(jax.tree.leaves, trees.split_by_path(numbered, is_head))
    if not rest:
        raise JaxpflError(f"{method} requires a model with a body, got one whose head is the whole model")
    flat = _traced(task, params, x, key, train)
    inputs = flat.jaxpr.invars
    kinds = dict.fromkeys(inputs, _DATA) | {inputs[i]: _BODY for i in rest} | {inputs[i]: _HEAD for i in own}
    read = _read_with_data(flat.jaxpr, kinds)
    if len(read) != 1 or read[0] in inputs:
        what = "nothing of it" if not read else "the inputs" if len(read) == 1 else f"{len(read)} arrays"
        raise JaxpflError(f"{method} requires a head that reads one array of the body, got one that reads {what}")
    return _Cut(flat.jaxpr, flat.consts, read[0])


def _read_with_data(jaxpr: Any, kinds: dict[Any, frozenset[str]]) -> list[Any]:
    """Return the variables that depend on data but not on the head, and that the head's first operations read."""
    read: dict[Any, None] = {}
    for eqn in jaxpr.eqns:
        operands = [var for var in eqn.invars if not isinstance(var, core.Literal)]
        kind = frozenset().union(*(kinds.get(var, _BODY) for var in operands))
        if kind == _HEAD | _DATA:
            read.update(dict.fromkeys(var for var in operands if kinds.get(var) == _DATA))
        kinds.update(dict.fromkeys(eqn.outvars, kind))
    return list(read)


def _traced(task: Task, params: PyTree, x: PyTree, key: Any, train: bool) -> Any:
    """Trace the program for a batch, with all called programs inlined."""
    leaves, structure = jax.tree.flatten((params, x, key))

    def applied(*leaves: Any) -> Array:
        params, x, key = jax.tree.unflatten(structure, leaves)
        return task.model.apply(params, x, key=key, train=train)

    calling = jax.make_jaxpr(applied)(*leaves)
    without: Callable[..., Any] = lambda *leaves: _without_calls(calling.jaxpr, calling.consts, leaves)  # noqa: E731
    return jax.make_jaxpr(without)(*leaves)


def _without_calls(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Evaluate a program, with the operations of called programs inlined."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))
    for eqn in jaxpr.eqns:
        given = [var.val if isinstance(var, core.Literal) else values[var] for var in eqn.invars]
        if eqn.primitive is p.jit_p:
            results = _without_calls(eqn.params["jaxpr"].jaxpr, eqn.params["jaxpr"].consts, given)
        else:
            results = rewriting.alone(eqn, given, jaxpr.debug_info)
        values.update(zip(eqn.outvars, results, strict=True))
    return [var.val if isinstance(var, core.Literal) else values[var] for var in jaxpr.outvars]


def _between(cut: _Cut, known: Sequence[Any], wanted: Any, values: Sequence[Any]) -> Array:
    """Compute one variable of the program from others, using only the operations between them."""
    jaxpr = cut.jaxpr
    eqns = [eqn for eqn in jaxpr.eqns if not set(known).intersection(eqn.outvars)]
    inputs, debug = [*jaxpr.constvars, *known], jaxpr.debug_info.with_unknown_names()
    program, used = dce_jaxpr(core.Jaxpr((), inputs, [wanted], eqns, jaxpr.effects, debug), [True])
    given = [value for value, needed in zip([*cut.consts, *values], used, strict=True) if needed]
    return core.jaxpr_as_fun(core.ClosedJaxpr(program, []))(*given)[0]
