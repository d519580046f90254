"""Speed of a CPU core, measured in a moment, and the time of a client's work on it.

    seconds of b clients in one vectorized operation = P + b E / V + O c

with P the seconds of b clients' products, each timed at its own shape (`products.seconds_of`), E the elements of
element-wise operations and O the operations of ONE client (`count.Work`). V and c are this core's, from two small
programs. Each part is weighed by a share fitted once to eight problems (benchmarks/cost.py): the element-wise
operations of a training step are dearer than the probe's, and some of its operations are fused into others.
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
    """Seconds of each part of some work, or their weights.

    Attributes:
      products: of the matrix products.
      elements: of element-wise operations and reductions.
      operations: that every operation takes beside.
    """

    products: float
    elements: float
    operations: float


SHARES = Parts(products=0.84, elements=2.0, operations=0.66)
"""Weight of each part in a training step, beside the probes'."""


class Core(NamedTuple):
    """Speed of one CPU core in a client's training step.

    Attributes:
      elements: V, element-wise results a second.
      operation: c, seconds that each operation takes beside.
      products: seconds of a client's products, given the clients in one vectorized operation and the devices at work.
      shares: weights of the parts.
    """

    elements: float
    operation: float
    products: Callable[[Mapping[Product, float], int, int], float] = seconds_of
    shares: Parts = SHARES

    def parts(self, work: Work, clients: int = 1, devices: int = 1) -> Parts:
        """Seconds of each part of the same work of so many clients in one vectorized operation, unweighted."""
        return Parts(
            self.products(work.products, clients, devices),
            clients * work.elements / self.elements,
            work.operations * self.operation,
        )

    def seconds(self, work: Work, clients: int = 1, devices: int = 1) -> float:
        """Time of the same work of so many clients in one vectorized operation, with every device at work."""
        parts = self.parts(work, clients, devices)
        return sum(share * part for share, part in zip(self.shares, parts, strict=True))


@functools.cache
def this_core() -> Core:
    """Speed of a core of this machine, from two small programs that take a third of a second, once in a process."""
    x = jnp.ones((_ELEMENTS,), jnp.float32)
    element = _seconds(lambda _, x: jnp.maximum(x * 0.5 + 0.1, 0) - 0.2 * x, 500, (), x)
    tiny = _seconds(lambda a, x: jnp.roll(x, 1) @ a, 3000, jnp.eye(_TINY), jnp.ones((_TINY, _TINY)))
    return Core(5 * _ELEMENTS / element, tiny)


def _seconds(body: Callable[[Any, Array], Array], times: int, given: Any, start: Array) -> float:
    """Best time of one pass of a loop, on the first device."""

    @jax.jit
    def loop(given: Any, carry: Array) -> Array:
        return jax.lax.fori_loop(0, times, lambda _, carry: body(given, carry), carry)

    return best_seconds(lambda: loop(given, start), 5) / times
