"""Tables of a sweep on the terminal."""

import itertools
from typing import Any

import pytest

from jaxpfl.runs.records import DIVERGED, FAILED, Record
from jaxpfl.runs.sweep.results import best_sheet, print_sweep, rows_sheet, select, summarize
from jaxpfl.support.console import Console

SEEDS = (0, 1)


def records(rates: Any = (0.1, 0.3)) -> list[Record]:
    """Records of two methods, the second with an axis of its own; the larger rate is the better one."""
    found = []
    for lr, seed in itertools.product(rates, SEEDS):
        metrics = {"validation_accuracy": lr, "personalized_accuracy": lr + 0.1 * seed, "compile_seconds": 0.5}
        found.append(Record("local", {"lr": lr}, seed, metrics=metrics, seconds=0.25))
        for psi in (1.0, 3.5):
            metrics = {"validation_accuracy": lr + psi / 100, "personalized_accuracy": lr + psi / 100}
            found.append(Record("adaped", {"lr": lr, "adaped.psi_init": psi}, seed, metrics=metrics, seconds=6.0))
    return found


def summary(found: list[Record], **more: Any) -> dict[str, Any]:
    return summarize(found, more.get("best", select(found, SEEDS)), seeds=SEEDS, programs=2, seconds=12.0)


def test_the_best_settings_and_the_best_score_in_bold():
    failed = [Record("fedper", {"lr": 0.1}, seed, FAILED, "out of memory") for seed in SEEDS]
    sheet = best_sheet(summary([*records(), *failed]))
    assert sheet.header == ("method", "setting", "validation", "test", "seeds", "tries", "compile", "run")
    assert sheet.rows == [
        ("local", "lr=0.3", "30.00", "35.00 ± 7.07", "2", "2", "2.0", "1.0"),
        ("adaped", "lr=0.3, psi_init=3.5", "33.50", "33.50 ± 0.00", "2", "4", "-", "48"),
        ("fedper", "none: failed", "-", "-", "0", "1", "-", "0.0"),
    ]
    assert sheet.bold == {(0, 3)}
    assert "± standard deviation over seeds" in sheet.note


def test_every_setting_has_a_row_and_the_chosen_ones_are_bold():
    sheet = rows_sheet(summary(records()))
    columns = ("method", "lr", "adaped.psi_init", "validation", "test", "seeds", "compile", "run", "status")
    assert sheet.header == columns
    assert sheet.rows[0] == ("local", "0.1", "-", "10.00", "15.00 ± 7.07", "2", "1.0", "0.5", "done")
    chosen = [row[:3] for i, row in enumerate(sheet.rows) if {(i, j) for j in range(len(columns))} <= sheet.bold]
    assert chosen == [("local", "0.3", "-"), ("adaped", "0.3", "3.5")]


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: Any, columns: int) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_sweep(Console(), found)
    return capsys.readouterr().out


def test_the_terminal_shows_the_best_every_setting_and_what_went_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    bad = [
        Record("local", {"lr": lr}, seed, DIVERGED, "3 of 10 [clients] diverged") for lr in (1.0, 3.0) for seed in SEEDS
    ]
    text = shown(monkeypatch, capsys, summary([*records(), *bad]), 200)
    assert text.startswith("best setting of each method, chosen on validation examples")
    assert "8 settings" in text
    assert "local: 2 settings, the first lr=1.0: diverged (3 of 10 [clients] diverged)" in text
    assert "2 programs, 12 s" in text
    level = [record for record in records() if record.method == "adaped" and record.settings["lr"] == 0.3]
    tied = [Record(one.method, one.settings, one.seed, metrics={"validation_accuracy": 0.5}) for one in level]
    text = shown(monkeypatch, capsys, summary(tied), 200)
    assert "adaped: within one standard error of the chosen setting: lr=0.3, psi_init=3.5" in text


@pytest.mark.parametrize("columns", [30, 40, *range(54, 96, 2), 120])
def test_no_number_is_lost_on_a_narrow_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    text = shown(monkeypatch, capsys, summary(records((0.00123, 0.3))), columns)
    assert max(map(len, text.splitlines())) <= columns
    for number in ("35.00 ± 7.07", "33.50 ± 0.00", "5.12 ± 7.07", "lr=0.00123", "lr=0.3"):
        assert number in text
    for name in ("method", "setting", "validation", "test", "seeds", "tries", "sec", "status", "adaped", "local"):
        assert name in text
    assert "…" not in text
