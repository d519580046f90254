"""An hour of small jobs, one after the other: ``python tests/faults/soak.py MINUTES [OUTPUT.json]``.

In turn, until the time is over: a job of the harness meets a random fault at a random call, is run again, and must end
with the numbers of an undisturbed one; a lasting process runs one of a few jobs again, whose numbers must be those of
the first time; and another lasting process runs a job whose number of clients it has not seen, and thus compiles. What
the processes hold is noted after each job. OUTPUT is written every minute.
"""

from __future__ import annotations

import json
import os
import platform
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from harness import JOBS, RUN, Harness, Point, results, same
from lasting import held

FAULTS = ("kill", "term", "full", "vanish", "broken", "read-only")
SEEDS = 4
"""Seeds of each job that is run again, and widths of the study."""
SEED = 24


class Lasting:
    """A process that runs commands, with what it held after each."""

    def __init__(self, place: Path):
        self._place, self._first = place, dict[Any, Any]()
        self.held: list[dict[str, float]] = []
        self.jobs = Counter[str]()
        temporary = place / "temporary"
        temporary.mkdir(parents=True)
        environ = {
            "TMPDIR": str(temporary),
            "XDG_CACHE_HOME": str(place / "cache"),
            "JAX_PLATFORMS": "cpu",
            "MPLBACKEND": "Agg",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
        }
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("lasting.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environ,
        )

    def run(self, name: str, args: list[str], *, resumed: bool = False) -> None:
        """Run a job, and compare its numbers with those of the first time.

        Args:
          name: its name in the counts.
          args: its arguments, but for the folder.
          resumed: whether it is run to its middle before.

        Raises:
          AssertionError: for an error, or for other numbers.
        """
        folder = self._place / "out"
        shutil.rmtree(folder, ignore_errors=True)
        whole = [*args, "--output", str(folder)]
        commands = [[*whole, "--rounds", "2"], [*whole, "--resume"]] if resumed else [whole]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([*commands, ["check", str(folder)]]), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        status, said = answer.pop("status"), answer.pop("said")
        assert status == 0, f"{name}: {said}"
        self.held.append(answer)
        self.jobs[name] += 1
        found = results(folder)
        assert found is not None, f"{name}: no results"
        same(found, self._first.setdefault(tuple(args), found))

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=300)


def known(number: int) -> tuple[str, list[str], bool]:
    """The name and arguments of a job that is run again and again, and whether it is resumed."""
    jobs = ("run", "disk", "sweep", "study", "compare", "resumed")
    name = jobs[number % len(jobs)]
    seed = ["--sigma-theta" if name == "study" else "--seed", str(1 + number // len(jobs) % SEEDS)]
    job = JOBS["run" if name == "resumed" else name]
    return name, [*job.args, *seed], name == "resumed"


def fresh(number: int) -> tuple[str, list[str]]:
    """The name and arguments of a job of a number of clients that was not seen before."""
    clients, name = 7 + number, ("run", "sweep")[number % 2]
    start = ["run", "adaped", *RUN] if name == "run" else list(JOBS["sweep"].args)
    return name, [*start, "--clients", str(clients)]


def flatness(held: list[dict[str, float]]) -> dict[str, Any]:
    """The start of each quantity, its mean over each quarter of the jobs, and its slope a job over their last half."""
    told = {}
    for name in held[0] if held else ():
        values = np.array([one[name] for one in held], float)
        half = values[len(values) // 2 :]
        slope = np.polyfit(np.arange(len(half)), half, 1)[0] if len(half) > 2 else 0.0
        quarters = [round(float(part.mean()), 1) for part in np.array_split(values, 4) if len(part)]
        told[name] = {"first": values[0], "quarters": quarters, "slope": round(float(slope), 5)}
    return told


def main() -> None:
    minutes, *rest = sys.argv[1:]
    began, chosen = time.monotonic(), random.Random(SEED)
    statuses, failures, struck, visits = Counter[str](), list[str](), 0, 0
    forked: list[dict[str, float]] = []

    def told() -> dict[str, Any]:
        versions = {name: version(name) for name in ("jaxpfl", "jax", "jaxlib", "orbax-checkpoint", "tensorstore")}
        parts = {
            "again": {"jobs": dict(again.jobs), "flatness": flatness(again.held), "held": _columns(again.held)},
            "fresh": {"jobs": dict(new.jobs), "flatness": flatness(new.held), "held": _columns(new.held)},
            "forking": {"flatness": flatness(forked), "held": _columns(forked)},
        }
        return {
            "command": f"python tests/faults/soak.py {minutes} benchmarks/results/soak_cpu2.json",
            "python": platform.python_version(),
            "versions": versions,
            "minutes": round((time.monotonic() - began) / 60, 1),
            "visits": visits,
            "struck": struck,
            "statuses": dict(sorted(statuses.items())),
            "failures": failures,
            **parts,
        }

    def write() -> None:
        if rest:
            Path(rest[0]).write_text(json.dumps(told(), indent=1) + "\n")

    with tempfile.TemporaryDirectory() as name:
        place, number, written = Path(name), 0, began
        again, new = Lasting(place / "again"), Lasting(place / "fresh")
        with Harness(place, place / "cache") as harness:
            while time.monotonic() < began + 60 * float(minutes):
                for one, (what, args, *resumed) in ((again, known(number)), (new, fresh(number))):
                    try:
                        one.run(what, args, resumed=bool(resumed and resumed[0]))
                    except AssertionError as error:
                        failures.append(f"{what} {shlex.join(args)}: {error}")
                        print(failures[-1], flush=True)
                job, fault = chosen.choice(list(JOBS)), chosen.choice(FAULTS)
                point = Point(fault, chosen.randint(1, harness.count(JOBS[job])["seen"]))
                try:
                    found = harness.visit(JOBS[job], point)
                    statuses[f"{fault} {found.status}"] += 1
                    struck += found.struck
                except AssertionError as error:
                    failures.append(f"{job} {point}: {error}")
                    print(failures[-1], flush=True)
                visits, number = visits + 1, number + 1
                forked.append(held(harness.process))
                if time.monotonic() > written + 60:
                    write()
                    written = time.monotonic()
        again.end()
        new.end()
    write()
    print(json.dumps({key: value for key, value in told().items() if key not in ("again", "fresh", "forking")}))


def _columns(held: list[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [one[name] for one in held] for name in (held[0] if held else ())}


if __name__ == "__main__":
    main()
