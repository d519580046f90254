"""Seconds of a first and a second `fit` of the same shapes, and of a second process with programs on disk.

    python -m benchmarks second_fit

In a process of its own: a first ``fit`` (30 rounds of a perceptron on digits, 50 clients, 10 in a round), the same
again, and one with another rate and another seed, which differ in traced values only. ``disk`` is such a process with
the command line's folder of compiled programs, filled by an earlier one. ``jaxpfl compare`` is the whole command with
its defaults, without and with that folder filled. Each repetition takes all of them in turn, and a ratio is of seconds
of one repetition; medians. CPU seconds are of all threads, so that a busy machine matters less.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, JobError, once
from .record import command, parser, table, target, write

METHODS = ("fedavg", "adaped")
FITS: dict[str, dict[str, Any]] = {"first": {}, "same": {}, "other": {"lr": 0.05, "seeds": [7]}}
ASKED = {"same": target(0.1, 0.03), "other": target(0.1, 0.03)}  # CPU seconds over those of the first fit, at most
COMPARE = "jaxpfl compare"


@command
def main(argv: list[str] | None = None) -> None:
    args = parser("second_fit", __doc__, repetitions=3).parse_args(argv)
    settings: dict[str, Any] = {"clients": 50, "fit": {"rounds": 30, "cohort": 10}, "compare": []}
    if args.quick:
        settings = {"clients": 4, "fit": {"rounds": 2, "local_steps": 2}}
        settings["compare"] = ["fedavg", "--clients", "4", "--rounds", "2", "--seeds", "1", "--local-steps", "2"]
    repetitions = 1 if args.quick else args.repetitions
    runs = [_repetition(settings) for _ in range(repetitions)]
    results = {name: {kind: _median(runs, name, kind) for kind in ("cpu", "wall")} for name in runs[0]}
    results = {name: row | {"runs": [run[name] for run in runs]} for name, row in results.items()}
    columns = ("", "CPU s", "s")
    table("seconds", columns, [(name, row["cpu"], row["wall"]) for name, row in results.items()])
    pairs = {f"{method}, {fit}": (f"{method}, {fit}", f"{method}, first") for method in METHODS for fit in FITS}
    pairs |= {f"{method}, disk, first": (f"{method}, disk, first", f"{method}, first") for method in METHODS}
    pairs[f"{COMPARE}, warm"] = f"{COMPARE}, warm", f"{COMPARE}, cold"
    pairs = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    ratios = {name: statistics.median(run[a]["cpu"] / run[b]["cpu"] for run in runs) for name, (a, b) in pairs.items()}
    asked = {name: tuple(ASKED.get(name.rpartition(", ")[2], {}).values()) or (None, None) for name in ratios}
    table("CPU seconds over the first's", ("", "ratio", "floor", "aim"), [(n, r, *asked[n]) for n, r in ratios.items()])
    write(args.json, "second_fit", settings | {"repetitions": repetitions}, results, ratios=ratios, asked=ASKED)


def _repetition(settings: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Seconds of every case, each once."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for method in METHODS:
            one = {"method": method, "clients": settings["clients"], "fit": settings["fit"]}
            found |= {f"{method}, {fit}": spent for fit, spent in once(Job("second_fit", one)).items()}
            on_disk = one | {"cache": str(Path(folder) / method)}
            once(Job("second_fit", on_disk))  # fills the folder
            found |= {f"{method}, disk, {fit}": spent for fit, spent in once(Job("second_fit", on_disk)).items()}
        for how in ("cold", "warm"):
            found[f"{COMPARE}, {how}"] = _compare(Path(folder), how, settings["compare"])
    return found


def _compare(folder: Path, how: str, arguments: list[str]) -> dict[str, float]:
    """Seconds of the whole command, whose programs are kept in the folder."""
    line = [sys.executable, "-m", "jaxpfl.cli", "compare", *arguments, "--output", str(folder / how)]
    kept = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    env = kept | {"XDG_CACHE_HOME": str(folder)}

    def run() -> None:
        done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise JobError(f"{COMPARE} ended with status {done.returncode}: {done.stderr.strip()[-200:]}")

    return _spent(run, resource.RUSAGE_CHILDREN)


def _spent(run: Callable[[], object], who: int) -> dict[str, float]:
    """Seconds of the processor and of the clock."""
    before, began = resource.getrusage(who), time.perf_counter()
    run()
    after, wall = resource.getrusage(who), time.perf_counter() - began
    return {"cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, "wall": wall}


def _median(runs: list[dict[str, dict[str, float]]], name: str, kind: str) -> float:
    return statistics.median(run[name][kind] for run in runs)


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """The fits of one process: the seconds of each."""
    if settings.get("cache"):
        os.environ["XDG_CACHE_HOME"] = settings["cache"]
    import jaxpfl
    from jaxpfl.runs import compile_cache

    if settings.get("cache"):
        compile_cache.enable()
    jaxpfl.use_cpu_cores()
    federation = jaxpfl.federate(jaxpfl.load("digits"), clients=settings["clients"], classes_per_client=3)
    found = {}
    for name, changes in FITS.items():
        given = settings["fit"] | changes
        found[name] = _spent(
            lambda given=given: jaxpfl.fit(settings["method"], federation, **given), resource.RUSAGE_SELF
        )
    return found


if __name__ == "__main__":
    main()
