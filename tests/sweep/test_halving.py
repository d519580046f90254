"""Successive halving: rungs, decisions from records alone, and survivors that are what they are without it."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import sweep_of

from jaxpfl.engine import Simulation
from jaxpfl.runs.control import Reporter
from jaxpfl.runs.records import DIVERGED, DONE, FAILED, STOPPED, Record, load_sweep
from jaxpfl.runs.sweep import plan, runner
from jaxpfl.runs.sweep.execute import States
from jaxpfl.runs.sweep.plan import Group, rungs
from jaxpfl.runs.sweep.runner import run_missing
from jaxpfl.runs.sweep.sweep import Sweep
from jaxpfl.support.errors import JaxpflError

LRS = "lr=.001,.01,.1,.2,.3,.4,.5,.6,.7"

COUNTS = ["gradients", "bytes_up", "client_steps", "rounds"]
SCORES = ["personalized_accuracy", "validation_accuracy", "train_loss"]


def of(*axes: str, by: int = 3, first: int | None = None, **changes: Any) -> Any:
    changes = {"seeds": 1, "rounds": 9} | changes
    return sweep_of(*axes, search={"halving": by, "halving_first": first}, **changes)


def ends(definition: Any, rounds: int) -> list[int]:
    return [math.ceil(rounds * share - 1e-9) for share in rungs(definition, "fedavg")]


def test_rungs():
    assert ends(of(LRS), 9) == [1, 3, 9]
    assert ends(of(LRS, first=3), 9) == [3, 9]
    assert ends(of(LRS, rounds=90), 90) == [10, 30, 90]
    assert ends(of(LRS, rounds=2), 2) == [1, 2]
    assert ends(of(LRS, by=2, rounds=100, first=20), 100) == [20, 40, 80, 100]
    assert ends(of("lr=.1"), 9) == [9]
    assert plan.planned_runs(of(LRS)) == 9 + 3 + 1


def played(definition: Any, score: Any, most: int | None = None) -> dict[str, Record]:
    """The records of a sweep whose runs' scores are ``score(lr, seed)``; of so many of them only."""
    found: dict[str, Record] = {}
    while groups := plan.missing_at_rungs(definition, found):
        for run in (run for group in groups for run in group.runs):
            if most is not None and len(found) >= most and run.id not in found:
                return found
            group = next(group for group in groups if run in group.runs)
            found[run.id] = outcome(group, run, score)
    return found


def outcome(group: Group, run: Any, score: Any) -> Record:
    assert group.until is not None
    value = score(run.settings["lr"], run.seed)
    status = DONE if group.until == group.rounds else STOPPED
    if isinstance(value, str):
        return Record(run.method, run.settings, run.seed, value, "so", group.until)
    return Record(run.method, run.settings, run.seed, status, "", group.until, {"validation_accuracy": value})


def rounds_by_lr(found: dict[str, Record]) -> dict[Any, list[int]]:
    lrs = dict.fromkeys(one.settings["lr"] for one in found.values())
    return {lr: [one.rounds for one in found.values() if one.settings["lr"] == lr] for lr in lrs}


def test_the_best_third_goes_on_by_the_mean_over_seeds():
    definition = of(LRS, seeds=2)
    scores = {0.1: (0.9, 0.1), 0.2: (0.6, 0.6), 0.3: (0.5, 0.6), 0.4: (0.7, 0.7)}
    found = rounds_by_lr(played(definition, lambda lr, seed: scores.get(lr, (0.0, 0.0))[seed]))
    assert found == {lr: [1, 1] for lr in found} | {0.2: [3, 3], 0.3: [3, 3], 0.4: [9, 9]}


def test_equal_scores_are_decided_by_the_order_of_the_grid():
    found = rounds_by_lr(played(of(LRS), lambda lr, seed: 0.5))
    assert [rounds for (rounds,) in found.values()] == [9, 3, 3, 1, 1, 1, 1, 1, 1]


def test_settings_that_failed_or_diverged_do_not_go_on():
    definition = of("lr=.1,.2,.3", seeds=2)

    def score(lr: float, seed: int) -> Any:
        return {0.1: (FAILED, 1.0), 0.2: (0.9, DIVERGED), 0.3: (0.1, 0.1)}[lr][seed]

    assert rounds_by_lr(played(definition, score)) == {0.1: [3, 3], 0.2: [3, 3], 0.3: [9, 9]}


