"""Operations and bytes of a function, counted in its traced program.

A loop counts as often as it runs, and a choice as its dearest branch. A loop of unknown length is taken to run
``trips`` times and is said (`Work.unknown_loops`). XLA's own ``cost_analysis`` counts the body of every loop once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import numpy as np

_FREE = frozenset(
    [
        "broadcast_in_dim",
        "reshape",
        "squeeze",
        "expand_dims",
        "stop_gradient",
        "copy_p",
        "pvary",
        "create_token",
        "random_wrap",
        "random_unwrap",
        "bitcast_convert_type",
        "iota",
        "sharding_constraint",
        "mesh_cast",
        "optimization_barrier",
    ]
)
"""Operations that XLA makes part of those that read them."""

_MOVES = frozenset(
    [
        "concatenate",
        "transpose",
        "slice",
        "dynamic_slice",
        "dynamic_update_slice",
        "gather",
        "scatter",
        "scatter-add",
        "pad",
        "rev",
        "copy",
        "sort",
        "top_k",
        "cumsum",
        "select_and_scatter_add",
    ]
)
"""Operations that copy: their results are written and read again."""


class Product(NamedTuple):
    """A matrix product, or a batch of them: [batch] x ([m, k] @ [k, n]).

    Attributes:
      batch, m, k, n: sizes.
      left: whether the left factor lies transposed in memory, [k, m].
      right: whether the right factor does, [n, k].
    """

    batch: int
    m: int
    k: int
    n: int
    left: bool = False
    right: bool = False

    @property
    def flops(self) -> int:
        """Floating-point operations; a multiplication and an addition are two."""
        return 2 * self.batch * self.m * self.k * self.n


class Work(NamedTuple):
    """Work of a function.

    Attributes:
      products: matrix products and convolutions (as products of patches), with the times that each runs.
      elements: results of element-wise operations and reductions, in elements.
      moved: bytes that copies write.
      operations: operations that run, each of them a kernel or a part of one.
      unknown_loops: loops whose length is a value of the program.
    """

    products: Mapping[Product, float] = MappingProxyType({})
    elements: float = 0
    moved: float = 0
    operations: float = 0
    unknown_loops: int = 0

    @property
    def flops(self) -> float:
        """Floating-point operations of the products."""
        return sum(product.flops * times for product, times in self.products.items())

    def plus(self, other: Work, times: float = 1) -> Work:
        """The sum with so many times other work."""
        products = dict(self.products)
        for product, count in other.products.items():
            products[product] = products.get(product, 0) + times * count
        return Work(
            products,
            self.elements + times * other.elements,
            self.moved + times * other.moved,
            self.operations + times * other.operations,
            self.unknown_loops + other.unknown_loops,
        )


def work_of(function: Callable[..., Any], *arguments: Any, trips: float = 1) -> Work:
    """Work of a function of arguments of these shapes; nothing is computed.

    Args:
      function: a pure function.
      arguments: arrays, or their shapes.
      trips: times that a loop of unknown length runs.

    Examples:
      >>> one = jax.ShapeDtypeStruct((8, 8), "float32")
      >>> work_of(lambda a: a @ a, one).flops
      1024
    """
    total = Work()
    for eqn, times in equations(jax.make_jaxpr(function)(*arguments).jaxpr, trips=trips):
        total = total.plus(_work(eqn), times)
    return total


def equations(
    jaxpr: jex.Jaxpr, *, times: float = 1, trips: float = 1, wanted: Sequence[bool] | None = None
) -> Iterator[tuple[jex.JaxprEqn, float]]:
    """Operations of a program and of those within it, with the times that each runs; a `while` also as itself.

    What is behind no wanted output is left out, as XLA leaves it out (the first layer's input's gradient, say).

    Args:
      jaxpr: the program.
      times: it runs.
      trips: times that a loop of unknown length runs.
      wanted: for each output; all by default.
    """
    outs = jaxpr.outvars if wanted is None else [v for v, w in zip(jaxpr.outvars, wanted, strict=True) if w]
    live = {v for v in outs if isinstance(v, jex.Var)}
    for eqn in reversed(jaxpr.eqns):
        used = [v in live for v in eqn.outvars]
        if any(used) or eqn.effects:
            live |= {v for v in eqn.invars if isinstance(v, jex.Var)}
            yield from _within(eqn, used, times, trips)


def _within(
    eqn: jex.JaxprEqn, used: Sequence[bool], times: float, trips: float
) -> Iterator[tuple[jex.JaxprEqn, float]]:
    name, params = eqn.primitive.name, eqn.params
    inner = _inner(params)
    if name == "scan":
        yield from equations(params["jaxpr"].jaxpr, times=times * params["length"], trips=trips)
    elif name == "while":
        yield eqn, times
        yield from equations(params["body_jaxpr"].jaxpr, times=times * trips, trips=trips)
    elif name == "cond":
        branches = [list(equations(one.jaxpr, times=times, trips=trips, wanted=used)) for one in params["branches"]]
        yield from max(branches, key=lambda found: sum(flops(eqn) * times for eqn, times in found))
    elif inner is not None:
        yield from equations(inner, times=times, trips=trips, wanted=used)
    else:
        yield eqn, times


def flops(eqn: jex.JaxprEqn) -> int:
    """Floating-point operations of a product or a convolution; zero for anything else."""
    product = _product(eqn)
    return 0 if product is None else product.flops


def _work(eqn: jex.JaxprEqn) -> Work:
    name, product = eqn.primitive.name, _product(eqn)
    if product is not None:
        return Work({product: 1}, operations=1)
    if name == "while":
        return Work(unknown_loops=1)
    if name in _FREE:
        return Work()
    if name in _MOVES:
        return Work(moved=float(sum(_bytes(v.aval) for v in eqn.outvars)), operations=1)
    reduces = name.startswith("reduce") or name in ("argmax", "argmin")
    elements = sum(math.prod(_shape(v)) for v in (eqn.invars if reduces else eqn.outvars))
    return Work(elements=float(elements), operations=1)


def _inner(params: dict[str, Any]) -> jex.Jaxpr | None:
    """Program within an operation that runs it once; of a custom derivative or batching, the function and no rule."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        if params.get(name) is not None:
            return getattr(params[name], "jaxpr", params[name])
    return None


