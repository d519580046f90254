"""Arithmetic that keeps its digits: products in the precision of their operands, and compensated sums of many trees."""

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
"""Largest rounding error of a value, relative to the range of a client's values."""


def users_own() -> bool:
    """True if the user has set JAX's matmul precision to another value than `products` does; it is then kept."""
    # Inside `products` the setting has the value that `products` gave it.
    return jax.config.jax_default_matmul_precision not in (None, _FULL)  # pyright: ignore[reportAttributeAccessIssue]


def products(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Function whose products are traced in float32, or float64, where their operands are.

    By default JAX rounds the operands of a product of float32 to 10 bits of mantissa on recent GPUs (tf32) and to 7 on
    TPUs (bfloat16): a sum of squares is then off by one in 1000. On a CPU nothing changes. A setting of
    ``jax_default_matmul_precision`` of the user's own is kept.

    Args:
      function: function of arrays, not yet jitted; ``jit`` goes outside.
    """

    @functools.wraps(function)
    def traced(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with nullcontext() if users_own() else jax.default_matmul_precision(_FULL):
            return function(*args, **kwargs)

    return traced


def jit(function: Callable[..., Any], **options: Any) -> jax.stages.Wrapped:
    """`jax.jit` of ``products(function)``, with the same options."""
    return jax.jit(products(function), **options)


class RunningSum(NamedTuple):
    r"""Sum of the trees so far, accurate to one rounding of it however many they are.

    Each addition's rounding error is computed and subtracted from the next term (Kahan 1965), which leaves a relative
    error of :math:`2 u + O(n u^2)` of n terms of one sign, u the unit roundoff; plain addition in a loop has up to
    :math:`n u`, six per cent of a million float32 terms. Integers and Booleans are added as they are.

    Attributes:
      total: the sum.
      excess: amount by which each floating-point leaf of ``total`` is too large, in the order of its leaves.

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
        """The empty sum of trees with these shapes and types."""
        total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        return cls(total, tuple(jnp.zeros_like(leaf) for leaf in jax.tree.leaves(total) if _rounds(leaf)))

    def plus(self, tree: PyTree) -> Self:
        """The sum with one more tree."""
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
    """Refuse values whose rounding error in JAX's floating-point type is not small relative to their range.

    Args:
      largest: the largest absolute value, for each entry of a sample.
      spread: the range of a client's values, shaped as ``largest``; zero is never refused.

    Raises:
      JaxpflError.
    """
    kind = jnp.result_type(float)
    for size, differ in zip(np.ravel(largest), np.ravel(spread), strict=True):
        if float(jnp.finfo(kind).eps) * size > _ROUNDING * differ > 0:
            more = ", or work in double precision (JAX_ENABLE_X64=true in the environment)" * (kind == jnp.float32)
            raise JaxpflError(
                f"values of up to {size:.4g} that differ by {differ:.4g} lose their digits in {kind}: take a common "
                f"center off{more}"
            )
