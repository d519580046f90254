"""Runs of experiments: what is done is kept, a stopped run goes on, and folders of something else are refused."""

import dataclasses
import itertools
import json
from dataclasses import dataclass

import numpy as np
import pytest

from jaxpfl import JaxpflError
from jaxpfl.benchmarks.papers import estimate, registry, results, run, show, whole
from jaxpfl.benchmarks.papers.declared import Contender, Estimate, Estimation, Experiment, Figure, Printed, Training
from jaxpfl.benchmarks.papers.train import QUICK_NOTE, Interrupted, Way
from jaxpfl.studies.study import Read, Results, Study
from jaxpfl.support import files

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
    asked = itertools.chain([False], itertools.repeat(True))
    with pytest.raises(Interrupted):
        run.run(EXPERIMENT, way(tmp_path, stopped=asked.__next__))
    assert [given.clients for given in RAN] == [10]
    assert results.of_folder(tmp_path) == ([], {})
    found = run.run(EXPERIMENT, way(tmp_path))
    assert [given.clients for given in RAN] == [10, 20]
    assert run.run(EXPERIMENT, way(tmp_path)).rows == found.rows
    assert len(RAN) == 2


def test_a_quick_run_says_how_it_is_scaled_down_and_is_kept_apart(tmp_path):
    scaled = dataclasses.replace(
        EXPERIMENT, cases=(case(10, quick={"clients": 3}), case(20, repetitions=2)), figure=None
    )
    fewer, repeated = (run.run(scaled, way(tmp_path, scaled, quick=True)).rows[i] for i in (0, 2))
    assert "scaled-down quick run (clients 3): not comparable with the paper" in fewer.note
    assert fewer.difference is None
    assert "scaled-down quick run (repetitions 2): not comparable with the paper" in repeated.note
    assert repeated.difference is None
    number = run.run(scaled, way(tmp_path, scaled, quick=True)).rows[1]
    assert number.note == fewer.note  # what is declared of the full run is left out
    assert [given.clients for given in RAN[:2]] == [3, 20]
    assert not (tmp_path / "fake").exists()
    assert show.QUICK in (tmp_path / "fake-quick" / "table.md").read_text()


def test_what_another_declaration_left_is_refused(tmp_path):
    run.run(EXPERIMENT, way(tmp_path))
    changed = dataclasses.replace(EXPERIMENT, cases=(dataclasses.replace(case(10), settings={"clients": 11}),))
    with pytest.raises(JaxpflError, match="with different settings"):
        run.run(changed, way(tmp_path))
    state = tmp_path / "fake" / "experiment.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"quick": True}))
    with pytest.raises(JaxpflError, match=r'does not belong to the full run of "fake"'):
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
    with pytest.raises(JaxpflError, match=r"m-10\.json was written for different data: choose another --output"):
        run.run(EXPERIMENT, way(tmp_path))
    assert len(RAN) == 2


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "mine").write_text("")
    with pytest.raises(JaxpflError, match="not empty"):
        run.run(EXPERIMENT, way(tmp_path))
    (tmp_path / "fake" / "mine").unlink()
    (tmp_path / "fake" / "experiment.json").write_text('{"name": "other", "quick": false}')
    with pytest.raises(JaxpflError, match='does not belong to the full run of "fake"'):
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
    place = tmp_path / "trained" / "runs" / "digits-FedAvg"
    with pytest.raises(Interrupted):
        run.run(trained, way(tmp_path, trained, stopped=(place / "final").exists))
    search = place / "search" / "journal" / "main.jsonl"
    before = search.read_text()
    (row,) = run.run(trained, way(tmp_path, trained)).rows
    assert search.read_text() == before
    assert len(before.splitlines()) == 2
    assert "chosen on validation" in row.note
    assert row.difference == pytest.approx((row.ours - 50) / np.hypot(row.std, 1))
    assert run.run(trained, way(tmp_path, trained)).rows == (row,)


@pytest.mark.slow
def test_a_quick_run_of_each_kind(tmp_path):
    """Of training; tests/cli/test_estimate_histogram.py has one of a study."""
    for name in ("adaped-full-mnist", "persfl-table5-mnist"):
        one = registry.get(name)
        found = run.run(one, way(tmp_path, one, quick=True))
        assert all(row.ours is not None for row in found.rows)
        assert all(row.difference is None and "not comparable" in row.note for row in found.rows)
        if name == "adaped-full-mnist":
            assert all(QUICK_NOTE in row.note for row in found.rows)
    assert len(results.of_folder(tmp_path).results) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("minutes", None), ("versions", []), ("quick", "no")),
        *(("ours", value) for value in ("x", 10**400, float("inf"), float("nan"))),
    ],
)
def test_a_result_of_other_types_is_refused(tmp_path, name, value):
    run.run(EXPERIMENT, Way(tmp_path / "fake"))
    path = tmp_path / "fake" / results.RESULT
    stored = files.read_checksummed(path)
    (stored["rows"][0] if name == "ours" else stored)[name] = value
    path.write_text(json.dumps(stored | {"crc32": files._sum(stored)}))
    with pytest.raises(JaxpflError, match="holds no result of jaxpfl papers run"):
        results.read(path)


def test_a_result_that_was_changed_is_refused(tmp_path):
    run.run(EXPERIMENT, Way(tmp_path / "fake"))
    path = tmp_path / "fake" / results.RESULT
    path.write_text(path.read_text().replace('"ours": 75.0', '"ours": 76.0', 1))
    with pytest.raises(JaxpflError, match="is damaged or was changed: run jaxpfl papers run again to recreate it"):
        results.read(path)
    files.write_json(path, run.run(EXPERIMENT, Way(tmp_path / "fake")).to_json())
    with pytest.raises(JaxpflError, match="has no checksum"):
        results.read(path)


def test_a_part_of_the_data_states_no_difference_from_print(tmp_path, monkeypatch):
    """The notes of a table are of its whole data set, and so is what print says of it."""
    read = Study(Settings, lambda given, data: study(given), reads=lambda given: Read(None, (np.zeros(3), np.ones(2))))
    monkeypatch.setattr(estimate.registry, "get", lambda name: read)
    assert all("comparable" not in row.note for row in run.run(EXPERIMENT, way(tmp_path / "unknown")).rows)
    monkeypatch.setitem(whole.SIZES, "fake", 3)
    assert run.run(EXPERIMENT, way(tmp_path / "whole")).rows[0].difference == 0
    monkeypatch.setitem(whole.SIZES, "fake", 3111)
    rows = run.run(EXPERIMENT, way(tmp_path / "part")).rows
    said = "the data set fake has 3 entries of 3111: not comparable with the paper"
    assert all(row.difference is None and row.note.startswith(said) for row in rows)
    assert rows[0].ours == 75.0
