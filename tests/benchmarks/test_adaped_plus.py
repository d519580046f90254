"""The page of AdaPeD-plus shows its committed record, and the record followed its protocol."""

import json
from types import ModuleType
from typing import Any

import pytest
from benchmark_modules import ROOT, benchmark_module

PAGE = ROOT / "docs" / "records" / "adaped-plus.md"
RECORD: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "adaped_plus_cpu2.json").read_text())
HELD_OUT: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "adaped_plus_held_out_cpu2.json").read_text())
RESULTS = RECORD["results"]
CASES = RECORD["settings"]["cases"]
METHODS = {"local", "fedavg-ft", "fedper", "ditto", "adaped", "adaped-plus"}
PLUS = "adaped-plus"


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return benchmark_module("adaped_plus_page")


def test_the_page_shows_the_record(page):
    text = PAGE.read_text()
    assert page.with_tables(text, RECORD, HELD_OUT) == text
    for place, data in ((0, "digits"), (1, "ds1")):
        records = [RECORD, HELD_OUT]
        records[place] = json.loads(json.dumps(records[place]))
        records[place]["results"]["reported"][data][0]["accuracy"][0] += 1
        assert page.with_tables(text, *records) != text


def test_every_method_had_as_many_tries_at_the_same_gradients():
    for data, rows in RESULTS["search"].items():
        tries = {method: [row for row in rows if row["method"] == method] for method in METHODS}
        assert {len(own) for own in tries.values()} == {8}
        assert len(rows) == 8 * len(METHODS)
        for row in rows:
            assert abs(sum(row["gradients"]) - CASES[data]["search"]) <= one_round(row)


def test_reported_runs_have_the_same_gradients_and_seeds():
    for part in ("reported", "ablations"):
        for data, rows in RESULTS[part].items():
            for row in rows:
                # The rounds outside the cohort depend on the draws of the cohorts: their expectation is budgeted.
                allowed = 0.05 * CASES[data]["full"] if "idle_rounds" in row["options"] else one_round(row)
                assert abs(sum(row["gradients"]) - CASES[data]["full"]) <= allowed
                assert len(row["accuracy"]) == 5
    for rows in RESULTS["reported"].values():
        assert {row["method"] for row in rows} == METHODS


def one_round(row: dict[str, Any]) -> float:
    """Gradients of a client in a round, on average."""
    return row["gradients"][0] / row["rounds"]


def test_what_is_reported_was_chosen_on_validation_examples():
    options = {json.dumps(row["options"]) for rows in RESULTS["reported"].values() for row in own(rows, PLUS)}
    assert len(options) == 1  # one variant for all data sets
    for data, rows in RESULTS["reported"].items():
        for row in rows:
            tries = own(RESULTS["search"][data], row["method"])
            if row["method"] == PLUS:
                tries = [one for one in tries if one["options"] == row["options"]]
            best = max(one["accuracy"][0] for one in tries if not one["diverged"])
            first = next(one for one in tries if one["accuracy"][0] == best)
            assert (row["options"], row["set"]) == (first["options"], first["set"])


def own(rows: list[dict[str, Any]], method: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["method"] == method]
