"""Results of small runs stay what they were: every method within its own tolerance, far below a fault of one in 1000.

The file is never rewritten by a test; `rewrite.py` says how, CONTRIBUTING.md when.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from golden_runs import FILE, RUNS, Training, apart
from rewrite import ENVIRONMENTS, tolerance

GOLDEN: dict[str, Any] = json.loads(FILE.read_text())["runs"]
QUICK = ("fedavg", "adaped", "map-gaussian", "gaussian", "bernoulli", "regression", "private sum", "epsilon")
"""Runs of the default run."""
FAULT = 1.001
FAULTS = {"private sum": 1.01}
"""Larger ones, where a tolerance is of the lattice of the noise."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in RUNS])
def test_numbers_are_those_of_the_file_and_a_fault_of_one_in_1000_is_seen(name):
    want, allowed = GOLDEN[name]["numbers"], GOLDEN[name]["tolerance"]
    found = RUNS[name]()
    assert apart(found, want) <= allowed, {what: (found.get(what), want.get(what)) for what in {**found, **want}}
    assert apart(RUNS[name](FAULTS.get(name, FAULT)), want) > allowed


RESUMED = ("adaped", "scaffold", "fedavg, server Adam")
"""Runs that also stop in the middle: with states of clients, of both sides, and of an optimizer."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_goes_on_from_a_checkpoint_has_the_numbers_of_the_file(tmp_path: Path, name: str):
    run, want, allowed = RUNS[name], GOLDEN[name]["numbers"], GOLDEN[name]["tolerance"]
    assert isinstance(run, Training)
    found = run.resumed(tmp_path)
    known = {what: values for what, values in want.items() if what in found}
    assert set(want) - set(known) <= {"test loss, after", "test loss, before", "test loss, global"}
    assert apart({what: found[what] for what in known}, known) <= allowed


def test_the_file_has_all_runs_with_the_tolerances_that_were_measured():
    assert list(GOLDEN) == list(RUNS)
    for name, run in GOLDEN.items():
        assert list(run["spread"]) == list(ENVIRONMENTS)
        assert run["tolerance"] == tolerance(name, run["spread"])
        assert all(run["numbers"].values())


def test_other_quantities_and_numbers_that_are_none_are_never_within_a_tolerance():
    want = {"loss": [1.0, 2.0]}
    assert apart({"loss": [1.0, 2.001]}, want) == pytest.approx(5e-4)
    for other in ({}, {"loss": [1.0]}, {"loss": [1.0, float("nan")]}, want | {"psi": [3.0]}):
        assert apart(other, want) == float("inf")
