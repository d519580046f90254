"""A run folder: what it holds, resuming it, and rerunning its config.

``--force`` replaces what the same command wrote and nothing else; ``--quiet`` leaves the result and errors alone.
"""

import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from command import SMALL, jaxpfl, timeless

from jaxpfl.runs import run_folder
from jaxpfl.runs.run import _trace
from jaxpfl.support.errors import JaxpflError, JaxpflWarning


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("original") / "run"


@pytest.fixture
def finished(original: Path, tmp_path: Path, capsys) -> tuple[Path, dict]:
    """A copy of a comparison that was run once, and its summary."""
    if not original.exists():
        result = jaxpfl(capsys, "compare", "local", "adaped", *SMALL, "--json", "--output", original)
        assert result.status == 0, result.err
        assert result.json == json.loads((original / "summary.json").read_text())
    folder = tmp_path / "run"
    shutil.copytree(original, folder)
    return folder, json.loads((folder / "summary.json").read_text())


@pytest.fixture
def undrawn(finished, monkeypatch) -> tuple[Path, dict]:
    """The same, for a test of numbers: its runs draw no plots."""
    monkeypatch.setattr("jaxpfl.runs.results.figures", lambda *arguments: {})
    return finished


@pytest.mark.slow
def test_json_is_the_schema(finished):
    _, summary = finished
    assert set(summary) == {*("methods", "rounds", "seeds", "clients", "cohort", "run_dir", "version", "constant")}
    assert (summary["rounds"], summary["seeds"], summary["clients"], summary["cohort"]) == (4, [0, 1], 6, 3)
    for name, row in summary["methods"].items():
        accuracy = row["personalized_accuracy"]
        statistics = {"mean", "std", "std_clients", "median", "p10", "worst_decile"}
        assert set(accuracy) == statistics | {"mean_examples", "std_examples"}
        assert all(0 <= value <= 1 for value in accuracy.values())
        assert (row["global_accuracy"] is None) == (name == "local")
        assert row["unseen_accuracy"] is None
        assert 0 <= row["fraction_hurt"] <= 1
        assert row["diverged_clients"] == 0
        assert row["seconds"] > 0
    parameters = 64 * 10 + 10
    adaped = summary["methods"]["adaped"]
    assert adaped["bytes_up"] == adaped["bytes_down"] == 4 * 3 * 4 * (parameters + 1)
    assert adaped["client_steps"] == 4 * 3 * 2
    assert adaped["gradients"]["training"]["mean"] == 4 * 3 * 2 * 2 / 6  # of theta and of mu; a mean over the clients
    assert adaped["gradients"]["personalization"] == {"mean": 0, "min": 0, "max": 0}
    assert summary["methods"]["local"]["bytes_up"] == 0


def test_folder_holds_config_records_scores_and_plots(finished):
    folder, summary = finished
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for kind, rounds in (("round", [1, 2, 3, 4]), ("evaluation", [2, 4])):
        got = [r["round"] for r in records if r["kind"] == kind and r["method"] == "adaped"]
        assert got == rounds
    with np.load(folder / "clients.npz") as clients:
        accuracy = clients["adaped/after_accuracy"]
    assert accuracy.shape == (2, 6)
    mean = summary["methods"]["adaped"]["personalized_accuracy"]["mean"]
    assert accuracy.mean() == pytest.approx(mean, abs=1e-6)
    for plot in ("accuracy", "clients", "psi"):
        assert (folder / "plots" / f"{plot}.png").stat().st_size > 5000


@pytest.mark.slow
def test_hyper_parameters_edited_beside_the_config_are_refused(finished, tmp_path, capsys):
    path = finished[0] / "config.json"
    record = json.loads(path.read_text())
    again = ("compare", "--config", path, "--explain-plan", "--json")
    assert jaxpfl(capsys, *again, "--rounds", "3").status == 0
    record["hyper"]["adaped"]["lr"] = 0.25
    path.write_text(json.dumps(record))
    refused = jaxpfl(capsys, *again)
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert f"hyper in {path} does not match its config for adaped: set values by --set or in the config" in refused.err
    del record["hyper"]
    path.write_text(json.dumps(record | {"rounds": 3}))
    assert "unknown entry of" in jaxpfl(capsys, *again).err
    path.write_text(json.dumps(record))
    assert jaxpfl(capsys, *again).status == 0


def test_resume_skips_what_is_finished_and_passes_over_a_damaged_checkpoint(undrawn, capsys):
    folder, summary = undrawn
    (folder / "summary.json").unlink()
    for path in (folder / "checkpoints" / "adaped" / "4").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    for name in ("adaped.json", "adaped.npz"):
        (folder / "methods" / name).unlink()
    result = jaxpfl(capsys, "compare", "local", "adaped", *SMALL, "--json", "--output", folder, "--resume")
    assert "checkpoint of round 4 cannot be used" in result.err
    assert "is damaged" in result.err
    assert "local: already finished" in result.err
    assert timeless(result.json) == timeless(summary)


