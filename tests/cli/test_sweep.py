"""``jaxpfl sweep``: its contract, its folder, and bad input."""

import json
from pathlib import Path

import command
import pytest
from command import jaxpfl

import jaxpfl as library
from jaxpfl.cli import main

SMALL = [*command.SMALL[:10], "--rounds", "3", "--seeds", "2"]
GRID = ["--grid", "lr=.01,.1", "--grid", "adaped.psi_init=1,3.5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A finished sweep."""
    path = tmp_path_factory.mktemp("sweep") / "s"
    main(["sweep", "adaped", *GRID, *SMALL, "--output", str(path)])
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A finished sweep of two settings, without plots."""
    path = tmp_path_factory.mktemp("small") / "s"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("jaxpfl.runs.sweep.sweep.figures", lambda summary: {})
        main(["sweep", "local", "--grid", "lr=.01,.1", *SMALL, "--seeds", "1", "--output", str(path)])
    return path


@pytest.mark.slow
def test_the_folder_is_a_table_and_configs_to_run(capsys, folder: Path, tmp_path: Path):
    table = library.load_sweep(folder)
    assert len(table) == 8
    plots = {path.name for path in (folder / "plots").iterdir()}
    assert plots == {"by-lr.png", "by-adaped.psi_init.png", "pairs-adaped.png"}
    best = folder / "best" / "adaped.json"
    run = jaxpfl(capsys, "run", "adaped", "--config", str(best), "--output", str(tmp_path / "run"), "--json")
    chosen = json.loads((folder / "summary.json").read_text())["best"]["adaped"]
    mean = run.json["methods"]["adaped"]["personalized_accuracy"]["mean"]
    assert mean == pytest.approx(chosen["personalized_accuracy"]["mean"], rel=1e-4)
    assert json.loads(best.read_text())["rounds"] == 3


@pytest.mark.slow
def test_the_definition_in_a_folder_is_a_config(capsys, small: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("jaxpfl.runs.sweep.sweep.figures", lambda summary: {})
    definition = small / "sweep.json"
    before = definition.read_text()
    again = jaxpfl(capsys, "sweep", "--config", str(definition), "--output", str(small), "--resume", "--json")
    assert again.status == 0, again.err
    assert again.json == json.loads((small / "summary.json").read_text())
    assert definition.read_text() == before
    other = ["--config", str(definition), "--clients", "7", "--output", str(small), "--resume"]
    assert "clients: 6 -> 7" in jaxpfl(capsys, "sweep", *other).err
    damaged = tmp_path / "sweep.json"
    damaged.write_text(before.replace('"local"', '"locl"'))
    assert "did you mean 'local'?" in jaxpfl(capsys, "sweep", "--config", str(damaged)).err


@pytest.mark.slow
def test_a_config_file_has_the_grid(capsys, tmp_path: Path):
    (tmp_path / "sweep.toml").write_text(
        'methods = ["fedavg"]\nmodel = "linear"\nclients = 6\ncohort = 3\nlocal_steps = 2\nrounds = 2\nseeds = 1\n'
        'select = "none"\n[grid]\nlr = [0.1, 0.2]\nlocal_steps = [1, 2]\nclients = "linear:6:8:2"\n'
    )
    given = ["--grid", "lr=.3", "--grid", "local-steps=2", "--output", tmp_path / "s", "--json"]
    rows = jaxpfl(capsys, "sweep", "--config", tmp_path / "sweep.toml", *given).json["rows"]
    assert [row["settings"] for row in rows] == [
        {"clients": clients, "lr": 0.3, "local_steps": 2} for clients in (6, 8)
    ]


def test_a_folder_of_something_else_is_refused(capsys, small: Path, tmp_path: Path):
    result = jaxpfl(capsys, "sweep", "local", "--grid", "lr=.1", *SMALL, "--output", str(small))
    assert "already contains a sweep: choose another output folder" in result.err
    (tmp_path / "x").write_text("mine")
    result = jaxpfl(capsys, "sweep", "local", "--grid", "lr=.1", *SMALL, "--output", str(tmp_path))
    assert "is not empty and contains no sweep" in result.err
    other = jaxpfl(capsys, "sweep", "local", "--grid", "lr=.1", *SMALL, "--output", str(small), "--resume")
    assert "--resume would change the sweep" in other.err


@pytest.mark.slow
def test_each_number_of_clients_has_its_own_best_setting(capsys, tmp_path: Path):
    small = [*SMALL, "--data", "planted:examples=10,test_examples=5", "--batch-size", "4", "--select", "validation"]
    given = ["--grid", "clients=6,12", "--grid", "lr=.01,.3", "--output", str(tmp_path / "s"), "--search-seeds", "1"]
    clients = small.index("--clients")
    del small[clients : clients + 2]
    said = jaxpfl(capsys, "sweep", "fedavg", *small, *given, "--json").json
    assert [problem["settings"] for problem in said["problems"]] == [{"clients": 6}, {"clients": 12}]
    for problem in said["problems"]:
        best, m = problem["best"]["fedavg"], problem["settings"]["clients"]
        own = [row for row in said["rows"] if row["settings"]["clients"] == m]
        assert best["settings"]["clients"] == m
        assert best["validation_accuracy"] == max(row["validation_accuracy"] for row in own)
        assert best["tries"] == 2
        assert best["seeds"] == 2  # the second one, after the search
    assert {path.name for path in (tmp_path / "s" / "best").iterdir()} == {
        "fedavg-clients=6.json",
        "fedavg-clients=12.json",
    }
