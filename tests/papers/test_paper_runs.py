"""Runs of experiments: what is done is kept, a stopped run goes on, and folders of something else are refused."""

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass

import numpy as np
import pytest

from jaxpfl import JaxpflError
from jaxpfl.benchmarks.papers import estimate, registry, results, run, show, whole
from jaxpfl.benchmarks.papers.declared import Contender, Estimate, Estimation, Experiment, Figure, Printed, Training
from jaxpfl.benchmarks.papers.train import QUICK_NOTE, Interrupted, Way
from jaxpfl.runs.config import RunConfig, resolve
from jaxpfl.runs.sweep.execute import Data
from jaxpfl.runs.sweep.progress import Reporter
from jaxpfl.studies.study import Read, Results, Study
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflWarning

RAN = []


@dataclass(frozen=True)
class Settings:
    clients: int = 10
    repetitions: int = 4
    seed: int = 0

    def check(self):
        if self.clients < 1:
            raise JaxpflError(f"clients must be at least 1, got {self.clients}")


def study(given):
    RAN.append(given)
    local = np.arange(1.0, given.repetitions + 1)
    return Results(
        {"study": "fake", "settings": vars(given), "deep": {"er": [0.5, 7]}},
        list,
        lambda folder: [],
        {"local": local, "personalized": local / 4},
    )


@pytest.fixture(autouse=True)
def _fake(monkeypatch):
    RAN.clear()
    monkeypatch.setattr(estimate.registry, "get", lambda name: Study(Settings, study))


def case(clients, **more):
    rows = (
        Estimate("gain", "personalized", Printed(75.0, 2.0), "local"),
        Estimate("number", "deep.er[1]", Printed(6.0), note="of print"),
    )
    return Estimation(f"m = {clients}", "fake", {"clients": clients}, rows, x=clients, **more)


EXPERIMENT = Experiment(
    "fake", "a paper, Figure 1", "errors", 1, (case(10), case(20)), Figure("m", "gain, %"), note="all"
)


def way(folder, experiment=EXPERIMENT, *, quick=False, **more):
    return Way(results.place(folder, experiment, quick=quick), quick, **more)


def test_rows_and_files(tmp_path):
    found = run.run(EXPERIMENT, way(tmp_path))
    gain, number = found.rows[:2]
    assert (gain.ours, gain.std, gain.printed, gain.note) == (75.0, 0.0, 75.0, "all")
    assert gain.difference == 0
    assert (number.ours, number.std, number.difference, number.note) == (7.0, None, None, "of print; all")
    assert [row.setting for row in found.rows] == ["m = 10", "m = 10", "m = 20", "m = 20"]
    assert results.of_folder(tmp_path) == ([found], {})
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == found.tidy()
    assert (tmp_path / "fake" / "table.md").read_text() == show.markdown([found])
    assert (tmp_path / "fake" / "figure.png").stat().st_size > 1000


def test_a_stopped_run_goes_on(tmp_path):
    asked = []

    def stopped():
        asked.append(True)
        return len(asked) > 1

    with pytest.raises(Interrupted):
        run.run(EXPERIMENT, way(tmp_path, stopped=stopped))
    assert [given.clients for given in RAN] == [10]
    assert results.of_folder(tmp_path) == ([], {})
    found = run.run(EXPERIMENT, way(tmp_path))
    assert [given.clients for given in RAN] == [10, 20]
    assert run.run(EXPERIMENT, way(tmp_path)).rows == found.rows
    assert len(RAN) == 2


def test_a_result_has_the_versions_of_all_sessions_that_measured_something(tmp_path, monkeypatch):
    def on(**here):
        monkeypatch.setattr(run, "versions", lambda: {"jax": "1", "devices": 1} | here)

    on(jax="0")
    with pytest.raises(Interrupted):
        run.run(EXPERIMENT, way(tmp_path, stopped=lambda: len(RAN) == 1))
    on(devices=2)
    both = {"jax": "0 and 1", "devices": "1 and 2"}
    assert run.run(EXPERIMENT, way(tmp_path)).versions == both
    on(jax="2")  # reads what is there
    assert run.run(EXPERIMENT, way(tmp_path)).versions == both


