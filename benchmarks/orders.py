"""Time to draw a round's batches by epochs, by steps and with replacement, and time of a CNN's whole round.

    python -m benchmarks orders --data-dir DIR

The draws are for 100 clients of n examples each, one client after the other in one program, with 10 steps of 20
examples in a round. All draws are timed in turn in one process. The CNN's rounds have 50 clients with 60 steps of 20
examples, so that an epoch is a round.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, replace
from typing import Any

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, compare, once
from .problems import Problem, device_facts, rounds_of, simulate, use_devices
from .record import command, parser, table, write
from .worker import Contender

SIZES = (30, 1200, 5000, 20_000, 60_000)
CLIENTS, STEPS, BATCH = 100, 10, 20
DRAWS = ("epoch", "step", "replacement")


@command
def main(argv: list[str] | None = None) -> None:
    args = parser("orders", __doc__).parse_args(argv)
    repetitions = 1 if args.quick else args.repetitions
    sizes = SIZES[:2] if args.quick else SIZES
    found = once(Job("orders", {"sizes": sizes, "repetitions": repetitions}))
    rows = [(f"n = {n}", *(1e6 * found["seconds"][str(n)][draw] for draw in DRAWS)) for n in sizes]
    table("us a client for the batches of a round, 10 steps of 20", ("", *DRAWS), rows)
    problem = Problem(data_dir=args.data_dir)
    if args.quick:
        problem = replace(problem, clients=10, source="digits", steps=2)
    jobs = {draw: Job("orders", {"problem": asdict(problem), "draw": draw}) for draw in ("epoch", "replacement")}
    rounds = compare(jobs, repetitions=repetitions)
    ratio = rounds["epoch"]["median"] / rounds["replacement"]["median"]
    table("s a round of the CNN", ("", *jobs, "ratio"), [("", *(rounds[d]["median"] for d in jobs), ratio)])
    write(args.json, "orders", {"repetitions": repetitions}, rounds, draws=found, ratio=ratio)


def work(settings: dict[str, Any]) -> Contender | dict[str, Any]:
    """Run rounds of one draw, or measure the seconds of every draw at every size."""
    if "problem" in settings:
        use_devices()
        return rounds_of(simulate(Problem(**settings["problem"]), draw=settings["draw"]))
    use_devices(1)
    seconds = {n: _seconds(n, settings["repetitions"]) for n in settings["sizes"]}
    return {"seconds": seconds} | device_facts()


def _seconds(size: int, repetitions: int) -> dict[str, float]:
    """Return the median seconds per client of each draw's batches."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxpfl.data import draw_batches, plan_batches

    keys = jax.random.split(jax.random.key(0), CLIENTS)
    programs = {}
    for draw in DRAWS:
        plan = plan_batches(np.array([size]), STEPS, BATCH, draw)
        programs[draw] = jax.jit(
            lambda t, keys, size, plan=plan: jax.lax.map(lambda key: draw_batches(plan, key, t, size)[0], keys)
        )
    timings: dict[str, list[float]] = {draw: [] for draw in DRAWS}
    for t in range(repetitions + 1):
        for draw, program in programs.items():
            start = time.perf_counter()
            program(jnp.int32(t), keys, jnp.int32(size)).block_until_ready()
            timings[draw].append((time.perf_counter() - start) / CLIENTS)
    return {draw: statistics.median(seconds[1:]) for draw, seconds in timings.items()}


if __name__ == "__main__":
    main()
