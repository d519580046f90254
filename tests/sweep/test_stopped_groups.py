"""Groups of a sweep that are stopped or killed on their way, and go on where they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small import Fails, sweep_of, timeless

from jaxpfl.privacy import PrivacyConfig
from jaxpfl.runs import checkpoint
from jaxpfl.runs.control import Reporter
from jaxpfl.runs.sweep import execute
from jaxpfl.runs.sweep.definition import Definition
from jaxpfl.runs.sweep.runner import run_missing
from jaxpfl.runs.sweep.sweep import Sweep
from jaxpfl.support.errors import JaxpflWarning, UnwritableError

ROUNDS = 6


class Seen(Reporter):
    """A reporter that keeps the rounds and lines, and asks to stop after some rounds."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.rounds: list[int] = []
        self.lines: list[str] = []
        self.stop_at = stop_at

    def progress(self, rounds: int, loss: float) -> None:
        self.rounds.append(rounds)

    def say(self, text: str) -> None:
        self.lines.append(text)

    def stopped(self) -> bool:
        return self.stop_at is not None and bool(self.rounds) and self.rounds[-1] >= self.stop_at


@pytest.fixture(autouse=True)
def _a_round_a_call(monkeypatch: pytest.MonkeyPatch):
    """So that a group of six small rounds has a way on which it can be stopped."""
    monkeypatch.setattr("jaxpfl.runs.control._SECONDS_PER_CALL", 0.0)


def definition(**changes: Any) -> Definition:
    axes = () if "lr" in changes else ("lr=.05,.5",)
    return sweep_of(*axes, rounds=ROUNDS, **changes)


def session(folder: Path, stop_at: int | None = None, **changes: Any) -> Seen:
    """Run what is missing of the sweep, until a group has so many rounds."""
    seen = Seen(stop_at)
    sweep = Sweep.open(folder, definition(**changes), resume=(folder / "sweep.json").exists())
    run_missing(sweep, seen, stopped=seen.stopped)
    return seen


def states(folder: Path) -> list[Path]:
    return sorted((folder / "unfinished").glob("*/*/*/SHA256SUMS"))


@pytest.mark.slow
def test_a_stopped_group_goes_on_with_the_same_numbers(tmp_path: Path):
    folder, whole = tmp_path / "parts", tmp_path / "whole"
    assert session(folder, stop_at=2).rounds == [1, 2]
    assert len(states(folder)) == 1
    assert session(folder, stop_at=5).rounds == [3, 4, 5]
    assert session(folder).rounds == [6]
    assert not (folder / "unfinished").exists()
    assert session(whole).rounds == list(range(1, ROUNDS + 1))
    assert timeless(folder) == timeless(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"methods": ("adaped",)},
        {"privacy": PrivacyConfig(noise_multiplier=1.0, delta=1e-3)},
        {"search": {"halving": 2, "halving_first": 3}},
    ],
    ids=["client states", "private", "halving"],
)
def test_whatever_is_swept(tmp_path: Path, changes: dict[str, Any]):
    folder, whole = tmp_path / "parts", tmp_path / "whole"
    session(folder, stop_at=2, **changes)
    assert states(folder)
    assert session(folder, **changes).rounds[0] == 3
    session(whole, **changes)
    assert timeless(folder) == timeless(whole)


@pytest.mark.slow
def test_a_killed_group_goes_on_where_it_was_last_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoint, "_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint, "_REST", 0)

    class Killed(Seen):
        def progress(self, rounds: int, loss: float) -> None:
            super().progress(rounds, loss)
            if rounds == 4:
                raise KeyboardInterrupt

    folder, sweep = tmp_path, Sweep.open(tmp_path / "a", definition(), resume=False)
    with pytest.raises(KeyboardInterrupt):
        run_missing(sweep, Killed())
    assert [int(path.parent.name) for path in states(folder / "a")] == [2, 3]
    assert session(folder / "a").rounds == [4, 5, 6]
    session(folder / "b")
    assert timeless(folder / "a") == timeless(folder / "b")


@pytest.mark.slow
def test_a_damaged_state_begins_anew(tmp_path: Path):
    folder = tmp_path / "parts"
    session(folder, stop_at=3)
    for path in states(folder):
        path.write_text("")
    with pytest.warns(JaxpflWarning, match="start again from round 0"):
        assert session(folder).rounds == list(range(1, ROUNDS + 1))
    session(tmp_path / "whole")
    assert timeless(folder) == timeless(tmp_path / "whole")


@pytest.mark.slow
def test_a_state_that_memory_does_not_suffice_for_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    session(tmp_path, stop_at=3)
    monkeypatch.setattr(checkpoint, "restore", Fails(MemoryError("out of memory")))
    seen = session(tmp_path)
    assert seen.rounds == list(range(1, ROUNDS + 1))
    assert seen.lines == ["the saved state is not used: out of memory"]


@pytest.mark.slow
def test_another_machine_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    session(tmp_path, stop_at=3)
    monkeypatch.setattr("jaxpfl.runs.sweep.execute.jax.default_backend", lambda: "gpu")
    assert session(tmp_path).rounds == list(range(1, ROUNDS + 1))
    assert not (tmp_path / "unfinished").exists()


@pytest.mark.slow
def test_other_runs_do_not_go_on_from_it(tmp_path: Path):
    session(tmp_path, stop_at=3)
    assert session(tmp_path, seeds=3).rounds[0] == 1
    assert not (tmp_path / "unfinished").exists()
    assert len(timeless(tmp_path)) == 6


@pytest.mark.slow
@pytest.mark.parametrize("what", ["full", "large"])
def test_a_state_that_cannot_be_saved_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str):
    full = "cannot write to it: No space left on device"
    if what == "full":
        monkeypatch.setattr(checkpoint, "save", Fails(UnwritableError(full)))
    else:
        monkeypatch.setattr(execute, "_MOST_BYTES", 0)
    monkeypatch.setattr(checkpoint, "_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint, "_REST", 0)
    seen = session(tmp_path)
    assert seen.rounds == list(range(1, ROUNDS + 1))
    assert all(full in line for line in seen.lines)
    assert bool(seen.lines) == (what == "full")
    assert {record.status for record in timeless(tmp_path).values()} == {"done"}
