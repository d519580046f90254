"""Definitions: what is refused at once, what is stored, and how a sweep may grow."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxpfl.privacy import PrivacyConfig
from jaxpfl.runs.config import RunConfig, resolve
from jaxpfl.runs.sweep.definition import FILE, SHARE, Definition, Search, check_growth, define, read
from jaxpfl.runs.sweep.grid import Grid, parse
from jaxpfl.runs.sweep.plan import groups_of, runs_of
from jaxpfl.support.errors import JaxpflError

CONFIG = RunConfig(rounds=5, seeds=3)


def small(*axes: str, methods: tuple[str, ...] = ("local", "adaped"), draws: int = 0, **search: Any) -> Definition:
    """A sweep of some axes."""
    return define(methods, CONFIG, Grid(tuple(map(parse, axes)), draws), Search(**search))


def test_runs_are_the_grid_for_each_method_it_concerns():
    runs = runs_of(small("lr=.1,1", "adaped.psi_init=1,2,3"))
    assert [run.method for run in runs].count("local") == 2 * 3
    assert [run.method for run in runs].count("adaped") == 6 * 3
    assert len({run.id for run in runs}) == len(runs)


def test_groups_are_as_few_as_shapes():
    definition = small("lr=.1,1", "adaped.psi_init=1,2", "clients=10,20")
    groups = groups_of(definition, runs_of(definition))
    assert [(group.method, group.static["clients"], len(group.runs)) for group in groups] == [
        ("local", 10, 6),
        ("local", 20, 6),
        ("adaped", 10, 12),
        ("adaped", 20, 12),
    ]
    assert [group.config.clients for group in groups] == [10, 20, 10, 20]
    assert len({group.name for group in groups}) == 4


def test_a_search_of_fewer_seeds():
    assert small("lr=.1", search_seeds=2).searched == (0, 1)


def test_a_share_is_set_apart_for_the_selection():
    assert small("lr=.1").config.validation_share == SHARE
    assert small("lr=.1", select="none").config.validation_share == 0
    assert define(("local",), dataclasses.replace(CONFIG, validation_share=0.5), Grid()).config.validation_share == 0.5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"select": "test"}, "unknown select 'test'"),
        ({"halving": 1}, "halving must be 0 or at least 2"),
        ({"search_seeds": 4}, "search_seeds must be at most seeds = 3, got 4"),
        ({"methods": ("adapd",)}, "unknown method 'adapd'"),
        ({"methods": ("local", "local")}, "each method once"),
        ({"methods": ()}, "at least one method"),
    ],
)
def test_an_impossible_search_is_refused(given: dict[str, Any], message: str):
    with pytest.raises(JaxpflError, match=message):
        small("lr=.1", **given)


def stored(folder: Path, definition: Definition) -> Path:
    (folder / FILE).write_text(json.dumps(definition.to_json()))
    return folder


def test_what_is_stored_is_read(tmp_path: Path):
    definition = small("lr=log:1e-3:1", "clients=10,20", "cohort=.5m,3", draws=4, search_seeds=1)
    again = read(stored(tmp_path, definition))
    assert again == definition
    assert runs_of(again) == runs_of(definition)


def test_a_sweep_of_other_orders_is_refused(tmp_path: Path):
    earlier = small("lr=.1,1").to_json()
    for orders in ({}, {"orders": 1}):
        (tmp_path / FILE).write_text(json.dumps({k: v for k, v in earlier.items() if k != "orders"} | orders))
        with pytest.raises(JaxpflError, match="from a version that drew examples in a different order"):
            read(tmp_path)


def test_a_damaged_definition_is_refused(tmp_path: Path):
    (tmp_path / FILE).write_text('{"methods": ["local"]}')
    with pytest.raises(JaxpflError, match=r"sweep\.json is damaged"):
        read(tmp_path)


def test_a_sweep_may_grow(tmp_path: Path):
    old = small("lr=.1,1")
    more = define(
        ("local", "adaped", "fedavg"), dataclasses.replace(CONFIG, seeds=5, rounds=9), Grid((parse("lr=.1,1,2"),))
    )
    check_growth(old, more, tmp_path)
    assert {run.id for run in runs_of(old)} < {run.id for run in runs_of(more)}


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (small("lr=.1"), "values of lr dropped: 1.0"),
        (small("lr=.1,1", "clients=5"), "new axis clients"),
        (small("adaped.c=1"), "axis dropped: lr"),
        (small("lr=.1,1", methods=("adaped",)), "methods dropped: local"),
        (small("lr=.1,1", select="none"), "select: validation -> none"),
        (define(("local", "adaped"), RunConfig(rounds=5, seeds=2), Grid((parse("lr=.1,1"),))), "seeds: 3 -> 2"),
        (define(("local", "adaped"), RunConfig(rounds=5, seeds=3, model="linear"), Grid((parse("lr=.1,1"),))), "model"),
    ],
)
def test_another_sweep_is_refused(tmp_path: Path, new: Definition, message: str):
    with pytest.raises(JaxpflError, match=message):
        check_growth(small("lr=.1,1"), new, tmp_path)


def private(*axes: str, methods: tuple[str, ...]) -> Definition:
    """A sweep of a few axes, delta given for all runs."""
    config = RunConfig(rounds=5, seeds=2, privacy=PrivacyConfig(delta=1e-3))
    return define(methods, config, Grid(tuple(map(parse, axes))), Search())


def test_epsilon_may_be_an_axis_with_delta_given_for_all():
    definition = private("privacy.epsilon=1,4", "lr=.1", methods=("fedavg", "local"))
    groups = groups_of(definition, runs_of(definition))
    assert [len(group.runs) for group in groups] == [4, 2]
    assert all(resolve(group.config).privacy.on for group in groups)
    assert definition.config.privacy == PrivacyConfig(delta=1e-3)


def test_noise_that_shapes_a_group_may_be_an_axis_beside_epsilon():
    definition = private("privacy.epsilon=1,4", "privacy.noise=central,per_step", methods=("adaped",))
    groups = groups_of(definition, runs_of(definition))
    shaped = ["privacy.epsilon", "privacy.noise"]
    assert [sorted(group.static) for group in groups] == [["privacy.noise"], shaped, shaped]