def test_versions_are_written_before_anything_is_measured(tmp_path, monkeypatch):
    """So that those of a session that is killed are known."""
    monkeypatch.setattr(run, "versions", lambda: {"jax": "0"})
    path, seen = way(tmp_path).folder / "experiment.json", []

    class Reading(Reporter):
        def start(self, group, runs, rounds):
            seen.append(json.loads(path.read_text())["versions"])

    run.run(EXPERIMENT, way(tmp_path, reporter=Reading()))
    assert seen == [[{"jax": "0"}]] * 2


def test_an_older_folder_does_not_know_its_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "versions", lambda: {"jax": "1"})
    with pytest.raises(Interrupted):
        run.run(EXPERIMENT, way(tmp_path, stopped=lambda: len(RAN) == 1))
    path = way(tmp_path).folder / "experiment.json"
    path.write_text(
        json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != "versions"})
    )
    assert run.run(EXPERIMENT, way(tmp_path)).versions == {"jax": "unknown and 1"}


def test_whatever_a_reporter_is_told_is_passed_on():
    told = {name for name in vars(Reporter) if not name.startswith("_")}
    assert told == {name for name in vars(run._Watching) if not name.startswith("_")}


@pytest.mark.parametrize("stored", [5, [5], [{"jax": [0]}], [{}], "x"])
def test_versions_that_are_none_are_left_out(tmp_path, stored):
    run.run(EXPERIMENT, way(tmp_path))
    path = way(tmp_path).folder / "experiment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"versions": stored}))
    assert run.run(EXPERIMENT, way(tmp_path)).versions == run.versions()


def test_a_stop_within_a_study_may_come_at_once(tmp_path):
    """Nothing is lost by it, where it is the only one: all of its repetitions are one call."""
    said = []
    run.run(EXPERIMENT, way(tmp_path, saves=lambda on: said.append((on, len(RAN)))))
    assert said == [(False, 0), (True, 1), (False, 1), (True, 2)]


def test_a_folder_says_whose_it_is_before_anything_runs(tmp_path):
    """So that what a kill left is gone on with."""
    seen = []
    run.run(EXPERIMENT, way(tmp_path, stopped=lambda: seen.append((tmp_path / "fake" / "experiment.json").exists())))
    assert seen == [True, True]


def test_an_experiment_that_cannot_begin_leaves_nothing(tmp_path):
    bad = dataclasses.replace(EXPERIMENT, cases=(dataclasses.replace(case(10), settings={"clients": 0}),))
    with pytest.raises(JaxpflError):
        run.run(bad, way(tmp_path))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_quick_run_says_how_it_is_scaled_down_and_is_kept_apart(tmp_path):
    scaled = dataclasses.replace(
        EXPERIMENT, cases=(case(10, quick={"clients": 3}), case(20, repetitions=2)), figure=None
    )
    fewer, repeated = (run.run(scaled, way(tmp_path, scaled, quick=True)).rows[i] for i in (0, 2))
    assert "scaled-down quick run (clients 3): not comparable with print" in fewer.note
    assert fewer.difference is None
    assert "scaled-down quick run (repetitions 2): not comparable with print" in repeated.note
    assert repeated.difference is None
    number = run.run(scaled, way(tmp_path, scaled, quick=True)).rows[1]
    assert number.note == fewer.note  # what is declared of the full run is left out
    assert [given.clients for given in RAN[:2]] == [3, 20]
    assert not (tmp_path / "fake").exists()
    assert show.QUICK in (tmp_path / "fake-quick" / "table.md").read_text()


def test_what_another_declaration_left_is_refused(tmp_path):
    run.run(EXPERIMENT, way(tmp_path))
    changed = dataclasses.replace(EXPERIMENT, cases=(dataclasses.replace(case(10), settings={"clients": 11}),))
    with pytest.raises(JaxpflError, match="of other settings"):
        run.run(changed, way(tmp_path))
    state = tmp_path / "fake" / "experiment.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"quick": True}))
    with pytest.raises(JaxpflError, match=r'is not of the full run of "fake"'):
        run.run(EXPERIMENT, way(tmp_path))


