"""Visits the calls of jobs with faults: ``python tests/faults/visit.py JOBS|all FAULTS|all [POINTS] [OUTPUT.json]``.

JOBS and FAULTS are names with commas; POINTS of the calls are visited, evenly spread, or all of them without it (or 0).
``visible`` in its place is all calls but fsync and those on files below hidden names: what these change, nothing takes
for results, and a kill at one leaves what a kill at the next of the others leaves. Prints each failure, and a line of
counts for each job and fault; with OUTPUT, adds them to that file.
"""

from __future__ import annotations

import collections
import json
import os
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness import FAULTS, JOBS, Harness, Job, Point

MEGA = 2**20
MEMORIES = (8, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
"""Mebibytes of address space beside those of the imports."""
JUMPS = (-1e9, -3600.0, 3600.0, 1e9)
DELAY = 0.01


def points(harness: Harness, job: Job, fault: str, most: int, *, hidden: bool) -> list[Point]:
    """The points of a job and a fault."""
    calls = harness.count(job, hidden=hidden)["seen"]
    if fault == "memory":
        return [Point(fault, 0, mebibytes * MEGA) for mebibytes in MEMORIES]
    if fault == "clock":
        return [Point(fault, max(1, share * calls // 4), jump) for share in range(4) for jump in JUMPS]
    if fault == "slow":
        return [Point(fault, 1, DELAY)]
    count = min(most or calls, calls)
    return [Point(fault, 1 + (2 * i + 1) * calls // (2 * count), hidden=hidden) for i in range(count)]


def visit(harness: Harness, name: str, fault: str, most: int, *, hidden: bool) -> dict[str, Any]:
    """Counts of what came of a job's points."""
    job, statuses, failures, cpu, struck = JOBS[name], collections.Counter[str](), [], 0.0, 0
    chosen = points(harness, job, fault, most, hidden=hidden)
    for point in chosen:
        try:
            found = harness.visit(job, point)
        except AssertionError as error:
            failures.append(f"{point}: {error}")
            print(name, failures[-1], flush=True)
            continue
        statuses[str(found.status)] += 1
        cpu, struck = cpu + found.cpu, struck + found.struck
    told = {"job": name, "fault": fault, "hidden": hidden, "calls": harness.count(job, hidden=hidden)["calls"]}
    told |= {"points": len(chosen), "struck": struck, "statuses": dict(statuses), "cpu_seconds": round(cpu, 1)}
    return told | {"failures": failures}


def main() -> None:
    jobs, faults, *rest = sys.argv[1:]
    hidden = rest[:1] != ["visible"]
    most = int(rest[0]) if rest and hidden else 0
    names = list(JOBS) if jobs == "all" else jobs.split(",")
    kinds = list(FAULTS[1:]) if faults == "all" else faults.split(",")
    with (
        tempfile.TemporaryDirectory() as place,
        Harness(Path(place), Path(os.environ.get("XDG_CACHE_HOME", place))) as harness,
    ):
        for name in names:
            for fault in kinds:
                told = visit(harness, name, fault, most, hidden=hidden)
                print(json.dumps(told), flush=True)
                if rest[1:]:
                    add(Path(rest[1]), told)


def add(output: Path, told: dict[str, Any]) -> None:
    """Put the counts of a job and a fault into a file, in the place of earlier ones of as many points or fewer."""
    before = json.loads(output.read_text()) if output.exists() else {}
    visits = before.get("visits", [])
    what = ("job", "fault", "hidden")
    same = [one for one in visits if all(one[name] == told[name] for name in what)]
    if any(one["points"] > told["points"] and not told["failures"] for one in same):
        return
    visits = sorted([*(one for one in visits if one not in same), told], key=lambda one: [one[name] for name in what])
    versions = {name: version(name) for name in ("jaxpfl", "jax", "jaxlib", "orbax-checkpoint", "tensorstore")}
    about = {"command": "python tests/faults/visit.py JOBS FAULTS [POINTS] benchmarks/results/faults_cpu2.json"}
    about |= {"python": platform.python_version(), "versions": versions, "visits": visits}
    output.write_text(json.dumps(before | about, indent=1) + "\n")


if __name__ == "__main__":
    main()
