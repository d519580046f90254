"""The JSON of a sweep: rows over seeds, the best setting of each method, and nothing that is not JSON."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from jaxpfl.runs.records import DIVERGED, DONE, FAILED, STOPPED, Record
from jaxpfl.runs.sweep.results import UNFINISHED, best_sheet, select, summarize
from jaxpfl.runs.sweep.sweep import caveats

SEEDS = (0, 1, 2)


def record(method: str, lr: float, seed: int, validation: float | None, test: float | None, **others: Any) -> Record:
    metrics = {"validation_accuracy": validation, "personalized_accuracy": test, "bytes_up": 100.0 * seed}
    return Record(method, {"lr": lr}, seed, metrics=metrics, seconds=0.5, **others)


def summary(records: list[Record], seeds: Any = SEEDS) -> dict[str, Any]:
    found = summarize(records, select(records, seeds), seeds=seeds, programs=2, seconds=3.5)
    return json.loads(json.dumps(found, allow_nan=False))


def test_clients_without_a_metric_are_told_of():
    counts = [{"num_clients": 5, "personalized_auc_undefined": n, "personalized_macro_f1_undefined": 2} for n in (1, 3)]
    found = [Record("local", {}, seed, metrics=metrics) for seed, metrics in enumerate([*counts, {"num_clients": 9}])]
    behind = "undefined on the test examples of some clients, so means leave these clients out"
    assert caveats(found, {}) == [f"AUC: {behind}", f"macro F1: {behind}"]
    assert caveats(found[2:], {}) == []


RECORDS = [record("local", lr, seed, lr + seed / 10, lr - seed / 10) for lr in (0.2, 0.4) for seed in SEEDS]


def test_rows_are_statistics_over_the_seeds():
    found = summary(RECORDS)
    assert (found["programs"], found["seconds"]) == (2, 3.5)
    first, second = found["rows"]
    assert (first["method"], first["settings"], first["seeds"]) == ("local", {"lr": 0.2}, 3)
    assert (first["status"], first["reason"], first["seconds"]) == (DONE, "", 1.5)
    assert first["validation_accuracy"] == pytest.approx(0.3)
    assert first["validation_std"] == pytest.approx(0.1)
    test = np.array([0.4, 0.3, 0.2])
    assert second["personalized_accuracy"] == pytest.approx(
        {"mean": test.mean(), "std": test.std(ddof=1), "min": 0.2, "max": 0.4}
    )
    assert first["metrics"] == {"bytes_up": {"mean": 100.0, "std": 100.0}}


def test_the_best_is_that_of_the_selection_with_its_row_s_numbers():
    found = summary(RECORDS)
    best = found["best"]["local"]
    assert best["settings"] == {"lr": 0.4}
    assert best["tries"] == 2
    assert best["level_with"] == []
    for name in ("validation_accuracy", "personalized_accuracy", "seeds"):
        assert best[name] == found["rows"][1][name]


@pytest.mark.parametrize(("constant", "words"), [(0.31, "31.00; local does not beat it"), (0.29, "29.00"), (None, "")])
def test_the_constant_predictor_stands_beside_the_best_settings(constant: float | None, words: str):
    metrics = {} if constant is None else {"constant_accuracy": constant}
    records = [dataclasses.replace(own, metrics={**own.metrics, **metrics}) for own in RECORDS]
    note = best_sheet(summary(records)).note
    assert f"constant predictor: {words}; tries" in note if words else "constant" not in note


def test_validation_is_over_the_seeds_of_the_search_and_test_over_all():
    more = [record("local", 0.4, seed, 0.0, 1.0) for seed in (3, 4)]
    best = summary([*RECORDS, *more])["best"]["local"]
    assert best["validation_accuracy"] == pytest.approx(0.5)
    assert best["personalized_accuracy"]["mean"] == pytest.approx((0.4 + 0.3 + 0.2 + 2) / 5)
    assert best["seeds"] == 5


def test_a_row_has_the_worst_status_of_its_seeds_with_the_reason():
    stopped = dataclasses.replace(RECORDS[0], status=STOPPED, reason="after 10 rounds")
    diverged = dataclasses.replace(RECORDS[1], status=DIVERGED, reason="2 clients")
    failed = dataclasses.replace(RECORDS[2], status=FAILED, reason="out of memory", metrics={})
    row = summary([stopped, diverged, failed])["rows"][0]
    assert (row["status"], row["reason"], row["seeds"]) == (FAILED, "seed 2: out of memory", 0)
    assert row["personalized_accuracy"]["mean"] is None
    row = summary([stopped, diverged, RECORDS[2]])["rows"][0]
    assert (row["status"], row["reason"], row["seeds"]) == (DIVERGED, "seed 1: 2 clients", 1)
    assert row["personalized_accuracy"]["mean"] == 0.0
    row = summary([dataclasses.replace(stopped, seed=seed) for seed in SEEDS])["rows"][0]
    assert (row["status"], row["reason"]) == (STOPPED, "after 10 rounds")


def test_a_row_that_lacks_seeds_says_so():
    row = summary(RECORDS[:2])["rows"][0]
    assert (row["status"], row["reason"]) == (UNFINISHED, "1 of 3 seeds of the search were not run")
    assert row["seeds"] == 2


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_a_mean_of_which_a_part_is_missing_is_null(missing: float | None):
    row = summary([*RECORDS[:2], record("local", 0.2, 2, missing, missing)])["rows"][0]
    assert row["validation_accuracy"] is None
    assert row["personalized_accuracy"] == {"mean": None, "std": None, "min": None, "max": None}


def test_a_method_without_a_choice_says_why():
    found = summary([*RECORDS, record("adaped", 0.2, 0, None, None, status=FAILED, reason="out of memory")])
    assert list(found["best"]) == ["local", "adaped"]
    best = found["best"]["adaped"]
    assert (best["settings"], best["validation_accuracy"], best["reason"]) == (None, None, "failed")
    assert best["personalized_accuracy"]["mean"] is None