def test_other_data_are_refused(tmp_path, monkeypatch):
    held, reads = np.zeros(3), []

    def read(given):
        reads.append(given)
        return Read("the data", (held,))

    def with_data(given, data):
        assert data == "the data"
        return study(given)

    monkeypatch.setattr(estimate.registry, "get", lambda name: Study(Settings, with_data, reads=read))
    first = run.run(EXPERIMENT, way(tmp_path))
    assert len(reads) == len(RAN) == 2  # once for the checksum and the study
    assert run.run(EXPERIMENT, way(tmp_path)).rows == first.rows
    held[1] = 1
    with pytest.raises(JaxpflError, match=r"m-10\.json is of other data: choose another --output"):
        run.run(EXPERIMENT, way(tmp_path))
    assert len(RAN) == 2


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "mine").write_text("")
    with pytest.raises(JaxpflError, match="not empty"):
        run.run(EXPERIMENT, way(tmp_path))
    (tmp_path / "fake" / "mine").unlink()
    (tmp_path / "fake" / "experiment.json").write_text('{"name": "other", "quick": false}')
    with pytest.raises(JaxpflError, match='not of the full run of "fake"'):
        run.run(EXPERIMENT, way(tmp_path))


def test_a_bad_declaration_is_one_line(tmp_path):
    for settings, said in (({"client": 3}, "did you mean 'clients'"), ({"clients": 0}, "at least 1")):
        bad = dataclasses.replace(EXPERIMENT, cases=(dataclasses.replace(case(10), settings=settings),))
        with pytest.raises(JaxpflError, match=said):
            run.run(bad, way(tmp_path))
    bad = dataclasses.replace(case(10), estimates=(Estimate("x", "persnalized"),))
    with pytest.raises(JaxpflError, match="did you mean 'personalized'"):
        run.run(dataclasses.replace(EXPERIMENT, cases=(bad,)), way(tmp_path / "other"))


SMALL = {"data": "digits", "model": "linear", "clients": 4, "cohort": 2, "classes_per_client": 3, "local_steps": 2}
SMALL |= {"batch_size": 5, "rounds": 6, "seeds": 2}


@pytest.mark.slow
def test_a_search_then_runs_on_all_seeds_stopped_and_gone_on_with(tmp_path):
    rows = (Contender("fedavg", "FedAvg", Printed(50.0, 1.0)),)
    training = Training("digits", SMALL, rows, {"lr": (0.01, 0.1)})
    trained = Experiment("trained", "a paper", "accuracy", 1, (training,))
    asked = []

    def stopped():
        asked.append(True)
        return (tmp_path / "trained" / "runs" / "digits-FedAvg" / "final").exists()

    with pytest.raises(Interrupted):
        run.run(trained, way(tmp_path, trained, stopped=stopped))
    search = tmp_path / "trained" / "runs" / "digits-FedAvg" / "search" / "journal" / "main.jsonl"
    before = search.read_text()
    (row,) = run.run(trained, way(tmp_path, trained)).rows
    assert search.read_text() == before
    assert len(before.splitlines()) == 2
    assert "chosen on validation" in row.note
    assert row.std is not None
    assert row.difference == pytest.approx((row.ours - 50) / np.hypot(row.std, 1))
    assert run.run(trained, way(tmp_path, trained)).rows == (row,)


NAMES = list(registry.EXPERIMENTS)
if "JAXPFL_ALL_PAPERS" not in os.environ:
    NAMES = [pytest.param("all", marks=pytest.mark.skip(reason="takes minutes: JAXPFL_ALL_PAPERS=1 runs every table"))]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_quick_run(tmp_path, monkeypatch, name):
    monkeypatch.undo()
    one = registry.get(name)
    found = run.run(one, way(tmp_path, one, quick=True))
    assert all(row.ours is not None for row in found.rows)


@pytest.mark.slow
def test_a_quick_run_of_each_kind(tmp_path, monkeypatch):
    monkeypatch.undo()  # the real studies
    for name in ("adaped-full-mnist", "persfl-table5-mnist", "network-figure6", "histograms-table1"):
        one = registry.get(name)
        found = run.run(one, way(tmp_path, one, quick=True))
        assert all(row.ours is not None for row in found.rows)
        assert all(row.difference is None and "not comparable" in row.note for row in found.rows)
        if name == "adaped-full-mnist":
            assert all(QUICK_NOTE in row.note for row in found.rows)
    assert len(results.of_folder(tmp_path).results) == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("minutes", None),
        ("minutes", "x"),
        ("versions", []),
        ("ours", "x"),
        ("ours", True),
        ("quick", []),
        ("quick", "no"),
    ],
)
def test_a_result_of_other_types_is_refused(tmp_path, name, value):
    run.run(EXPERIMENT, Way(tmp_path / "fake"))
    path = tmp_path / "fake" / results.RESULT
    stored = files.read_checksummed(path)
    (stored["rows"][0] if name == "ours" else stored)[name] = value
    files.write_checksummed(path, stored)
    with pytest.raises(JaxpflError, match="holds no result of jaxpfl papers run"):
        results.read(path)