def test_other_data_under_the_same_config_are_refused(finished, capsys):
    folder, _ = finished
    config = folder / "config.json"
    stored = json.loads(config.read_text())
    config.write_text(json.dumps(stored | {"data": stored["data"] ^ 1}))
    result = jaxpfl(capsys, "compare", "local", "adaped", *SMALL, "--output", folder, "--resume")
    assert result.status == 2
    assert "the data have changed" in result.err


@pytest.mark.slow
def test_damaged_scores_are_said_and_made_again(undrawn, capsys):
    folder, summary = undrawn
    (folder / "methods" / "adaped.npz").write_bytes(b"")
    again = ("compare", "local", "adaped", *SMALL, "--output", folder, "--resume", "--json")
    refused = jaxpfl(capsys, *again)
    assert (refused.status, refused.out) == (2, "")
    assert "adaped.npz is damaged or missing: delete" in refused.err
    (folder / "methods" / "adaped.json").unlink()
    assert timeless(jaxpfl(capsys, *again).json) == timeless(summary)


def test_lost_records_of_a_finished_method_are_said(undrawn, capsys):
    folder, summary = undrawn
    (folder / "metrics.jsonl").unlink()
    result = jaxpfl(capsys, "compare", "local", "adaped", *SMALL, "--output", folder, "--resume", "--json")
    assert timeless(result.json) == timeless(summary)
    assert "metrics.jsonl lacks rounds of local, adaped" in result.err
    assert "UserWarning" not in result.err


