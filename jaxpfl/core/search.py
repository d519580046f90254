"""Maximization of a smooth function of a few parameters, and bisection for a monotone condition.

Both functions are pure and have fixed shapes, so that they can be jitted, and vmapped over problems.

Reference: Nocedal and Wright 2006, "Numerical Optimization", section 3.4 (a modified Hessian).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array

_STEPS = 60  # maximum number of Newton steps
_HALVINGS = 60  # enough for float64, because 2^-60 is below its rounding unit
_LONGEST = 2.0  # norm to which a Newton step is shortened
_LEAST_CURVATURE = 1e-10


class _Place(NamedTuple):
    at: Array
    value: Array
    damping: Array
    moved: Array
    steps: Array


def climb(function: Callable[[Array], Array], starts: Array) -> tuple[Array, Array]:
    """Maximize a function by damped Newton steps from the best of several starts.

    No step lowers the function's value by more than rounding error.

    Args:
      function: twice differentiable function of P parameters, [P], with values []. If it is a log likelihood of
        clients, pass the mean over clients rather than the sum, so that rounding errors do not grow with the number of
        clients. Values that are not finite count as minus infinity.
      starts: S starting points, [S, P]. The parameters must be scaled so that a step of length 1 is neither tiny nor
        huge.

    Returns:
      The parameters [P] at the maximum, and the function's value there.
    """

    def value(at: Array) -> Array:
        found = function(at)
        return jnp.where(jnp.isfinite(found), found, -jnp.inf)

    slope = jax.jacfwd(function)  # forward mode stores no intermediate values and is cheap for a few parameters

    def slope_twice(at: Array) -> tuple[Array, Array]:
        found = slope(at)
        return found, found

    rounding = 4 * jnp.finfo(starts.dtype).eps
    tolerance = 2 * jnp.sqrt(rounding)

    def go_on(place: _Place) -> Array:
        return (place.moved > tolerance) & (place.steps < _STEPS)

    def step(place: _Place) -> _Place:
        hessian, gradient = jax.jacfwd(slope_twice, has_aux=True)(place.at)
        usable = jnp.isfinite(gradient).all() & jnp.isfinite(hessian).all()
        size, axes = jnp.linalg.eigh(jnp.where(usable, hessian, jnp.eye(len(gradient), dtype=hessian.dtype)))
        along = axes.T @ jnp.where(usable, gradient, 0)
        # Absolute eigenvalues give an ascent direction even where the function is convex. The lower limit on them
        # avoids a division by zero where the function is flat.
        move = axes @ (along / (jnp.maximum(jnp.abs(size), _LEAST_CURVATURE) + place.damping))
        length = jnp.linalg.norm(move)
        move = move * jnp.minimum(1, _LONGEST / jnp.where(length > 0, length, 1))
        new = value(place.at + move)
        # If the predicted increase is smaller than the rounding error, a decrease by at most this error does not reject
        # the step.
        hidden = rounding * (1 + jnp.abs(place.value))
        better = new >= place.value - jnp.where(gradient @ move <= hidden, hidden, 0)
        return _Place(
            jnp.where(better, place.at + move, place.at),
            jnp.where(better, new, place.value),
            jnp.where(better, place.damping / 10, 10 * place.damping + jnp.abs(size).max() / 100),
            jnp.where(better, jnp.linalg.norm(move), jnp.minimum(place.moved, jnp.linalg.norm(move))),
            place.steps + 1,
        )

    values = jax.lax.map(value, starts)
    best = jnp.argmax(values)
    zero = jnp.zeros((), starts.dtype)
    begin = _Place(starts[best], values[best], zero, zero + jnp.inf, jnp.zeros((), jnp.int32))
    end = jax.lax.while_loop(go_on, step, begin)
    return end.at, end.value


def bisect(below: Callable[[Array], Array], low: Array, high: Array, halvings: int = _HALVINGS) -> Array:
    """Find the point between low and high where ``below`` turns from true to false, by ``halvings`` bisections.

    The error is at most (high - low) / 2^halvings.
    """
    low, high = jnp.broadcast_arrays(low, high)

    def halve(_: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        middle = (at[0] + at[1]) / 2
        up = below(middle)
        return jnp.where(up, middle, at[0]), jnp.where(up, at[1], middle)

    low, high = jax.lax.fori_loop(0, halvings, halve, (low, high))
    return (low + high) / 2
