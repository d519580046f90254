"""Faults while a run, a sweep, a study or a store of clients is written, at calls chosen by a seed.

`JAXPFL_FAULTS=all` visits every call; `python tests/faults/visit.py` prints counts, and those of more jobs and faults
are in ``benchmarks/results/faults_cpu2.json``. The smallest writers are visited at every call.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import HERE, JOBS, Harness, Point, library

SAMPLE = {"kill": 2, "full": 1, "read-only": 1, "vanish": 1, "term": 1, "broken": 1}
"""Points of a job."""
SAMPLES = {"run": SAMPLE, "disk": {"kill": 2, "full": 1}, "sweep": {"kill": 2, "vanish": 1}, "study": {"kill": 1}}
"""Points of each; one costs three seconds of a processor, that studies end well is tested call by call elsewhere."""
SHARE = 3 / 4
"""Share of the calls, which differ a little from run to run, by which a sampled fault surely strikes."""


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    place = tmp_path_factory.mktemp("faults")
    try:
        made = Harness(place, Path(os.environ.get("XDG_CACHE_HOME", place)))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the faults are a preloaded library, compiled by gcc on Linux: {error}")
    with made:
        yield made


def sampled(name: str, calls: int) -> list[Point]:
    """Points of a job: its seeded sample, or every call."""
    if os.environ.get("JAXPFL_FAULTS") == "all":
        return [Point(fault, at) for fault in SAMPLE for at in range(1, calls + 1)]
    last, chosen = int(SHARE * calls), random.Random(name)
    return [Point(fault, chosen.randint(1, last)) for fault, count in SAMPLES[name].items() for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_nothing_is_lost_beyond_the_last_checkpoint(
    harness: Harness, name: str, record_property: Callable[[str, object], None]
) -> None:
    statuses, struck = Counter[tuple[str, int]](), 0
    chosen = sampled(name, calls := harness.count(JOBS[name])["seen"])
    for point in chosen:
        found = harness.visit(JOBS[name], point)
        statuses[point.fault, found.status] += 1
        struck += found.struck
    ended = ", ".join(f"{fault} {status}: {number}" for (fault, status), number in sorted(statuses.items()))
    record_property("counts", f"{name}: {len(chosen)} faults in {calls} calls, {struck} struck; statuses: {ended}")
    assert struck > len(chosen) / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", [Point("clock", 50, -1e9), Point("slow", 1, 0.002), Point("memory", 0, 2**25)], ids=lambda p: p.fault
)
def test_a_jump_of_the_clock_a_slow_disk_and_little_memory(harness: Harness, point: Point) -> None:
    found = harness.visit(JOBS["run"], point)
    assert (found.status == 0) == (point.fault != "memory")


@pytest.mark.slow
def test_each_call_of_the_smallest_writers(tmp_path: Path) -> None:
    try:
        preloaded = os.environ | {"LD_PRELOAD": str(library(tmp_path))}
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the faults are a preloaded library, compiled by gcc on Linux: {error}")
    command = [sys.executable, str(HERE / "writers.py")]
    done = subprocess.run(command, env=preloaded, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    for name in ("json", "metrics", "journal"):
        for fault in ("kill", "full", "broken", "read-only"):
            assert counts[f"{name} {fault} old"] > 0
            assert counts[f"{name} {fault} new"] > 0
