"""Products of arrays in the precision of their operands, which on an accelerator JAX's default is not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

import jax

_P = ParamSpec("_P")
_R = TypeVar("_R")
_FULL = "float32"


def users_own() -> bool:
    """True if the user has set JAX's precision of products to another than that of `products`, which is then kept."""
    # That of `products` itself is seen here inside of it.
    return jax.config.jax_default_matmul_precision not in (None, _FULL)  # pyright: ignore[reportAttributeAccessIssue]


def products(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Function whose products are traced in float32, or float64, where their operands are.

    By default JAX rounds the operands of a product of float32 to 10 bits of mantissa on recent GPUs (tf32) and to 7 on
    TPUs (bfloat16): a sum of squares is then off by one in 1000. On a CPU nothing changes. A setting of
    ``jax_default_matmul_precision`` of the user's own is kept.

    Args:
      function: of arrays; ``jit`` goes outside.
    """

    @functools.wraps(function)
    def traced(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with nullcontext() if users_own() else jax.default_matmul_precision(_FULL):
            return function(*args, **kwargs)

    return traced


def jit(function: Callable[..., Any], **options: Any) -> jax.stages.Wrapped:
    """`jax.jit` of a function, its products as those of `products`; with the same options."""
    return jax.jit(products(function), **options)
