"""Selection on validation examples: eligible settings, ties, and no look at test."""

import dataclasses
import itertools
import math
import random
from typing import Any

import numpy as np
import pytest

from jaxpfl.runs.records import DIVERGED, FAILED, STOPPED, Record
from jaxpfl.runs.sweep.results import Tried, choose, select, setting_key, sort_records

SEEDS = (0, 1, 2)


def runs(method: str, settings: dict[str, Any], scores: Any, **others: Any) -> list[Record]:
    """A record per seed with these validation accuracies."""
    record = Record(method, settings, 0, metrics={"personalized_accuracy": 0.5})
    record = dataclasses.replace(record, **others)
    return [
        dataclasses.replace(record, seed=seed, metrics={**record.metrics, "validation_accuracy": score})
        for seed, score in enumerate(scores)
    ]


def test_the_best_mean_of_each_method_is_chosen():
    records = [
        *runs("local", {"lr": 0.1}, (0.4, 0.5, 0.6)),
        *runs("local", {"lr": 0.3}, (0.6, 0.6, 0.6)),
        *runs("adaped", {"lr": 0.1}, (0.9, 0.9, 0.9)),
        *runs("adaped", {"lr": 0.3}, (1.0, 1.0, 0.1)),
    ]
    found = select(records, SEEDS)
    assert {name: choice.settings for name, choice in found.items()} == {"local": {"lr": 0.3}, "adaped": {"lr": 0.1}}
    assert found["local"].score == pytest.approx(0.6)
    assert [choice.tries for choice in found.values()] == [2, 2]


@pytest.mark.parametrize("status", [DIVERGED, FAILED, STOPPED])
def test_a_setting_with_one_seed_that_is_not_done_is_never_chosen(status: str):
    good = runs("local", {"lr": 1.0}, (0.9, 0.9, 0.9))
    good[1] = dataclasses.replace(good[1], status=status, reason="so it is")
    assert select([*good, *runs("local", {"lr": 0.1}, (0.2, 0.2, 0.2))], SEEDS)["local"].settings == {"lr": 0.1}
    alone = select(good, SEEDS)["local"]
    assert alone.settings is None
    assert alone.reason == status
    assert math.isnan(alone.score)


@pytest.mark.parametrize("score", [None, math.nan, math.inf])
def test_a_setting_without_a_finite_score_is_never_chosen(score: float | None):
    bad = runs("local", {"lr": 1.0}, (0.9, score, 0.9))
    assert select([*bad, *runs("local", {"lr": 0.1}, (0.2, 0.2, 0.2))], SEEDS)["local"].settings == {"lr": 0.1}
    assert select(bad, SEEDS)["local"].reason == "no validation accuracy"


def test_all_seeds_of_the_search_must_be_there_and_others_do_not_count():
    few = runs("local", {"lr": 1.0}, (0.9, 0.9))
    more = runs("local", {"lr": 0.1}, (0.2, 0.2, 0.2, 1.0, 1.0))
    other = runs("local", {"lr": 0.3}, (0.3, 0.3, 0.3, 0.0, 0.0))
    found = select([*few, *more, *other], SEEDS)["local"]
    assert (found.settings, found.score) == ({"lr": 0.3}, pytest.approx(0.3))
    assert select(few, SEEDS)["local"].reason == "not all seeds were run"


def test_equal_means_go_to_the_first_in_the_grid_wherever_its_records_stand():
    # These means differ in their last digit if they are summed from left to right.
    a, b, c = 0.1, 0.2, 0.3
    assert a + b + c != c + b + a
    grid = {"clients": [100, 10], "lr": [0.3, 0.1]}
    records = []
    for clients, lr in itertools.product(*grid.values()):
        scores = (a, b, c) if lr == 0.3 else (c, b, a)
        records += runs("local", {"lr": lr, "clients": clients}, scores)
    for seed in range(5):
        random.Random(seed).shuffle(records)
        found = select(sort_records(records, ["local"], grid), SEEDS)["local"]
        assert found.settings == {"clients": 100, "lr": 0.3}
        assert len(found.level_with) == 3


def test_the_smaller_error_is_better():
    records = [
        Record("local", {"lr": lr}, 0, metrics={"validation_rmse": rmse}) for lr, rmse in ((0.1, 2.0), (0.3, 1.0))
    ]
    found = select(records, [0])["local"]
    assert (found.settings, found.score) == ({"lr": 0.3}, 1.0)


def test_settings_within_one_standard_error_are_level():
    best = np.array([0.80, 0.70, 0.90])
    gaps = np.array([0.00, 0.02, 0.04])  # mean 0.02, standard error 0.0115
    others = {"apart": best - gaps, "level": best - (gaps - 0.01), "same": best}
    tried = [Tried({"lr": "best"}, best), *(Tried({"lr": name}, scores) for name, scores in others.items())]
    tried.append(Tried({"lr": "diverged"}, best, "diverged"))
    found = choose(tried, larger=True)
    assert found.settings == {"lr": "best"}
    assert [one["lr"] for one in found.level_with] == ["level", "same"]
    negated = [one._replace(scores=-one.scores) for one in tried]
    assert choose(negated, larger=False).level_with == found.level_with


def test_other_metrics_change_nothing():
    """Whatever stands in the records beside the validation accuracy, the choice is the same."""
    draw = np.random.default_rng(0)
    grid = list(itertools.product(("local", "adaped"), (0.01, 0.1, 1.0), (1, 3)))
    records = [
        run for method, lr, steps in grid for run in runs(method, {"lr": lr, "local_steps": steps}, draw.random(3))
    ]
    clean = select(records, SEEDS)
    names = ("personalized_accuracy", "personalized_loss", "global_accuracy", "train_loss", "validation_loss")
    for attempt in range(20):
        poison = np.random.default_rng(attempt)
        values = [math.nan, math.inf, None, *poison.random(3)]
        poisoned = [
            dataclasses.replace(
                one,
                seconds=poison.random(),
                group=str(poison.random()),
                rounds=int(poison.integers(9)),
                metrics={name: values[poison.integers(len(values))] for name in names}
                | {"validation_accuracy": one.metrics["validation_accuracy"]},
            )
            for one in records
        ]
        assert select(poisoned, SEEDS) == clean
    swapped = [
        dataclasses.replace(one, metrics={"validation_accuracy": 1 - (one.metrics["validation_accuracy"] or 0)})
        for one in records
    ]
    assert select(swapped, SEEDS) != clean


def test_values_of_different_types_are_different_settings():
    assert len({setting_key({"clients": value}) for value in (1, 1.0, True, "1")}) == 4
    records = [run for value in (1.0, 1, True) for run in runs("local", {"a": value}, [0.5])]
    assert select(records, [0])["local"].tries == 3


def test_grid_order_puts_what_is_new_last():
    records = [
        Record(method, {"lr": lr} | ({"adaped.psi_init": 1.0} if method == "adaped" else {}), seed)
        for seed in (1, 0)
        for lr in (3.0, 0.1, 0.3)
        for method in ("local", "other", "adaped")
    ]
    found = sort_records(records, ("adaped", "local"), {"lr": (0.1, 0.3)})
    expected = itertools.product(("adaped", "local", "other"), (0.1, 0.3, 3.0), (0, 1))
    assert [(one.method, one.settings["lr"], one.seed) for one in found] == list(expected)
