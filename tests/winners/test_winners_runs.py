"""Runs of the map: what they are of, and which cells a map holds."""

import dataclasses

import pytest

from jaxpfl.benchmarks.winners import run as winners_run
from jaxpfl.benchmarks.winners.measure import missing
from jaxpfl.benchmarks.winners.run import Plan
from jaxpfl.runs.control import Reporter
from jaxpfl.runs.records import FAILED, Record
from jaxpfl.support.errors import JaxpflError, JaxpflWarning


def test_a_map_holds_finished_cells_and_says_what_failed(monkeypatch, tmp_path):
    plan = Plan(quick=True)
    records = []
    for group in plan.groups:
        for run in group.runs:
            score = 0.5 + 0.1 * (run.settings["lr"] == 0.12)
            metrics = {"validation_accuracy": score, "personalized_accuracy": score - 0.1}
            status = FAILED if run.method == "fedavg-ft" else "done"
            records.append(Record(run.method, run.settings, run.seed, status, "no memory", 4, metrics, 1.0))
    assert not plan.atlas(records[:-1]).places
    found = plan.atlas(records)
    (place,) = found.places
    assert place.methods["local"].settings == {"lr": 0.12}
    assert place.methods["local"].test == (0.5, 0.5)
    assert place.methods["local"].tries == 6
    assert place.failed == {"fedavg-ft": "failed (6 settings)"}
    assert found.minutes == round(len(records) / 60, 1)
    assert {run.method for group in missing(plan.groups, records) for run in group.runs} == {"fedavg-ft"}  # once more
    every = [dataclasses.replace(one, status=FAILED, metrics={}) for one in records]
    with pytest.warns(JaxpflWarning, match=r"left out of the map.* local: failed \(6 settings\), fedavg-ft: failed"):
        assert not plan.atlas(every).places
    monkeypatch.setattr(winners_run, "measure", lambda *given: every)
    with (
        pytest.warns(JaxpflWarning, match="left out of the map"),
        pytest.raises(JaxpflError, match="no cell of the map could be measured"),
    ):
        winners_run.run(plan, tmp_path / "map", Reporter(), lambda: False)