def _product(eqn: jex.JaxprEqn) -> Product | None:
    """The product that an operation is, a convolution as that of its kernel with its patches; None for others."""
    params = eqn.params
    if eqn.primitive.name == "dot_general":
        contract, batched = params["dimension_numbers"]
        left, right = (_shape(v) for v in eqn.invars[:2])
        batch = math.prod(left[i] for i in batched[0])
        k = math.prod(left[i] for i in contract[0])
        m, n = (math.prod(shape) // max(batch * k, 1) for shape in (left, right))
        first = [_first_is_summed(len(s), c, b) for s, c, b in zip((left, right), contract, batched, strict=True)]
        return Product(batch, m, k, n, first[0] and m > 1, not first[1] and n > 1)
    if eqn.primitive.name == "conv_general_dilated":
        kernel, out = _shape(eqn.invars[1]), _shape(eqn.outvars[0])
        spec, groups = params["dimension_numbers"], params["feature_group_count"] * params["batch_group_count"]
        features, places = kernel[spec.rhs_spec[0]], math.prod(out) // out[spec.out_spec[1]]
        return Product(groups, max(features // groups, 1), math.prod(kernel) // features, places)
    return None


def _first_is_summed(ndim: int, contract: Sequence[int], batched: Sequence[int]) -> bool:
    """True where a factor's first dimension beside the batch is one that the product sums over."""
    return next((i in contract for i in range(ndim) if i not in batched), True)


def _shape(var: Any) -> tuple[int, ...]:
    return getattr(var.aval, "shape", ())


def _bytes(aval: Any) -> int:
    shape = getattr(aval, "shape", ())
    itemsize = aval.dtype.itemsize if isinstance(getattr(aval, "dtype", None), np.dtype) else 8
    return math.prod(shape) * itemsize
