"""Seconds of matrix products on this machine's CPU, each timed at its own shape.

One rate for all products misleads by up to five: small ones of many clients are computed by another kernel than large
ones of a client alone, and both waste part of a core at their edges.
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
"""Shapes that are timed; the others are taken to run at these ones' mean rate."""

_SECONDS, _GUESS = 2e-3, 2e10  # of one timing; floating-point operations a second, to choose how often to repeat
_LARGEST = 2**24  # numbers in a factor; a larger batch of products is timed in part


def seconds_of(products: Mapping[Product, float], clients: int = 1, devices: int = 1) -> float:
    """Time of so many clients' products, with every device at work.

    Args:
      products: of one client, with the times that each runs.
      clients: in one vectorized operation.
      devices: that run the same at once.
    """
    order = sorted(products, key=lambda product: -product.flops * products[product])
    timed = {p: products[p] * _once(p._replace(batch=p.batch * clients), devices) for p in order[:DEAREST]}
    flops = sum(p.flops * products[p] for p in timed)
    rest = sum(p.flops * products[p] for p in order[DEAREST:])
    return sum(timed.values()) * (1 + rest / flops) if flops else 0.0


@functools.lru_cache(maxsize=512)
def _once(product: Product, devices: int) -> float:
    """Best time of one such product on each device at once."""
    batch, m, k, n, left, right = product
    part = max(1, min(batch, _LARGEST // max(m * k, k * n, m * n, 1)))
    times = int(min(1000, max(2, _SECONDS / (part * 2 * m * k * n / _GUESS + 2e-6))))
    shape = (part,) if batch > 1 else ()

    def body(_: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        # The barriers tie each product to the one before, so that none is left out or moved out of the loop.
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
    """Least time of a call, after a first one that may compile."""
    run().block_until_ready()
    found = []
    for _ in range(repetitions):
        began = time.perf_counter()
        run().block_until_ready()
        found.append(time.perf_counter() - began)
    return min(found)
