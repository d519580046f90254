"""Speed of a CPU core, measured in a third of a second, and the time that clients' work takes on the core.

    seconds of b clients in one vectorized operation = P + b E / V + O c

P is the time of the products of b clients, each timed at its own shape (`products.seconds_of`). E is the number of
elements of element-wise operations, and O the number of operations, of ONE client (`count.Work`). The core's constants
V and c are measured by two small programs. Each part is multiplied by a share, which was fitted once to eight problems
(benchmarks/cost.py): element-wise operations are slower in a training step than in the small program, and some
operations are fused into others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array

from .count import Product, Work
from .products import best_seconds, seconds_of

_ELEMENTS = 2**16
_TINY = 8


class Parts(NamedTuple):
    """Seconds of each part of some work, or weights of the parts.

    Attributes:
      products: matrix products.
      elements: element-wise operations and reductions.
      operations: fixed time of every operation.
    """

    products: float
    elements: float
    operations: float


SHARES = Parts(products=0.84, elements=2.0, operations=0.66)
"""Weight of each part in a training step, relative to the small programs that measure the core."""


class Core(NamedTuple):
    """Speed of one CPU core in a client's training step.

    Attributes:
      elements: V, element-wise results per second.
      operation: c, fixed seconds per operation.
      products: function ``(products, clients, devices) -> seconds`` for the products of ``clients`` clients in one
        vectorized operation, with ``devices`` devices at work.
      shares: weights of the parts.
    """

    elements: float
    operation: float
    products: Callable[[Mapping[Product, float], int, int], float] = seconds_of
    shares: Parts = SHARES

    def parts(self, work: Work, clients: int = 1, devices: int = 1) -> Parts:
        """Return the unweighted seconds of each part, for several clients' equal work in one vectorized operation."""
        return Parts(
            self.products(work.products, clients, devices),
            clients * work.elements / self.elements,
            work.operations * self.operation,
        )

    def seconds(self, work: Work, clients: int = 1, devices: int = 1) -> float:
        """Return the time of several clients' equal work in one vectorized operation, with every device at work."""
        parts = self.parts(work, clients, devices)
        return sum(share * part for share, part in zip(self.shares, parts, strict=True))


@functools.cache
def this_core() -> Core:
    """Measure the speed of a core of this machine by two small programs, in a third of a second; cached."""
    x = jnp.ones((_ELEMENTS,), jnp.float32)
    element = _seconds(lambda _, x: jnp.maximum(x * 0.5 + 0.1, 0) - 0.2 * x, 500, (), x)
    tiny = _seconds(lambda a, x: jnp.roll(x, 1) @ a, 3000, jnp.eye(_TINY), jnp.ones((_TINY, _TINY)))
    return Core(5 * _ELEMENTS / element, tiny)


def _seconds(body: Callable[[Any, Array], Array], times: int, given: Any, start: Array) -> float:
    """Return the best time of one iteration of a loop on the first device."""

    @jax.jit
    def loop(given: Any, carry: Array) -> Array:
        return jax.lax.fori_loop(0, times, lambda _, carry: body(given, carry), carry)

    return best_seconds(lambda: loop(given, start), 5) / times