def test_a_result_that_was_changed_is_refused(tmp_path):
    run.run(EXPERIMENT, Way(tmp_path / "fake"))
    path = tmp_path / "fake" / results.RESULT
    path.write_text(path.read_text().replace('"ours": 75.0', '"ours": 76.0', 1))
    with pytest.raises(JaxpflError, match="is damaged, or was changed: jaxpfl papers run makes it again"):
        results.read(path)
    files.write_json(path, run.run(EXPERIMENT, Way(tmp_path / "fake")).to_json())
    with pytest.raises(JaxpflError, match="has no checksum"):
        results.read(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.json", "[1]"),
        ("rows.json", '{"rows": [{"mine": 1}]}'),
        ("rows.json", '{"rows": [], "mine": 1}'),
        ("rows.csv", "mine,2\n"),
        ("rows.csv", "name,paper,year\n1,2,3\n"),
    ],
)
def test_rows_of_something_else_are_not_written_over(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(JaxpflError, match=f"{name} is not of jaxpfl papers run"):
        run.run(EXPERIMENT, way(tmp_path))
    assert (tmp_path / name).read_text() == text
    assert [one.name for one in tmp_path.iterdir()] == [name]
    (tmp_path / name).unlink()
    run.run(EXPERIMENT, way(tmp_path))
    assert run.run(EXPERIMENT, way(tmp_path)).rows  # over its own


def test_rows_that_are_no_files_are_not_written_over(tmp_path):
    os.mkfifo(tmp_path / "rows.csv")
    with pytest.raises(JaxpflError, match=r"rows\.csv is not of jaxpfl papers run"):
        run.run(EXPERIMENT, way(tmp_path))
    (tmp_path / "rows.csv").unlink()
    (tmp_path / "rows.json").symlink_to(tmp_path / "gone")
    with pytest.raises(JaxpflError, match=r"rows\.json is not of jaxpfl papers run"):
        run.run(EXPERIMENT, way(tmp_path))


def test_a_part_of_the_data_states_no_difference_from_print(tmp_path, monkeypatch):
    """The notes of a table are of its whole data set, and so is what print says of it."""
    read = Study(Settings, lambda given, data: study(given), reads=lambda given: Read(None, (np.zeros(3), np.ones(2))))
    monkeypatch.setattr(estimate.registry, "get", lambda name: read)
    assert all("comparable" not in row.note for row in run.run(EXPERIMENT, way(tmp_path / "unknown")).rows)
    monkeypatch.setitem(whole.SIZES, "fake", 3)
    assert run.run(EXPERIMENT, way(tmp_path / "whole")).rows[0].difference == 0
    monkeypatch.setitem(whole.SIZES, "fake", 3111)
    rows = run.run(EXPERIMENT, way(tmp_path / "part")).rows
    said = "the data set fake has 3 entries, the whole 3111: not comparable with print"
    assert all(row.difference is None and row.note.startswith(said) for row in rows)
    assert rows[0].ours == 75.0


def test_a_part_of_trained_data_states_no_difference_from_print(tmp_path, monkeypatch):
    config = {"data": "digits", "clients": 4, "model": "linear", "rounds": 1, "seeds": 2}
    row = Contender("local", "local", Printed(50.0, 1.0))
    experiment = Experiment("small", "a paper", "digits", 1, (Training("digits", config, (row,)),))
    monkeypatch.setitem(whole.SIZES, "digits", 1797)
    assert run.run(experiment, way(tmp_path, experiment)).rows[0].difference is not None
    altered = Data().checksum(resolve(RunConfig(data="digits")))
    monkeypatch.setitem(whole.ALTERED, altered, "digits as altered here")
    (found,) = run.run(experiment, way(tmp_path, experiment)).rows
    assert (found.note, found.difference is None) == ("digits as altered here", False)
    monkeypatch.setitem(whole.SIZES, "digits", 70_000)
    (found,) = run.run(experiment, way(tmp_path, experiment)).rows
    assert found.difference is None
    assert found.note.startswith("the data set digits has 1797 entries, the whole 70000")


def test_no_error_to_avoid_is_no_gain(tmp_path, monkeypatch):
    none = Results(
        {"deep": {"er": [0.5, 7]}}, list, lambda folder: [], dict.fromkeys(("local", "personalized"), np.zeros(4))
    )
    monkeypatch.setattr(estimate.registry, "get", lambda name: Study(Settings, lambda given: none))
    gain = run.run(EXPERIMENT, way(tmp_path)).rows[0]
    assert (gain.ours, gain.difference) == (None, None)
    assert "no value: 4 of 4 repetitions are not finite" in gain.note


@pytest.mark.parametrize("seconds", [float("nan"), -1e9, 10**400, "x"])
def test_seconds_that_are_no_time_count_as_none(tmp_path, seconds):
    run.run(EXPERIMENT, Way(tmp_path / "fake"))
    state = tmp_path / "fake" / "experiment.json"
    state.write_text(json.dumps({"name": "fake", "quick": False, "seconds": seconds}))
    assert 0 <= run.run(EXPERIMENT, Way(tmp_path / "fake")).minutes < 1


def test_a_folder_whose_runs_were_removed_can_be_run_again_after_a_stop(tmp_path):
    rows = run.run(EXPERIMENT, way(tmp_path)).rows
    shutil.rmtree(tmp_path / "fake" / "runs")
    with pytest.raises(Interrupted):
        run.run(EXPERIMENT, way(tmp_path, stopped=lambda: True))
    assert run.run(EXPERIMENT, way(tmp_path)).rows == rows


def test_a_copy_of_a_run_does_not_take_its_place(tmp_path):
    found = run.run(EXPERIMENT, way(tmp_path))
    shutil.copytree(tmp_path / "fake", tmp_path / "fake-old")
    path = tmp_path / "fake-old" / results.RESULT
    stored = files.read_checksummed(path)
    files.write_checksummed(path, stored | {"paper": f"an old {stored['paper']}"})
    shutil.copytree(tmp_path / "fake", tmp_path / "fake-quick")  # a full one in the folder of a quick one
    with pytest.warns(JaxpflWarning, match="fake-(old|quick).*has a folder of another name"):
        assert results.of_folder(tmp_path).results == [found]


def test_a_damaged_result_of_another_table_does_not_fail_a_run(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / results.RESULT).write_text("{")
    with pytest.warns(JaxpflWarning, match="left out of rows.json and rows.csv.*other"):
        found = run.run(EXPERIMENT, Way(tmp_path / "fake"))
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == len(found.rows)


@pytest.mark.parametrize("stored", ["[]", "{}", '{"values": {"local": ["x"]}}', '{"values"', '{"crc32": 1e999}'])
def test_a_damaged_study_is_refused(tmp_path, stored):
    run.run(EXPERIMENT, way(tmp_path))
    (tmp_path / "fake" / "runs" / "m-10.json").write_text(stored)
    with pytest.raises(JaxpflError, match=r"m-10\.json.*: without the file it is run again"):
        run.run(EXPERIMENT, way(tmp_path))


def test_a_study_that_was_cut_is_refused(tmp_path):
    run.run(EXPERIMENT, way(tmp_path))
    path = tmp_path / "fake" / "runs" / "m-10.json"
    stored = json.loads(path.read_text())
    stored["values"] = {name: own[:2] for name, own in stored["values"].items()}
    path.write_text(json.dumps(stored))
    with pytest.raises(JaxpflError, match=r"m-10\.json is damaged, or was changed"):
        run.run(EXPERIMENT, way(tmp_path))


def test_repetitions_that_are_not_finite_are_said(tmp_path):
    run.run(EXPERIMENT, way(tmp_path))
    path = tmp_path / "fake" / "runs" / "m-10.json"
    stored = files.read_checksummed(path)
    stored["values"]["personalized"][1] = None
    files.write_checksummed(path, stored)
    gain = run.run(EXPERIMENT, way(tmp_path)).rows[0]
    assert gain.ours is None
    assert "1 of 4 repetitions are not finite" in gain.note
