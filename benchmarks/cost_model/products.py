"""Seconds of matrix products on this machine's CPU, each timed at its own shape.

A single rate for all products would be wrong by a factor of up to five. Many clients' small products use a different
kernel than one client's large products, and both kernels waste part of a core at the edges of the matrices.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpfl.core.types import Array

from .count import Product

DEAREST = 16
"""Number of shapes that are timed; the other products are assumed to run at the mean rate of these shapes."""

_SECONDS, _GUESS = 2e-3, 2e10  # seconds of a timing; assumed FLOP/s, from which repetitions follow
_LARGEST = 2**24  # numbers in a factor; of a larger batch of products, only a part is timed


def seconds_of(products: Mapping[Product, float], clients: int = 1, devices: int = 1) -> float:
    """Return the time of the products of several clients, with every device at work.

    Args:
      products: products of one client -> number of times that each runs.
      clients: number of clients in one vectorized operation.
      devices: number of devices that run the same products at once.
    """
    order = sorted(products, key=lambda product: -product.flops * products[product])
    timed = {p: products[p] * _once(p._replace(batch=p.batch * clients), devices) for p in order[:DEAREST]}
    flops = sum(p.flops * products[p] for p in timed)
    rest = sum(p.flops * products[p] for p in order[DEAREST:])
    return sum(timed.values()) * (1 + rest / flops) if flops else 0.0


@functools.lru_cache(maxsize=512)
def _once(product: Product, devices: int) -> float:
    """Return the best time of one product that every device runs at once."""
    batch, m, k, n, left, right = product
    part = max(1, min(batch, _LARGEST // max(m * k, k * n, m * n, 1)))
    times = int(min(1000, max(2, _SECONDS / (part * 2 * m * k * n / _GUESS + 2e-6))))
    shape = (part,) if batch > 1 else ()

    def body(_: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        # The barriers make each product depend on the previous one, so that none is removed or moved out of the loop.
        a, b, last = jax.lax.optimization_barrier(carry)
        product = jax.lax.optimization_barrier((a.mT if left else a) @ (b.mT if right else b))
        return a, b, last + product.ravel()[-1:]

    mesh = jax.make_mesh((devices,), ("clients",))
    spec = PartitionSpec("clients")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    def loop(a: Array, b: Array) -> Array:
        return jax.lax.fori_loop(0, times, body, (a[0], b[0], a.ravel()[:1]))[-1]

    place = jax.sharding.NamedSharding(mesh, spec)
    make = functools.partial(jax.jit, static_argnums=0, out_shardings=place)(lambda s: jnp.full(s, 1e-3, jnp.float32))
    a = make((devices, *shape, *((k, m) if left else (m, k))))
    b = make((devices, *shape, *((n, k) if right else (k, n))))
    return best_seconds(lambda: loop(a, b), 9) / times * batch / part


def best_seconds(run: Callable[[], Array], repetitions: int) -> float:
    """Return the shortest time of a call, after a first call that may compile."""
    run().block_until_ready()
    found = []
    for _ in range(repetitions):
        began = time.perf_counter()
        run().block_until_ready()
        found.append(time.perf_counter() - began)
    return min(found)
