"""Accurate arithmetic: matrix products in the precision of their operands, and compensated sums of many pytrees."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core.types import Array, PyTree
from jaxpfl.support.errors import JaxpflError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_FULL = "float32"
_ROUNDING = 1e-3
"""Largest rounding error that `check_digits` accepts, relative to the variation of the values."""


def users_own() -> bool:
    """True if the user has set JAX's matmul precision to a value other than the value that `products` sets."""
    # The value that `products` sets does not count, because an enclosing `products` may have set it.
    return jax.config.jax_default_matmul_precision not in (None, _FULL)  # pyright: ignore[reportAttributeAccessIssue]


def products(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a function so that its matrix products use the full precision of float32 and float64 operands.

    By default JAX rounds the operands of a float32 product to 10 bits of mantissa on recent GPUs (tf32) and to 7 bits
    on TPUs (bfloat16). The relative error of a square is then up to 0.1 % (tf32) or 0.8 % (bfloat16). On a CPU, the
    wrapper has no effect. If the user has set ``jax_default_matmul_precision``, that value is kept.

    Args:
      function: function of arrays that is not yet jitted; apply ``jit`` to the wrapped function.
    """

    @functools.wraps(function)
    def traced(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with nullcontext() if users_own() else jax.default_matmul_precision(_FULL):
            return function(*args, **kwargs)

    return traced


def jit(function: Callable[..., Any], **options: Any) -> jax.stages.Wrapped:
    """`jax.jit` of ``products(function)``; ``options`` are arguments of `jax.jit`."""
    return jax.jit(products(function), **options)


class RunningSum(NamedTuple):
    r"""Compensated sum of pytrees, whose rounding error hardly grows with the number of terms.

    Each addition's rounding error is computed and subtracted from the next term (Kahan 1965). For n terms of the same
    sign and unit roundoff u, the relative error is :math:`2 u + O(n u^2)`. Plain addition in a loop has a relative
    error of up to :math:`n u`, which is six per cent for a million float32 terms. Integer and Boolean leaves are added
    without correction.

    Attributes:
      total: the sum.
      excess: for each floating-point leaf of ``total`` in order, the amount by which the leaf is too large.

    Examples:
      >>> terms = jnp.full(100_000, 0.1)
      >>> add = lambda i, sums: sums.plus(terms[i])
      >>> float(jax.lax.fori_loop(0, 100_000, add, RunningSum.zero(terms[0])).total)
      10000.0
    """

    total: PyTree
    excess: tuple[Array, ...]

    @classmethod
    def zero(cls, like: PyTree) -> Self:
        """Return a sum of zero for trees with the shapes and dtypes of ``like``."""
        total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        return cls(total, tuple(jnp.zeros_like(leaf) for leaf in jax.tree.leaves(total) if _rounds(leaf)))

    def plus(self, tree: PyTree) -> Self:
        """Return the sum after adding a tree."""
        leaves, structure = jax.tree.flatten(self.total)
        totals, excess = [], iter(self.excess)
        left = []
        for total, term in zip(leaves, jax.tree.leaves(tree), strict=True):
            if not _rounds(total):
                totals.append(total + term)
                continue
            corrected = term - next(excess)
            new = total + corrected
            over = (new - total) - corrected
            totals.append(new)
            left.append(jnp.where(jnp.isfinite(over), over, 0))  # an infinite sum stays infinite
        return type(self)(jax.tree.unflatten(structure, totals), tuple(left))


def _rounds(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def check_digits(largest: np.ndarray | float, spread: np.ndarray | float) -> None:
    """Refuse values whose rounding error in JAX's default float type is not small relative to their variation.

    Args:
      largest: largest absolute value, one for each coordinate of the data.
      spread: variation of the values, such as their range, with the shape of ``largest``. A coordinate with zero
        variation is never refused.

    Raises:
      JaxpflError: if a coordinate's rounding error exceeds a thousandth of its variation.
    """
    kind = jnp.result_type(float)
    for size, differ in zip(np.ravel(largest), np.ravel(spread), strict=True):
        if float(jnp.finfo(kind).eps) * size > _ROUNDING * differ > 0:
            more = ", or work in double precision (JAX_ENABLE_X64=true in the environment)" * (kind == jnp.float32)
            raise JaxpflError(
                f"values of up to {size:.4g} that differ by {differ:.4g} lose their digits in {kind}: subtract a "
                f"common center{more}"
            )
