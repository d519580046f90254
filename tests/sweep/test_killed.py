"""Sweeps killed with -9 at random moments, and resumed."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas
import pytest

from jaxpfl.runs.records import load_sweep

COMMAND = [
    *("fedavg", "local", "--model", "linear", "--clients", "6", "--cohort", "3", "--local-steps", "2"),
    *("--rounds", "40", "--seeds", "2", "--grid", "lr=.05,.1,.2", "--grid", "batch_size=4,5", "--json"),
]
KILLS = 1
"""Kills of each case; `tests/faults` kills sweeps at each of their calls."""


def started(folder: Path, args: list[str], cache: Path) -> subprocess.Popen[str]:
    more = ["--resume"] if (folder / "sweep.json").exists() else []
    command = [sys.executable, "-m", "jaxpfl.cli", "sweep", *args, "--output", str(folder), *more]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(folder: Path, args: list[str], cache: Path) -> float:
    began = time.perf_counter()
    process = started(folder, args, cache)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return time.perf_counter() - began


def told(folder: Path) -> Any:
    """The records but for their times."""
    table = load_sweep(folder)
    table = table.drop(columns=[name for name in table.columns if name.endswith("seconds")])
    return table.sort_values([*table.columns[:3], "seed"]).reset_index(drop=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "args", [COMMAND, [*COMMAND, "--halving", "3", "--halving-first", "5"]], ids=["all", "halving"]
)
def test_a_killed_sweep_ends_with_the_records_of_one_that_was_not(tmp_path: Path, args: list[str]):
    whole, killed, cache = tmp_path / "whole", tmp_path / "killed", tmp_path / "cache"
    finished(whole, args, cache)
    seconds = finished(tmp_path / "warm", args, cache)
    rng, kills = random.Random(0), 0
    while kills < KILLS and not (killed / "summary.json").exists():
        process = started(killed, args, cache)
        try:
            process.wait(timeout=rng.uniform(0.1, 0.25 + 0.15 * kills) * seconds)  # the first surely before the end
        except subprocess.TimeoutExpired:
            process.kill()
            kills += 1
        process.communicate(timeout=60)
    if not (killed / "summary.json").exists():
        finished(killed, args, cache)
    assert kills
    # A survivor of a rung that begins anew is a row of a smaller program, whose sums may round in another order.
    rtol = 1e-6 if "--halving" in args else 0.0
    pandas.testing.assert_frame_equal(told(killed), told(whole), rtol=rtol, atol=0.0)
