"""Seconds of tracing, lowering and XLA before the first round, without a cache and with the persistent cache.

    python -m benchmarks compile --data-dir DIR

The measured program runs rounds of the MNIST CNN (60 steps of batch 20, m = 50) on all devices. ``start`` is the
program that makes the first state. In ``cached``, JAX's persistent compilation cache is in a temporary folder that an
earlier process has filled with all programs, even those that compile quickly. To show whether m matters, m = 50 and m =
5000 are compared with clients that have 60 repeated examples and take two steps. Cases are measured in turn, each time
in a new process. The results are medians.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import asdict, replace
from typing import Any

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, once
from .problems import Problem, rounds_of, simulate, use_devices
from .record import command, parser, positive, table, target, write
from .timing import with_compile_seconds

ASKED = {"adaped cold": target(3.0, 1.0)}  # maximum seconds
ASKED_RATIO = target(1.2, 1.0)  # maximum ratio of m = 5000 to m = 50
PHASES = ("trace", "lower", "xla", "total")


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("compile", __doc__, repetitions=3)
    options.add_argument("--many", type=positive, default=5000, help="larger number of clients")
    args = options.parse_args(argv)
    problem, few, many, repetitions = Problem(data_dir=args.data_dir), 50, args.many, args.repetitions
    methods = ("adaped",) if args.quick else ("fedavg", "adaped")
    if args.quick:
        problem, few, many, repetitions = Problem("linear", 4, steps=2, outputs=2), 2, 4, 1
    small = replace(problem, method="adaped", cap=60, steps=2)
    with tempfile.TemporaryDirectory() as folder:
        cases: dict[str, dict[str, Any]] = {}
        for method in methods:
            described = {"problem": asdict(replace(problem, method=method))}
            cases |= {f"{method} cold": described, f"{method} cached": described | {"cache": folder}}
        for m in (few, many):
            cases[f"adaped, m = {m}"] = {"problem": asdict(replace(small, clients=m))}
        for settings in cases.values():
            if "cache" in settings:
                once(Job("compile", settings))  # fills the cache
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
        for _ in range(repetitions):
            for name, settings in cases.items():
                runs[name].append(once(Job("compile", settings)))
    results: dict[str, dict[str, Any]] = {name: _medians(found) | {"runs": found} for name, found in runs.items()}
    rows = []
    for name, row in results.items():
        asked = tuple(ASKED.get(name, {}).values()) or (None, None)
        rows.append((name, *(row["round"][phase] for phase in PHASES), *asked, row["start"]["total"], row["first"]))
    columns = ("program", "trace s", "lower s", "XLA s", "total s", "floor", "aim", "start s", "first round s")
    table("compiling the rounds of the MNIST CNN", columns, rows)
    totals = [results[f"adaped, m = {m}"]["round"]["total"] for m in (few, many)]
    ratios = {"many_over_few": totals[1] / totals[0], "asked": ASKED_RATIO}
    ratios |= {m: results[f"{m} cached"]["round"]["total"] / results[f"{m} cold"]["round"]["total"] for m in methods}
    rows = [(f"m = {many} over m = {few}", ratios["many_over_few"], *ASKED_RATIO.values())]
    rows += [(f"{method}, cached over cold", ratios[method], None, None) for method in methods]
    table("ratios", ("", "ratio", "floor", "aim"), rows)
    settings = asdict(problem) | {"few": few, "many": many, "repetitions": repetitions}
    write(args.json, "compile", settings, results, ratios=ratios, asked=ASKED)


def _medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    def median(*path: str) -> float:
        values = []
        for run in runs:
            value: Any = run
            for name in path:
                value = value[name]
            values.append(value)
        return statistics.median(values)

    result: dict[str, Any] = {part: {name: median(part, name) for name in PHASES} for part in ("start", "round")}
    return result | {"first": median("first")}


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """Build and run one round; return the seconds of each phase and of the whole first round."""
    import jax

    jax.config.update("jax_compilation_cache_dir", settings.get("cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    use_devices()
    contender = with_compile_seconds(lambda: rounds_of(simulate(Problem(**settings["problem"]))))
    began = time.perf_counter()
    contender.run(1)
    return {"first": time.perf_counter() - began} | contender.facts()


if __name__ == "__main__":
    main()
