"""Tables of a sweep on the terminal, in Markdown and in LaTeX."""

import itertools
from typing import Any

import pytest

from jaxpfl.runs.records import DIVERGED, FAILED, Record
from jaxpfl.runs.sweep.selection import select
from jaxpfl.runs.sweep.summary import MOST_ROWS, print_sweep, summarize, text_table
from jaxpfl.support.console import Console
from jaxpfl.support.errors import JaxpflError

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


def test_markdown_of_the_best():
    table = text_table(summary(records()), "md").splitlines()
    assert table[:4] == [
        "| method | setting | validation | test | seeds | tries | compile | run |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| local | lr=0.3 | 30.00 | **35.00 ± 7.07** | 2 | 2 | 2.0 | 1.0 |",
        "| adaped | lr=0.3, psi\\_init=3.5 | 33.50 | 33.50 ± 0.00 | 2 | 4 | - | 48 |",
    ]
    assert "± standard deviation over seeds" in table[-1]


def test_latex_of_the_best_is_escaped():
    metrics = {"validation_accuracy": 0.5, "personalized_accuracy": 0.5}
    odd = [Record("fedavg", {"data": "npz:50%_a&b#{$}~^\\|<>"}, seed, metrics=metrics) for seed in SEEDS]
    table = text_table(summary(odd), "latex").splitlines()
    assert table[2:-2] == [
        r"\begin{tabular}{llrrrrrr}",
        r"\toprule",
        r"method & setting & validation & test & seeds & tries & compile & run \\",
        r"\midrule",
        r"fedavg & data=npz:50\%\_a\&b\#\{\$\}\textasciitilde{}\textasciicircum{}\textbackslash{}\textbar{}"
        r"\textless{}\textgreater{} & 50.00 & 50.00 $\pm$ 0.00 & 2 & 1 & - & 0.0 \\",
    ]
    assert table[:2] == [line for line in table if line.startswith("%")]
    assert r"data=npz:50%\_a&b#{$}~^\\\|\<\>" in text_table(summary(odd), "md")


def test_every_setting_has_a_row_and_the_chosen_ones_are_bold():
    table = text_table(summary(records()), "md", every=True).splitlines()
    assert table[0] == "| method | lr | adaped.psi\\_init | validation | test | seeds | compile | run | status |"
    assert table[2] == "| local | 0.1 | - | 10.00 | 15.00 ± 7.07 | 2 | 1.0 | 0.5 | done |"
    assert [line for line in table if "**" in line] == [
        "| **local** | **0.3** | **-** | **30.00** | **35.00 ± 7.07** | **2** | **1.0** | **0.5** | **done** |",
        "| **adaped** | **0.3** | **3.5** | **33.50** | **33.50 ± 0.00** | **2** | **-** | **12** | **done** |",
    ]
    latex = text_table(summary(records()), "latex", every=True)
    assert latex.count(r"\textbf{adaped}") == 1
    assert r"\begin{tabular}{lrrrrrrrl}" in latex


def test_a_method_without_a_choice_says_why():
    failed = [Record("fedper", {"lr": 0.1}, seed, FAILED, "out of memory") for seed in SEEDS]
    table = text_table(summary([*records(), *failed]), "md")
    assert "| fedper | none: failed | - | - | 0 | 1 | - | 0.0 |" in table


def test_a_study_has_its_metrics():
    found = [
        Record("gaussian", {"clients": 10}, seed, metrics={"local": 1.0, "private": 0.0123 + seed}) for seed in SEEDS
    ]
    table = text_table(summary(found, best={}), "md").splitlines()
    assert table[0] == "| method | clients | local | private | seeds | compile | run | status |"
    assert table[2] == "| gaussian | 10 | 1 ± 0 | 0.5123 ± 0.71 | 2 | - | 0.0 | done |"


def test_another_form_is_refused():
    with pytest.raises(JaxpflError, match="unknown form of a table 'tex'"):
        text_table(summary(records()), "tex")


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


def test_many_settings_are_counted_and_not_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    rates = [round(0.001 * i, 3) for i in range(1, MOST_ROWS)]
    text = shown(monkeypatch, capsys, summary(records(rates)), 120)
    assert f"{3 * len(rates)} settings; 2 programs" in text
    assert "lr=0.039" in text
    assert "0.017" not in text
