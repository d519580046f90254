"""A sweep by halving killed with -9 between its groups, and resumed; `tests/faults` kills plain ones at each call."""

import time
from pathlib import Path
from typing import Any

import pandas
import pytest
from forks import Forked

from jaxpfl.runs.records import load_sweep

COMMAND = [
    *("fedavg", "--model", "linear", "--clients", "6", "--cohort", "3", "--local-steps", "2"),
    *("--rounds", "40", "--seeds", "2", "--grid", "lr=.05,.1,.2", "--grid", "batch_size=4,5", "--json"),
    *("--halving", "3", "--halving-first", "5"),
]


def started(folder: Path) -> Forked:
    more = ["--resume"] if (folder / "sweep.json").exists() else []
    return Forked("sweep", *COMMAND, "--output", folder, *more)


def finished(folder: Path) -> None:
    process = started(folder)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err


def told(folder: Path) -> Any:
    """The records but for their times."""
    table = load_sweep(folder)
    table = table.drop(columns=[name for name in table.columns if name.endswith("seconds")])
    return table.sort_values([*table.columns[:3], "seed"]).reset_index(drop=True)


@pytest.mark.slow
def test_a_killed_sweep_ends_with_the_records_of_one_that_was_not(tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finished(whole)
    process, journal = started(killed), killed / "journal" / "main.jsonl"
    while process.poll() is None and not (journal.exists() and journal.stat().st_size):
        time.sleep(0.002)
    process.kill()
    process.communicate(timeout=60)
    assert not (killed / "summary.json").exists()
    finished(killed)
    # A survivor of a rung that begins anew is a row of a smaller program, whose sums may round in another order.
    pandas.testing.assert_frame_equal(told(killed), told(whole), rtol=1e-6, atol=0.0)
