"""Rounding errors of float32 sums over a million clients, relative to float64.

    python -m benchmarks sums

Each client contributes a row of eight numbers, which are all 0.1 or log-normal (sigma 2). The rows are added as the
engine adds uploads and metrics (one client at a time, in blocks of 128, or all at once, on one device and on all
devices), and as estimators do (a mean, and a mean with client weights). ``plain loop`` adds one row after the other
without compensation. The results are the largest relative error of the eight sums, and the milliseconds of one sum.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, once
from .problems import use_devices
from .record import command, parser, positive, table, target, write

COLUMNS = 8
ASKED = target(1e-6, 2e-7)  # maximum relative error, except for the plain loop
PLAIN = "plain loop"


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("sums", __doc__, repetitions=5)
    options.add_argument("--clients", type=positive, default=1_000_000, metavar="M")
    args = options.parse_args(argv)
    clients, repetitions = (10_000, 1) if args.quick else (args.clients, args.repetitions)
    settings = {"clients": clients, "repetitions": repetitions}
    results = once(Job("sums", settings))
    for kind, found in results.items():
        rows = [
            (name, row["error"], row["milliseconds"], *((None, None) if name == PLAIN else ASKED.values()))
            for name, row in found.items()
        ]
        table(f"{clients:,} clients, {kind}", ("", "error", "ms", "floor", "aim"), rows)
    write(args.json, "sums", settings, results, asked=ASKED)


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the error and time of every sum, for each kind of values."""
    use_devices()
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from jaxpfl.core import trees
    from jaxpfl.engine.cohort import AXIS, Outcome, Spread, run_cohort

    m = settings["clients"]
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    # Every device has a part of equal size.
    m -= m % mesh.size
    rows = jnp.arange(m, dtype=jnp.int32)

    def one(shared: None, present: Any, state: Any, row: Any) -> Outcome:
        return Outcome(state, jnp.where(present, row, 0), ())

    def of_cohort(block: int, spread: Spread | None) -> Any:
        def summed(values: Any) -> Any:
            given = {"num_clients": m, "block": block, "everyone": True, "spread": spread}
            return run_cohort(one, None, rows, jnp.zeros((m, 1), jnp.int8), values, **given).summed

        return summed

    several = Spread(mesh, shared_data=False, even=False)
    blocks = {"one client at a time": 1, "blocks of 128": 128, "all at once": m}
    sums = {PLAIN: lambda values: jax.lax.fori_loop(0, m, lambda i, s: s + values[i], jnp.zeros(COLUMNS))}
    sums |= {name: of_cohort(block, None) for name, block in blocks.items()}
    sums |= {f"{name}, {mesh.size} devices": of_cohort(block, several) for name, block in blocks.items()}
    sums["mean"] = lambda values: values.mean(axis=0)
    sums["weighted by the client"] = lambda values: trees.sum_products(jnp.arange(m, dtype=jnp.float32) % 7, values)

    drawn = np.random.default_rng(0).lognormal(sigma=2, size=(m, COLUMNS)).astype(np.float32)
    results: dict[str, Any] = {}
    for kind, values in {"equal values": np.full((m, COLUMNS), 0.1, np.float32), "log-normal values": drawn}.items():
        exact = values.astype(np.float64)
        wants = {"mean": exact.mean(axis=0), "weighted by the client": (np.arange(m) % 7) @ exact}
        results[kind] = {}
        for name, function in sums.items():
            placed = NamedSharding(mesh, P(AXIS)) if name.endswith("devices") else jax.devices()[0]
            on_device, summed = jax.device_put(values, placed), jax.jit(function)
            found = np.asarray(summed(on_device), np.float64)
            spent = [_milliseconds(lambda call=summed, a=on_device: call(a)) for _ in range(settings["repetitions"])]
            error = np.abs(found / wants.get(name, exact.sum(axis=0)) - 1).max()
            results[kind][name] = {"error": float(error), "milliseconds": statistics.median(spent)}
    return results


def _milliseconds(call: Any) -> float:
    began = time.perf_counter()
    call().block_until_ready()
    return 1e3 * (time.perf_counter() - began)


if __name__ == "__main__":
    main()
