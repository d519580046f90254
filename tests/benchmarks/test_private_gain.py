"""The page on collaboration under privacy shows its committed record, and the record followed its protocol."""

import importlib
import json
import statistics
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from benchmark_modules import ROOT

PAGE = ROOT / "docs" / "records" / "privacy.md"
RECORD: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "private_gain_cpu2.json").read_text())
RESULTS = RECORD["results"]


@pytest.fixture(scope="module")
def page() -> Iterator[ModuleType]:
    """The page's module, which takes the leads of another page from its package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        yield importlib.import_module("benchmarks.private_gain_page")


def test_the_page_shows_the_record(page):
    text = PAGE.read_text()
    assert page.with_tables(text, RECORD) == text
    changed = json.loads(json.dumps(RECORD))
    changed["results"]["digits 0 FedAvg+"][0]["test"] += 1
    assert page.with_tables(text, changed) != text


def test_a_lead_is_over_controls_with_no_more_public_examples(page):
    scores = page.scores_of(RESULTS, "digits")
    for epsilon in (1.0, 2.0, 4.0, 8.0):
        means = {name: statistics.fmean(own.get(None) or own[epsilon]) for name, own in scores.items()}
        alone = {name: mean for name, mean in means.items() if "local" in name or "nothing" in name}
        public = max(alone, key=alone.__getitem__)
        assert page.best_control(scores, epsilon, public=True)[0] == public
        alone = {name: mean for name, mean in alone.items() if "public" not in name}
        assert page.best_control(scores, epsilon, public=False)[0] == max(alone, key=alone.__getitem__)


def test_all_had_six_tries_five_splits_and_no_more_than_their_epsilon():
    data = {key.split(" ")[0] for key in RESULTS}
    names = {key.split(" ", 2)[2] for key in RESULTS}
    assert len(RESULTS) == len(data) * len(names) * 5
    for rows in RESULTS.values():
        for row in rows:
            assert len(row["validation"]) == 6
            assert row["epsilon"] is None or row["epsilon"] - 0.01 < row["claimed"] <= row["epsilon"]
