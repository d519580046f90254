"""``--force`` replaces what the same command wrote and nothing else; ``--quiet`` leaves the result and errors alone."""

import json
import os
import shutil
from pathlib import Path

import pytest
from command import SMALL, jaxpfl

from jaxpfl.runs import run_folder
from jaxpfl.support.errors import JaxpflError

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


def test_a_file_of_anyone_elses_keeps_everything(folder: Path):
    (folder / "notes.txt").touch()
    before = names(folder)
    with pytest.raises(JaxpflError, match=r"^--force would delete .*notes\.txt, which is not part of the results"):
        run_folder.clear(folder, "config.json", run_folder.RUN_PARTS)
    assert names(folder) == before


def test_the_summary_goes_first_and_the_mark_last(folder: Path, monkeypatch: pytest.MonkeyPatch):
    removed: list[str] = []
    monkeypatch.setattr(shutil, "rmtree", lambda path: removed.append(path.name))
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: removed.append(path.name))
    run_folder.clear(folder, "config.json", run_folder.RUN_PARTS)
    assert set(removed[:-1]) == {"methods", "metrics.jsonl", "summary.json"}
    assert (removed[0], removed[-1]) == ("summary.json", "config.json")


@pytest.mark.parametrize("name", ["plots/notes.txt", "methods/mine.csv", "best/thesis.tex", "journal/own"])
def test_a_file_of_the_users_in_a_folder_of_results_stays(name: str, tmp_path: Path):
    (tmp_path / "sweep.json").write_text("{}")
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("mine")
    with pytest.raises(JaxpflError, match=rf"--force would delete {tmp_path / name}, which is not part of the results"):
        run_folder.clear(tmp_path, "sweep.json", ("journal", "best", "methods"))
    assert (tmp_path / name).read_text() == "mine"


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
