"""The tables at the end of a run: no note without its column, and no digit cut."""

import io

import pytest
from rich.console import Console

from jaxpfl.runs.terminal import print_table


def over_clients(mean: float, std: float | None) -> dict:
    return {"mean": mean, "std": std, "std_clients": 0.1, "p10": 0.5, "worst_decile": 0.25}


def row(std: float | None, *, hurt: float | None, unseen: bool) -> dict:
    counts = {"mean": 12.5, "min": 10, "max": 15}
    return {
        "personalized_accuracy": over_clients(0.98765, std),
        "global_accuracy": None,
        "unseen_accuracy": over_clients(0.875, std) if unseen else None,
        "unseen_as_trained_accuracy": over_clients(0.75, std) if unseen else None,
        "unseen_before_accuracy": over_clients(0.5, std) if unseen else None,
        "unseen_rounds": {"adapted": 10, "as_trained": 4} if unseen else None,
        "gradients": {"training": counts, "personalization": {"mean": 60.0}, "unseen": {"mean": 100.0}}
        | {"unseen_as_trained": {"mean": 40.0}},
        "fraction_hurt": hurt,
        "seconds": 1.25,
        "privacy": None,
        "bytes_up": 1000,
        "bytes_down": 2000,
        "diverged_clients": 0,
        "lost_uploads": 0,
        "idle_rounds": 0,
    }


def shown(methods: dict, *, seeds: int, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    summary = {"methods": methods, "seeds": list(range(seeds)), "clients": 10, "cohort": 5, "rounds": 3, "run_dir": "r"}
    print_table(console, summary)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_notes_are_of_columns_that_are_there():
    alone = shown({"fedavg-ft": row(None, hurt=None, unseen=False)}, seeds=1)
    for absent in ("hurt", "±", "unseen"):
        assert absent not in alone
    both = {"local": row(0.01, hurt=0.0, unseen=False), "fedavg-ft": row(0.01, hurt=0.5, unseen=False)}
    text = shown(both, seeds=3)
    assert "hurt" in next(line for line in text.splitlines() if "personalized" in line)
    assert "±" in text
    assert "50%" in text
    # Beside local training alone there is nobody to be hurt.
    assert "hurt" not in shown({"local": row(None, hurt=0.0, unseen=False)}, seeds=1)


def test_no_round_is_best_without_a_validation_score():
    none = {**row(None, hurt=None, unseen=False), "best_on_validation": None}
    text = " ".join(shown({"fedavg": none}, seeds=1, width=200).split())
    assert "fedavg: no best round, because no client's validation examples define the accuracy" in text
    assert "at the round of best" not in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_digit_is_there_at_any_width(width):
    text = shown({"map-gaussian": row(0.0123, hurt=None, unseen=True)}, seeds=3, width=width)
    for cell in ("map-gaussian", "98.77 ±1.23", "87.50 ±1.23", "75.00 ±1.23", "12.5", "60", "100", "40", "1kB", "2kB"):
        assert cell in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    if width >= 80:
        assert max(map(len, text.splitlines())) <= width


def test_other_metrics_stand_in_a_table_of_their_own_with_who_is_left_out():
    own = row(None, hurt=None, unseen=False)
    entry = {"personalized": {"mean": 0.81234, "std": None}, "global": {"mean": 0.7, "std": None}, "undefined": 2}
    text = shown({"fedavg": own | {"metrics": {"auc": entry}}, "local": own}, seeds=1, width=120)
    assert "0.8123 (0.7)" in text
    assert "AUC: undefined on the test examples of 2 of 10 clients, so means leave these clients out" in text
    assert "other metrics" not in shown({"local": own}, seeds=1)


def test_means_over_examples_have_a_column_where_they_are_others():
    own = row(None, hurt=None, unseen=False)
    same, other = (
        own | {"personalized_accuracy": own["personalized_accuracy"] | {"mean_examples": mean}}
        for mean in (0.98765, 0.9)
    )
    assert "examples" not in shown({"local": same}, seeds=1)
    text = shown({"local": other}, seeds=1)
    assert ["local", "98.77", "90.00"] in [line.split()[:3] for line in text.splitlines()]
    assert "examples: over all test examples together" in " ".join(text.split())
