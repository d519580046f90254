"""Rounds until a method comes near its best, and what a client has uploaded by then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpfl.benchmarks.papers import reaching, results, run
from jaxpfl.benchmarks.papers.declared import Contender, Experiment, Printed, Reaching, Training
from jaxpfl.benchmarks.papers.reaching import reached
from jaxpfl.benchmarks.papers.way import Interrupted, Way
from jaxpfl.runs.control import Reporter

SMALL = {"data": "digits", "model": "linear", "clients": 4, "cohort": 2, "classes_per_client": 3, "local_steps": 2}
SMALL |= {"batch_size": 5, "rounds": 12, "seeds": 3, "validation_share": 0.2}


def test_reached_is_the_first_score_within_a_point_of_the_best():
    runs = {
        "at once": [98.0, 97.5, 96.0, 98.0],
        "on the way": [90.0, 97.0, 80.0, 98.0],
        "at the end alone": [10.0, 20.0, 30.0, 40.0],
        "not finite": [np.nan, 49.0, np.nan, 50.5],
        "never finite": [np.nan] * 4,
    }
    scores = np.array(list(runs.values())).T
    assert dict(zip(runs, reached(scores).tolist(), strict=True)) == {
        "at once": 0,
        "on the way": 1,
        "at the end alone": 3,
        "not finite": 3,
        "never finite": 4,
    }


def test_a_run_whose_model_is_not_finite_has_no_score():
    """Its predictions are of class 0, so that its accuracy is a number."""

    class Stub:
        def evaluate(self, state, split):
            assert split == "validation"
            broken = np.array([[False, False], [False, True]])
            return {"after": {"accuracy": np.array([[0.5, np.nan], [0.5, 0.1]]), "diverged": broken}}

        def counts(self, state):
            made = np.array([[4, 2], [3, 0]])
            return type("Counts", (), {"uploads": made, "diverged": np.array([[0, 1], [0, 0]])})

        def bytes_per_client(self):
            return 10, 20

    scores: Any = reaching._scores
    assert scores(None, Stub(), None) == {"accuracy": [0.5, None], "uploaded": [30.0, 15.0], "diverged": [1, 1]}


@pytest.mark.slow
def test_rows_are_those_of_the_scores_that_are_kept(tmp_path: Path):
    rows = (Contender("fedavg", "FedAvg", Printed(5)), Contender("local", "local"))
    one = Experiment("rounds", "a paper", "rounds", 1, (Reaching("digits", Training("digits", SMALL, rows), stops=4),))
    found = run.run(one, Way(results.place(tmp_path, one, quick=False))).rows
    assert [(row.method, row.setting) for row in found] == [
        (label, f"digits, {part}") for label in ("FedAvg", "local") for part in ("rounds", "MB uploaded by a client")
    ]
    stored = json.loads((tmp_path / "rounds" / "runs" / "digits-FedAvg" / "reaching.json").read_text())
    at = reached(100 * np.array(stored["accuracy"]))
    want = 3.0 * (at + 1)  # of 12 rounds every third is scored
    assert (found[0].ours, found[0].std) == pytest.approx((want.mean(), want.std(ddof=1)))
    assert (found[0].printed, found[0].difference) == (5, None)
    # Half of the clients upload in each round: 650 numbers of four bytes.
    assert found[1].ours == pytest.approx(want.mean() / 2 * 650 * 4 / 1e6)
    assert found[3].ours == 0  # local training uploads nothing
    assert run.run(one, Way(results.place(tmp_path, one, quick=False), stopped=lambda: True)).rows == found


@pytest.mark.slow
def test_a_row_that_was_stopped_goes_on_with_the_same_numbers(tmp_path: Path):
    class Rounds(Reporter):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def progress(self, done: int, loss: float) -> None:
            self.seen.append(done)

    case = Reaching("digits", Training("digits", SMALL, (Contender("fedavg", "FedAvg"),)), stops=4)
    one = Experiment("rounds", "a paper", "rounds", 1, (case,))

    def session(folder: str, looks: float) -> tuple[list[int], Any]:
        reporter, left = Rounds(), iter(range(10**6))
        way = Way(
            results.place(tmp_path / folder, one, quick=False), reporter=reporter, stopped=lambda: next(left) >= looks
        )
        try:
            return reporter.seen, run.run(one, way).rows
        except Interrupted:
            return reporter.seen, None

    def kept(folder: str) -> list[dict[str, Any]]:
        found = json.loads((tmp_path / folder / "rounds" / "runs" / "digits-FedAvg" / "reaching.json").read_text())
        return [found[name] for name in ("accuracy", "uploaded", "diverged")]

    unfinished = tmp_path / "parts" / "rounds" / "runs" / "digits-FedAvg" / "reaching.unfinished"
    assert session("parts", 2) == ([3, 6], None)
    assert session("parts", 1) == ([9], None)
    assert unfinished.is_dir()
    seen, rows = session("parts", np.inf)
    assert seen == [12]
    assert not unfinished.exists()
    assert (list(range(3, 13, 3)), rows) == session("whole", np.inf)
    assert kept("parts") == kept("whole")
