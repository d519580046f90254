"""``--mlflow`` and ``--wandb`` where they are not there, and a run with one; its rounds as a table."""

import json
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
from command import SMALL, jaxpfl

from jaxpfl.support.files import read_table

LACKING = {
    "mlflow": "--mlflow needs the package mlflow-skinny or mlflow: pip install 'jaxpfl[mlflow]'",
    "wandb": "--wandb needs the package wandb: pip install 'jaxpfl[wandb]'",
}


@pytest.mark.parametrize("name", LACKING)
def test_without_the_package_nothing_begins(name: str, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    result = jaxpfl(capsys, "run", "local", *SMALL, "--output", tmp_path / "run", f"--{name}", "x")
    assert (result.status, result.err) == (2, f"error: {LACKING[name]}\n")
    assert not (tmp_path / "run").exists()


def stored(folder: Path) -> Path:
    """A run folder with two rounds of two seeds, of which one diverged."""
    folder.mkdir()
    content = json.loads((Path(__file__).parents[1] / "experiment" / "stored_run" / "config.json").read_text())
    content["config"] |= {"seeds": 2, "seed": 5}
    (folder / "config.json").write_text(json.dumps(content))
    losses = [[1 / 3, 0.1], [1e-17, None]]
    records = [{"kind": "round", "method": "fedavg", "round": r + 1, "train_loss": own} for r, own in enumerate(losses)]
    records += [{"kind": "evaluation", "method": "fedavg", "round": 2, "global_accuracy": [0.5, 0.25], "seconds": 2.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_the_table_of_rounds_has_every_number(kind: str, tmp_path: Path, capsys):
    run, path = stored(tmp_path / "run"), tmp_path / f"rounds.{kind}"
    told = jaxpfl(capsys, "export", run, "--rounds", path, "--json")
    assert (told.status, told.json) == (0, {"rounds": str(path), "rows": 6})
    table = pandas.read_csv(path) if kind == "csv" else read_table(path)
    assert list(table.columns) == ["kind", "method", "round", "seed", "train_loss", "global_accuracy", "seconds"]
    assert table.seed.tolist() == [5, 6] * 3
    np.testing.assert_allclose(table.train_loss, [1 / 3, 0.1, 1e-17, *[np.nan] * 3], rtol=1e-15)
    np.testing.assert_array_equal(table.global_accuracy, [*[np.nan] * 4, 0.5, 0.25])
    assert table.seconds.tolist()[4:] == [2.5, 2.5]


def test_a_table_that_cannot_be_is_one_line(tmp_path: Path, capsys):
    run, path = stored(tmp_path / "run"), tmp_path / "rounds.csv"
    (tmp_path / "there.csv").touch()
    for args, message in (
        ((run, "--rounds", tmp_path / "rounds.xlsx"), "must be a file that ends in .csv or .parquet"),
        ((run, "--rounds", tmp_path / "there.csv"), "there.csv exists: choose another --rounds"),
        ((run, "--rounds", path, "--global"), "--rounds writes no models: leave out --global"),
        ((run, "--rounds", path, "--per-client"), "--rounds writes no models: leave out --per-client"),
        ((tmp_path, "--rounds", path), "is not a run folder"),
    ):
        result = jaxpfl(capsys, "export", *args)
        assert (result.status, result.out) == (2, "")
        assert message in result.err
    (run / "metrics.jsonl").unlink()
    assert "has no round yet" in jaxpfl(capsys, "export", run, "--rounds", path).err
    assert not path.exists()


@pytest.mark.slow
def test_a_run_tells_mlflow_what_it_records(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = pytest.importorskip("mlflow", reason="the extra jaxpfl[mlflow] is not installed")
    store, run = tmp_path / "store", tmp_path / "run"
    told = jaxpfl(capsys, "compare", "local", "fedavg", *SMALL, "--output", run, "--mlflow", store.as_uri(), "--json")
    assert told.status == 0, told.err
    assert jaxpfl(capsys, "export", run, "--rounds", tmp_path / "rounds.parquet").status == 0
    table = read_table(tmp_path / "rounds.parquet")
    client = mlflow.MlflowClient(store.as_uri())
    experiment = client.get_experiment_by_name("jaxpfl")
    found = {one.info.run_name: one for one in client.search_runs([experiment.experiment_id])}
    assert found.keys() == {"local", "fedavg"} == told.json["methods"].keys()
    for name, one in found.items():
        history = [(m.step, m.value) for m in client.get_metric_history(one.info.run_id, "round/train_loss")]
        means = table[(table.method == name) & (table.kind == "round")].groupby("round").train_loss.mean()
        assert history == [(r, pytest.approx(value)) for r, value in means.items()]
        assert one.info.status == "FINISHED"
