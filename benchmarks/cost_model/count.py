"""Operations and bytes of a function, counted in its traced program.

The body of a loop counts as often as it runs, and a conditional counts as its most expensive branch. A loop of unknown
length is assumed to run ``trips`` times, and is counted in `Work.unknown_loops`. XLA's own ``cost_analysis``, in
contrast, counts the body of every loop once.
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
"""Operations that XLA fuses into the operations that read their results."""

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
"""Operations that copy data: their results are written to memory and read again."""


class Product(NamedTuple):
    """A matrix product, or a batch of matrix products [batch] x ([m, k] @ [k, n]).

    Attributes:
      batch, m, k, n: sizes.
      left: whether the left factor is stored transposed, [k, m].
      right: whether the right factor is stored transposed, [n, k].
    """

    batch: int
    m: int
    k: int
    n: int
    left: bool = False
    right: bool = False

    @property
    def flops(self) -> int:
        """Number of floating-point operations; a multiplication and an addition count as two."""
        return 2 * self.batch * self.m * self.k * self.n


class Work(NamedTuple):
    """Work of a function.

    Attributes:
      products: matrix products, and convolutions as products with patches -> number of times that each runs.
      elements: number of elements computed by element-wise operations and reductions.
      moved: number of bytes that copies write.
      operations: number of operations; each is a kernel or part of a kernel.
      unknown_loops: number of loops whose length is known only at run time.
    """

    products: Mapping[Product, float] = MappingProxyType({})
    elements: float = 0
    moved: float = 0
    operations: float = 0
    unknown_loops: int = 0

    @property
    def flops(self) -> float:
        """Number of floating-point operations in the products."""
        return sum(product.flops * times for product, times in self.products.items())

    def plus(self, other: Work, times: float = 1) -> Work:
        """Return the sum of this work and ``times`` times ``other``."""
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
    """Count the work of a function for arguments of these shapes; nothing is computed.

    Args:
      function: pure function.
      arguments: arrays, or their shapes.
      trips: assumed number of iterations of a loop of unknown length.

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
    """Yield the operations of a program and of its inner programs, each with the number of times that it runs.

    A `while` loop is also yielded itself. Operations that no wanted output depends on are left out, because XLA removes
    them too (for example, the gradient of the first layer's input).

    Args:
      jaxpr: program.
      times: number of times that the program runs.
      trips: assumed number of iterations of a loop of unknown length.
      wanted: whether each output is used; by default, all are.
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
    """Return the number of floating-point operations of a product or a convolution; zero for other operations."""
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
    """Return the program inside an operation that runs it once; for a custom rule, the function itself."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        if params.get(name) is not None:
            return getattr(params[name], "jaxpr", params[name])
    return None


def _product(eqn: jex.JaxprEqn) -> Product | None:
    """Return an operation's matrix product (in a convolution, kernel times patches); None for other operations."""
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
    """Return whether a factor's first dimension after the batch dimensions is one that the product sums over."""
    return next((i in contract for i in range(ndim) if i not in batched), True)


def _shape(var: Any) -> tuple[int, ...]:
    return getattr(var.aval, "shape", ())


def _bytes(aval: Any) -> int:
    shape = getattr(aval, "shape", ())
    itemsize = aval.dtype.itemsize if isinstance(getattr(aval, "dtype", None), np.dtype) else 8
    return math.prod(shape) * itemsize
