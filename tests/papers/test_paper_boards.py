"""Rows that are scored on their way: after the last round, in the best one on test, and at equal gradient steps."""

import dataclasses
import json

import numpy as np
import pytest

from jaxpfl.benchmarks.papers import board, registry, results, run
from jaxpfl.benchmarks.papers.declared import Contender, Experiment, Printed, Training
from jaxpfl.benchmarks.papers.train import config_of
from jaxpfl.benchmarks.papers.way import Interrupted, Way

SMALL = {"data": "digits", "model": "linear", "clients": 4, "cohort": 4, "partition": "dirichlet-class", "alpha": 0.5}
SMALL |= {"local_epochs": 1, "batch_size": 20, "rounds": 6, "seeds": 2, "test_share": 0.25}
ROWS = (Contender("ditto", "Ditto", Printed(50.0, 1.0), ("lr_decay=1",)),)
CASE = Training("digits", SMALL, ROWS, every=2)
EXPERIMENT = Experiment("board", "a paper", "accuracy", 1, (CASE,))


def way(folder, **more):
    return Way(results.place(folder, EXPERIMENT, quick=False), **more)


def test_a_method_of_two_gradients_is_at_those_of_the_others_half_way():
    config = config_of(CASE, ROWS[0])
    assert board.stops_of(config, "ditto", 2) == ((2, 3, 4, 6), 3)
    config = dataclasses.replace(config, set=())
    assert board.stops_of(config, "fedavg", 4) == ((4, 6), 6)
    for method, why in (("l2gd", "number of gradients is random"), ("fedala", "not proportional to its steps")):
        stops, equal = board.stops_of(config, method, 4)
        assert stops == (4, 6)
        assert why in equal
        assert "; " not in equal  # which parts remarks


@pytest.mark.slow
def test_three_rows_of_one_run(tmp_path):
    last, best, equal = run.run(EXPERIMENT, way(tmp_path)).rows
    assert [row.setting for row in (last, best, equal)] == [f"digits, {part}" for part in board.PARTS]
    stored = json.loads((tmp_path / "board" / "runs" / "digits-Ditto" / "curve.json").read_text())
    curve = 100 * np.array(stored["accuracy"])
    assert curve.shape == (4, 2)
    assert last.ours == pytest.approx(curve[-1].mean())
    assert best.ours == pytest.approx(curve.max(axis=0).mean())
    assert equal.ours == pytest.approx(curve[1].mean())
    assert (best.printed, last.printed, equal.printed) == (50.0, None, None)
    assert "chosen by its test score" in best.note
    assert "chosen on test" not in last.note
    assert run.run(EXPERIMENT, way(tmp_path, stopped=lambda: True)).rows == (last, best, equal)


def test_a_stopped_run_leaves_no_row(tmp_path):
    with pytest.raises(Interrupted):
        run.run(EXPERIMENT, way(tmp_path, stopped=lambda: True))
    assert not (tmp_path / "board").exists() or not list((tmp_path / "board").rglob("curve.json"))


def test_scores_are_of_all_test_examples():
    class Stub:
        def evaluate(self, state):
            return {"after": {"accuracy": np.array([[1.0, 0.0, np.nan]]), "diverged": np.zeros((1, 3), bool)}}

        def counts(self, state):
            return type("Counts", (), {"diverged": np.zeros((1, 3), int)})

    sizes = type("Split", (), {"size": np.array([30, 10, 0])})
    experiment = type("Experiment", (), {"federation": type("Federation", (), {"test": sizes})})
    assert board._accuracy(experiment, Stub(), None) == {"accuracy": [0.75], "diverged": [0]}


def test_boards_have_rates_by_steps_alone_so_that_a_short_run_is_the_beginning_of_a_long_one():
    cases = [case for one in registry.EXPERIMENTS.values() for case in one.cases]
    found = [case for case in cases if isinstance(case, Training) and case.every is not None]
    assert len(found) >= 6
    for case in found:
        assert "lr_schedule" not in case.config  # the only rates that know the number of rounds
        assert all({"lr_decay=1", "decay_every=60"} & set(row.set) for row in case.contenders)
        assert "local" in {row.method for row in case.contenders}
        assert 0 < len(case.rows(quick=True)) <= 2
