"""Sweeps killed with -9 between their groups, and resumed; `tests/faults` kills them at each of their calls."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas
import pytest

from jaxpfl.runs.records import load_sweep

COMMAND = [
    *("fedavg", "--model", "linear", "--clients", "6", "--cohort", "3", "--local-steps", "2"),
    *("--rounds", "40", "--seeds", "2", "--grid", "lr=.05,.1,.2", "--grid", "batch_size=4,5", "--json"),
]


def started(folder: Path, args: list[str], cache: Path) -> subprocess.Popen[str]:
    more = ["--resume"] if (folder / "sweep.json").exists() else []
    command = [sys.executable, "-m", "jaxpfl.cli", "sweep", *args, "--output", str(folder), *more]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(folder: Path, args: list[str], cache: Path) -> None:
    process = started(folder, args, cache)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err


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
    process, journal = started(killed, args, cache), killed / "journal" / "main.jsonl"
    while process.poll() is None and not (journal.exists() and journal.stat().st_size):
        time.sleep(0.002)
    process.kill()
    process.communicate(timeout=60)
    assert not (killed / "summary.json").exists()
    finished(killed, args, cache)
    # A survivor of a rung that begins anew is a row of a smaller program, whose sums may round in another order.
    rtol = 1e-6 if "--halving" in args else 0.0
    pandas.testing.assert_frame_equal(told(killed), told(whole), rtol=rtol, atol=0.0)
