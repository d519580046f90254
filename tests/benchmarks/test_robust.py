"""The page of robust aggregation shows its committed record, and the record followed its protocol."""

import json
from types import ModuleType
from typing import Any

import pytest
from benchmark_modules import ROOT, benchmark_module

PAGE = ROOT / "docs" / "records" / "robustness.md"
RECORD: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "robust_cpu2.json").read_text())
ROWS = [row for rows in RECORD["results"].values() for row in rows]


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return benchmark_module("robust_page")


def test_the_page_shows_the_record(page):
    text = PAGE.read_text()
    assert page.with_tables(text, RECORD) == text
    changed = json.loads(json.dumps(RECORD))
    changed["results"]["ditto median"][0]["personalized"][0] += 1
    assert page.with_tables(text, changed) != text


def test_every_method_had_the_same_gradients_seeds_and_attacks():
    assert len(ROWS) >= 1 + 4 * 6 * 4 + 4 + 5 * 5
    for row in ROWS:
        assert row["gradients"] == RECORD["settings"]["gradients"]
        assert len(row["personalized"]) == RECORD["settings"]["seeds"]
    pairs = {(row["aggregate"], row["attack"]) for row in ROWS if row["method"] != "local"}
    under_the_mean = {pair for pair in pairs if pair[0] == "mean"}
    assert len(under_the_mean) == 5
    for method in METHODS:
        found = {(row["aggregate"], row["attack"]) for row in ROWS if row["method"] == method}
        assert found >= (pairs - {pair for pair in pairs if "scale" in pair[1]} if method in FIRST else under_the_mean)


FIRST = ("fedavg", "fedavg-ft", "ditto", "fedper")
METHODS = (*FIRST, "fedrep", "mr-mtl", "apfl", "fedrod", "adaped")
