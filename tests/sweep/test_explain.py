"""Explanation of a sweep: programs that groups share, groups that cannot run, and nothing written."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small import sweep_of

from jaxpfl.engine import Simulation
from jaxpfl.runs.sweep.execute import Data, prepared
from jaxpfl.runs.sweep.explain import explain_plan, print_explanation
from jaxpfl.runs.sweep.plan import groups_of, runs_of
from jaxpfl.runs.sweep.progress import Reporter
from jaxpfl.runs.sweep.runner import run_missing
from jaxpfl.runs.sweep.sweep import Sweep, finish
from jaxpfl.support.errors import OutOfMemoryError

SHARED: dict[str, Any] = {"partition": "iid", "seeds": 1}


@pytest.mark.slow
def test_groups_of_equal_shapes_share_a_program_and_the_sweep_counts_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    definition = sweep_of("split_seed=0,1", "cohort=3,9", "lr=.1,.2", **SHARED)
    report = explain_plan(definition)
    assert list(tmp_path.iterdir()) == []
    json.dumps(report, allow_nan=False)
    able = [group for group in report["groups"] if not group["reason"]]
    assert [group["program"] for group in able] == [1, 1]
    assert (report["runs"], report["programs"], report["later"]) == (8, 1, 0)
    assert {(group["runs"], group["chunk"], group["rounds"]) for group in able} == {(2, 2, 3)}
    assert all(group["memory"]["data"] > 0 and group["compile_seconds"] > 0 for group in able)
    refused = [group for group in report["groups"] if group["reason"]]
    assert {group["reason"] for group in refused} == {"cohort must be between 1 and the number of clients (6), got 9"}
    assert all(group["memory"] is None for group in refused)
    console = Console(width=120, record=True, file=io.StringIO())
    print_explanation(console, report)
    said = console.export_text()
    assert "4 runs cannot run: cohort must be" in said
    assert "4 runs, 1 program," in said

    sweep = Sweep.open(tmp_path / "s", definition, resume=False)
    run_missing(sweep, Reporter())
    assert finish(sweep)["programs"] == 1


@pytest.mark.slow
def test_chunks_where_memory_asks(monkeypatch: pytest.MonkeyPatch):
    real = Simulation.init

    def short_of_memory(self: Simulation, seeds: Any) -> Any:
        if len(seeds) > 2:
            raise OutOfMemoryError("the states need too much")
        return real(self, seeds)

    monkeypatch.setattr(Simulation, "init", short_of_memory)
    definition = sweep_of("lr=.1,.2,.3", seeds=3, search={"search_seeds": 1})
    report = explain_plan(definition)
    assert report["groups"][0]["chunk"] == 2
    assert report["programs"] == 2  # of two rows, and of one
    assert report["later"] == 2


@pytest.mark.slow
def test_digests_tell_programs_apart():
    (group,) = groups_of(definition := sweep_of("lr=.1,.2", **SHARED), runs_of(definition))
    (other,) = groups_of(changed := sweep_of("lr=.3,.4", **SHARED), runs_of(changed))
    (longer,) = groups_of(changed := sweep_of("lr=.3,.4", **SHARED, local_steps=3), runs_of(changed))
    loaded = Data()
    digests = [prepared(one, loaded).simulation(slice(None)).digest(2) for one in (group, other, longer)]
    assert digests[0] == digests[1] != digests[2]