def test_a_run_that_was_refused_leaves_its_folder_to_the_corrected_one(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    monkeypatch.setattr("jaxpfl.runs.results.figures", lambda *arguments: {})
    with monkeypatch.context() as patched:
        patched.setattr("jaxpfl.engine.placement.free_bytes", lambda devices: 10)
        patched.setattr("jaxpfl.engine.placement._SMALL", 0)
        refused = jaxpfl(capsys, "run", "local", *SMALL, "--output", folder)
    assert (refused.status, folder.exists()) == (2, False)
    assert "the data need" in refused.err
    assert jaxpfl(capsys, "run", "local", *SMALL, "--output", folder, "--lr", "0.05").status == 0


def test_what_a_folder_allows_and_refuses_to_the_command_that_resumes_it(undrawn, capsys):
    folder, summary = undrawn
    args = ("compare", "local", "adaped", *SMALL, "--output", folder, "--resume")
    changed = jaxpfl(capsys, *args, "--batch-size", "7")
    assert changed.status == 2
    assert "batch_size: 5 -> 7" in changed.err
    with run_folder.lock(folder):
        locked = jaxpfl(capsys, *args)
    assert (locked.status, locked.err.count("\n")) == (2, 1)
    assert f"process {os.getpid()} on" in locked.err
    assert "is using" in locked.err
    assert json.loads((folder / "summary.json").read_text()) == summary
    planned = jaxpfl(capsys, *args, "--plan.clients", "vmap")
    assert planned.status == 0
    assert "plan" in planned.err


@pytest.mark.slow
def test_default_folder_is_found_again(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = ("run", "local", *SMALL, "--json")
    first = jaxpfl(capsys, *args).json["run_dir"]
    second = jaxpfl(capsys, *args).json["run_dir"]
    assert second == f"{first}-2"
    assert jaxpfl(capsys, *args, "--resume").json["run_dir"] == second


def plan_of(capsys, *args: str) -> list[str]:
    """The methods that a command would run; none is compiled."""
    result = jaxpfl(capsys, *args, "--explain-plan", "--json")
    assert result.status == 0, result.err
    return list(result.json)


def test_methods_come_from_the_config_unless_given(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxpfl.runs.terminal.explain_plan", lambda experiment: dict.fromkeys(experiment.methods))
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    for file, methods in ((one, '["fedavg"]'), (two, '["local", "fedavg"]')):
        file.write_text(f'methods = {methods}\nmodel = "linear"\nclients = 6\nbatch_size = 5\nseeds = 1\n')
    assert plan_of(capsys, "run", "--config", one) == ["fedavg"]
    assert plan_of(capsys, "run", "local", "--config", one) == ["local"]
    assert plan_of(capsys, "compare", "--config", two) == ["local", "fedavg"]
    assert plan_of(capsys, "compare", "local", "--config", two) == ["local"]
    refused = jaxpfl(capsys, "run", "--config", two)
    assert (refused.status, refused.out, refused.err.count("\n")) == (2, "", 1)
    assert f"run trains one method, but {two} names local, fedavg" in refused.err


@pytest.mark.slow
def test_a_profile_is_a_trace_and_changes_no_numbers(undrawn, tmp_path: Path, capsys):
    _, plain = undrawn
    traced = jaxpfl(capsys, "run", "local", *SMALL, "--output", tmp_path / "traced", "--profile")
    assert f"traces: {tmp_path / 'traced' / 'profile'}" in traced.out
    assert len(list((tmp_path / "traced" / "profile" / "local").rglob("*.xplane.pb"))) == 1
    summary = json.loads((tmp_path / "traced" / "summary.json").read_text())["methods"]["local"]
    assert plain["methods"]["local"]["personalized_accuracy"] == summary["personalized_accuracy"]


def test_a_profile_that_cannot_begin_is_a_warning(tmp_path: Path, monkeypatch):
    def busy(*_, **__) -> None:
        raise RuntimeError("Profile has already been started.")

    monkeypatch.setattr(jax.profiler, "start_trace", busy)
    with pytest.warns(JaxpflWarning, match="wrote no trace: Profile has already been started"), _trace(tmp_path):
        pass


STORED = Path(__file__).parents[1] / "experiment" / "stored_run" / "config.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder that a kill left, with the mark of its lock."""
    place = tmp_path / "run"
    (place / "methods").mkdir(parents=True)
    (place / ".lock").touch()
    for name in ("methods/fedavg.json", "metrics.jsonl", "summary.json"):
        (place / name).touch()
    shutil.copy(STORED, place)
    return place


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_results_go_and_hidden_files_stay(folder: Path, tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (folder / "checkpoints").symlink_to(elsewhere)
    run_folder.clear(folder, "config.json", run_folder.RUN_PARTS)
    assert names(folder) == {".lock"}
    assert names(elsewhere) == {"kept"}


def test_the_summary_goes_first_and_the_mark_last(folder: Path, monkeypatch: pytest.MonkeyPatch):
    removed: list[str] = []
    monkeypatch.setattr(shutil, "rmtree", lambda path: removed.append(path.name))
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: removed.append(path.name))
    run_folder.clear(folder, "config.json", run_folder.RUN_PARTS)
    assert set(removed[:-1]) == {"methods", "metrics.jsonl", "summary.json"}
    assert (removed[0], removed[-1]) == ("summary.json", "config.json")


@pytest.mark.parametrize("name", ["notes.txt", "plots/notes.txt", "methods/mine.csv", "best/thesis.tex", "journal/own"])
def test_a_file_of_the_users_in_a_folder_of_results_stays(name: str, tmp_path: Path):
    (tmp_path / "sweep.json").write_text("{}")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(JaxpflError, match=rf"--force would delete {tmp_path / name}, which is not part of the results"):
        run_folder.clear(tmp_path, "sweep.json", ("journal", "best", "methods"))
    assert (tmp_path / name).read_text() == "mine"
    assert (tmp_path / "sweep.json").exists()


@pytest.mark.parametrize("command", [("run", "local"), ("sweep", "local")])
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--force",), "--force replaces the folder that --output names: give --output too"),
        (("--force", "--resume", "--output", "x"), "--resume continues the earlier results and --force replaces them"),
    ],
)
def test_what_force_replaces_must_be_said(command: tuple[str, ...], args: tuple[str, ...], said: str, capsys):
    result = jaxpfl(capsys, *command, *args)
    assert (result.status, result.out) == (2, "")
    assert said in result.err


@pytest.mark.parametrize("content", ['{"name": "a web page"}', "no JSON", '{"config": {}, "methods": []}'])
def test_another_programs_config_is_no_run(content: str, tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text(content)
    result = jaxpfl(capsys, "run", "local", *SMALL, "--output", tmp_path, "--force")
    assert result.status == 2
    assert result.err.startswith("error: ")
    assert (tmp_path / "config.json").read_text() == content


def test_a_file_that_is_no_sweeps_keeps_everything(tmp_path: Path, capsys):
    (tmp_path / "sweep.json").write_text('{"name": "another program\'s"}')
    refused = jaxpfl(capsys, "sweep", "local", "--grid", "lr=.1", "--output", tmp_path, "--force")
    assert "is damaged or not the definition of a sweep" in refused.err


@pytest.mark.slow
def test_a_run_is_replaced_and_says_its_result_alone(tmp_path: Path, capsys):
    place = tmp_path / "run"
    args = ("run", "local", *SMALL, "--output", place, "--json")
    loud = jaxpfl(capsys, *args, "--server-lr", "0.5")  # a rate that changes nothing is warned of
    assert (loud.status, "warning: " in loud.err) == (0, True)
    refused = jaxpfl(capsys, *args, "--rounds", "2")
    assert (refused.status, "--resume continues it and --force replaces it" in refused.err) == (2, True)
    before = os.stat(place / "config.json").st_mtime_ns
    bad = jaxpfl(capsys, *args, "--force", "--model", "nonsense")
    assert (bad.status, os.stat(place / "config.json").st_mtime_ns) == (2, before)
    quiet = jaxpfl(capsys, *args, "--rounds", "2", "--server-lr", "0.5", "--force", "--quiet")
    assert (quiet.status, quiet.err, quiet.json["rounds"]) == (0, "", 2)
    assert max(json.loads(line)["round"] for line in (place / "metrics.jsonl").read_text().splitlines()) == 2
    assert names(place / "checkpoints" / "local") == {"2"}
