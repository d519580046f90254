"""Seconds of a first and a second `fit` with the same shapes, and of a new process with compiled programs on disk.

    python -m benchmarks second_fit

A new process runs a first ``fit`` (30 rounds of a perceptron on digits, 50 clients, 10 in a round), the same ``fit``
again, and a ``fit`` with another rate and seed, which differ only in traced values. ``disk`` is a new process with a
folder of compiled programs, filled by an earlier process. ``jaxpfl compare`` is the whole command with its defaults,
without and with that folder. Each repetition runs all cases in turn, and a ratio compares seconds of the same
repetition. The results are medians. CPU seconds include all threads, so other work on the machine matters less.
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

FITS: dict[str, dict[str, Any]] = {"first": {}, "same": {}, "other": {"lr": 0.05, "seeds": [7]}}
ASKED = {"same": target(0.1, 0.03), "other": target(0.1, 0.03)}  # maximum CPU seconds relative to the first fit
COMPARE = "jaxpfl compare"


@command
def main(argv: list[str] | None = None) -> None:
    args = parser("second_fit", __doc__, repetitions=3).parse_args(argv)
    settings: dict[str, Any] = {"methods": ["fedavg", "adaped"], "clients": 50}
    settings |= {"fit": {"rounds": 30, "cohort": 10}, "compare": []}
    if args.quick:
        settings = {"methods": ["fedavg"], "clients": 4, "fit": {"rounds": 2, "local_steps": 2, "model": "linear"}}
        settings["compare"] = ["fedavg", "--clients", "4", "--rounds", "2", "--seeds", "1", "--model", "linear"]
    repetitions = 1 if args.quick else args.repetitions
    runs = [_repetition(settings) for _ in range(repetitions)]
    results = {name: {kind: _median(runs, name, kind) for kind in ("cpu", "wall")} for name in runs[0]}
    results = {name: row | {"runs": [run[name] for run in runs]} for name, row in results.items()}
    columns = ("", "CPU s", "s")
    table("seconds", columns, [(name, row["cpu"], row["wall"]) for name, row in results.items()])
    methods = settings["methods"]
    pairs = {f"{method}, {fit}": (f"{method}, {fit}", f"{method}, first") for method in methods for fit in FITS}
    pairs |= {f"{method}, disk, first": (f"{method}, disk, first", f"{method}, first") for method in methods}
    pairs[f"{COMPARE}, warm"] = f"{COMPARE}, warm", f"{COMPARE}, cold"
    pairs = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    ratios = {name: statistics.median(run[a]["cpu"] / run[b]["cpu"] for run in runs) for name, (a, b) in pairs.items()}
    asked = {name: tuple(ASKED.get(name.rpartition(", ")[2], {}).values()) or (None, None) for name in ratios}
    table("CPU seconds over the first's", ("", "ratio", "floor", "aim"), [(n, r, *asked[n]) for n, r in ratios.items()])
    write(args.json, "second_fit", settings | {"repetitions": repetitions}, results, ratios=ratios, asked=ASKED)


def _repetition(settings: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Run every case once, and return its seconds."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for method in settings["methods"]:
            one = {"method": method, "clients": settings["clients"], "fit": settings["fit"]}
            found |= {f"{method}, {fit}": spent for fit, spent in once(Job("second_fit", one)).items()}
            on_disk = one | {"cache": str(Path(folder) / method)}
            once(Job("second_fit", on_disk))  # fills the folder
            found |= {f"{method}, disk, {fit}": spent for fit, spent in once(Job("second_fit", on_disk)).items()}
        for how in ("cold", "warm"):
            found[f"{COMPARE}, {how}"] = _compare(Path(folder), how, settings["compare"])
    return found


def _compare(folder: Path, how: str, arguments: list[str]) -> dict[str, float]:
    """Return the seconds of the whole command, whose programs are kept in the folder."""
    line = [sys.executable, "-m", "jaxpfl.cli", "compare", *arguments, "--output", str(folder / how)]
    kept = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    env = kept | {"XDG_CACHE_HOME": str(folder)}

    def run() -> None:
        done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise JobError(f"{COMPARE} ended with status {done.returncode}: {done.stderr.strip()[-200:]}")

    return _spent(run, resource.RUSAGE_CHILDREN)


def _spent(run: Callable[[], object], who: int) -> dict[str, float]:
    """Return the CPU seconds and the elapsed seconds."""
    before, began = resource.getrusage(who), time.perf_counter()
    run()
    after, wall = resource.getrusage(who), time.perf_counter() - began
    return {"cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, "wall": wall}


def _median(runs: list[dict[str, dict[str, float]]], name: str, kind: str) -> float:
    return statistics.median(run[name][kind] for run in runs)


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """Run the fits of one process, and return the seconds of each."""
    if settings.get("cache"):
        os.environ["XDG_CACHE_HOME"] = settings["cache"]
    else:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    import jaxpfl

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
