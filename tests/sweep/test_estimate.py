"""Sweeps over the settings of a study of estimation."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxpfl.cli import main
from jaxpfl.runs.records import load_sweep
from jaxpfl.runs.sweep import stored
from jaxpfl.runs.sweep.estimate import StudySweep, define_study
from jaxpfl.runs.sweep.execute import Reporter
from jaxpfl.runs.sweep.grid import Grid, parse
from jaxpfl.studies import registry
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError

SMALL = ["--samples", "6", "--repetitions", "3"]


def grid(*axes: str) -> Grid:
    return Grid(tuple(map(parse, axes)))


def called(capsys: pytest.CaptureFixture[str], *args: Any) -> tuple[int, str, str]:
    status = 0
    try:
        main(["sweep", "estimate", *map(str, args)])
    except SystemExit as stop:
        status = int(stop.code or 0)
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.mark.slow
def test_rows_are_what_the_study_says_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    folder, axes = tmp_path / "s", ["--grid", "clients=8,12"]
    status, out, _ = called(capsys, "unequal", "--repetitions", 3, *axes, "--seeds", 2, "--output", folder, "--json")
    assert status == 0
    summary = json.loads(out)
    assert (summary["best"], summary["programs"]) == ({}, 2)
    assert [(row["settings"], row["seeds"], row["status"]) for row in summary["rows"]] == [
        ({"clients": 8}, 2, "done"),
        ({"clients": 12}, 2, "done"),
    ]
    table = load_sweep(folder)
    study = registry.get("unequal")
    alone = study.run(study.settings(clients=12, repetitions=3, seed=1)).json["mse"]
    row = table[(table.clients == 12) & (table.seed == 1)].iloc[0]
    assert {name: row[name] for name in alone} == {name: own["mean"] for name, own in alone.items()}
    assert (folder / "results.parquet").exists()
    assert (folder / "plots" / "by-clients.png").exists()
    assert json.loads((folder / "summary.json").read_text()) == summary


def test_only_what_is_missing_runs_and_a_setting_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran: list[Any] = []
    study = registry.get("when")
    monkeypatch.setattr(Reporter, "start", lambda self, group, runs, rounds: ran.append(group))
    first = define_study("when", study.settings(), grid("clients=1,10"))
    sweep = StudySweep.open(tmp_path / "s", first, resume=False)
    sweep.run_missing(Reporter())
    more = define_study("when", study.settings(), grid("clients=1,10,100"))
    sweep = StudySweep.open(tmp_path / "s", more, resume=True)
    sweep.run_missing(Reporter())
    assert len(ran) == 3
    rows = sweep.finish()["rows"]
    assert [row["status"] for row in rows] == ["failed", "done", "done"]
    assert "clients must be at least 2" in rows[0]["reason"]
    sweep.run_missing(Reporter(), failed=True)
    assert len(ran) == 4
    other = define_study("when", study.settings(samples=3), grid("clients=10,100"))
    with pytest.raises(JaxpflError, match=r"would change the sweep in .*samples: 15 -> 3; grid clients without 1"):
        StudySweep.open(tmp_path / "s", other, resume=True)


@pytest.mark.parametrize(
    ("axis", "said"),
    [
        ("clint=3", "unknown setting of the study 'clint': did you mean 'clients'"),
        ("clients=1.5", "clients must be a whole number, got 1.5"),
        ("epsilon=much", "epsilon must be a number, got 'much'"),
        ("mechanism=analitic", "did you mean 'analytic'"),
        ("seed=1,2", "seed is no axis of a sweep: use --seeds"),
        ("clients=1", "clients must be at least 2"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], tmp_path: Path, axis: str, said: str):
    status, out, err = called(capsys, "gaussian", "--grid", axis, "--output", tmp_path / "s")
    assert (status, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "s").exists()


def test_one_of_several_values():
    definition = define_study("regression-mixture", grid=grid("samples=4,6"))
    assert [definition.settings_of(run).samples for run in definition.runs] == [(4,), (6,)]


def test_a_study_that_draws_nothing_has_no_seeds():
    with pytest.raises(JaxpflError, match="when draws nothing: it has no seeds, got --seeds 2"):
        define_study("when", seeds=2)


@pytest.mark.parametrize("name", registry.STUDIES)
@pytest.mark.slow
def test_help_of_every_study(capsys: pytest.CaptureFixture[str], name: str):
    status, out, _ = called(capsys, name, "--help")
    assert status == 0
    assert "--grid" in out
    assert "--seeds" in out


@pytest.mark.parametrize("name", registry.STUDIES)
def test_a_stored_definition_is_the_one_that_was_stored(tmp_path: Path, name: str):
    path = tmp_path / "sweep.json"
    first = define_study(name)
    files.write_json(path, first.to_json() | {"versions": {}})
    assert stored.read(tmp_path) == dataclasses.replace(first, options=first.study.options and first.study.options())
    files.write_json(path, first.to_json() | {"grid": {}})
    with pytest.raises(JaxpflError, match="is damaged, or not the definition of a sweep of a study"):
        stored.read(tmp_path)