@pytest.mark.slow
def test_decisions_are_the_same_from_any_moment_on():
    """Scores change from rung to rung, and later ones replace earlier ones in the records."""
    definition = of(LRS, seeds=2)
    final = played(definition, score := lambda lr, seed: math.sin(100 * lr + seed))
    found: dict[str, Record] = {}
    while groups := plan.missing_at_rungs(definition, found):
        group, run = groups[-1], groups[-1].runs[-1]  # one run at a time, the last first
        found[run.id] = outcome(group, run, score)
    assert {name: one.rounds for name, one in found.items()} == {name: one.rounds for name, one in final.items()}


@pytest.mark.slow
def test_settings_across_programs_compete(tmp_path: Path):
    """Rates as rows, batch sizes as programs: one setting of all is left, and the same as without halving."""
    axes = ("lr=.001,.3", "batch_size=2,5")
    halved = Sweep.open(tmp_path / "halved", of(*axes, by=4, rounds=4), resume=False)
    run_missing(halved, Reporter())
    whole = Sweep.open(tmp_path / "whole", sweep_of(*axes, rounds=4, seeds=1), resume=False)
    run_missing(whole, Reporter())
    found, every = load_sweep(tmp_path / "halved"), load_sweep(tmp_path / "whole")
    assert found.groupby("status").rounds.apply(list).to_dict() == {DONE: [4], STOPPED: [1, 1, 1]}
    stopped = found[found.status == STOPPED]
    assert set(stopped.reason) == {"successive halving: round 1 of 4"}
    assert stopped.validation_accuracy.notna().all()
    assert halved.progress(halved.journal.read()) == (4 + 1, 4 + 1)
    left = found[found.status == DONE].iloc[0]
    assert left["validation_accuracy"] >= stopped.validation_accuracy.max()
    same = every[(every.lr == left["lr"]) & (every.batch_size == left["batch_size"])].iloc[0]
    assert all(left[name] == same[name] for name in COUNTS)
    # Another number of rows is another program, whose sums may be rounded differently in the last digit.
    np.testing.assert_allclose([left[n] for n in SCORES], [same[n] for n in SCORES], rtol=1e-6)
    assert halved.missing(halved.journal.read()) == ()


@pytest.mark.slow
def test_survivors_go_on_from_their_states_or_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    definition = of("lr=.001,.1,.3,.5", by=2, first=2, rounds=4, seeds=2)
    real, rounds = Simulation.advance, []

    def advance(self: Any, state: Any, length: int) -> Any:
        rounds.append(length)
        return real(self, state, length)

    monkeypatch.setattr(Simulation, "advance", advance)
    kept_states: list[States] = []
    monkeypatch.setattr(runner, "States", lambda: kept_states.append(States()) or kept_states[-1])
    sweep = Sweep.open(tmp_path / "kept", definition, resume=False)
    run_missing(sweep, Reporter())
    assert sum(rounds) == 2 + 2
    gone_on = {one.id for one in sweep.journal.read() if one.rounds == 4}
    assert set(kept_states[0]._kept) == gone_on, "states of runs that were dropped are let go"
    rounds.clear()
    with monkeypatch.context() as patch:
        patch.setattr(States, "take", lambda *given: None)
        run_missing(Sweep.open(tmp_path / "anew", definition, resume=False), Reporter())
    assert sum(rounds) == 2 + 4
    kept, anew = load_sweep(tmp_path / "kept"), load_sweep(tmp_path / "anew")
    told = ["lr", "seed", "status", *COUNTS]
    assert kept[told].equals(anew[told])
    np.testing.assert_allclose(kept[SCORES], anew[SCORES], rtol=1e-6)


def test_rungs_that_would_move_are_refused(tmp_path: Path):
    Sweep.open(tmp_path / "s", of("lr=.1,.2,.3"), resume=False)
    with pytest.raises(JaxpflError, match="would move the rungs of fedavg"):
        Sweep.open(tmp_path / "s", of(LRS), resume=True)
    Sweep.open(tmp_path / "t", of("lr=.1,.2,.3", first=3), resume=False)
    Sweep.open(tmp_path / "t", of(LRS, first=3, methods=("fedavg", "local")), resume=True)
