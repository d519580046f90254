"""Grids: their texts, their points, and draws that more draws do not change."""

import numpy as np
import pytest

from jaxpfl.runs.sweep.grid import Axis, Grid, parse
from jaxpfl.support.errors import JaxpflError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("lr=.01,0.1,1", (0.01, 0.1, 1)),
        ("lr=log:1e-3:1:4", (0.001, 0.01, 0.1, 1.0)),
        ("clients=linear:10:50:5", (10, 20, 30, 40, 50)),
        ("dropout=linear:0:1:3", (0.0, 0.5, 1.0)),
        ("cohort=.1m,1m", (".1m", "1m")),
        ("model=mlp:128,linear", ("mlp:128", "linear")),
        ("standardize=true,false", (True, False)),
    ],
)
def test_values_of_an_axis(text: str, values: tuple):
    assert parse(text).values == values


def test_a_range_has_ends_and_no_values():
    assert parse("lr=log:1e-3:1") == Axis("lr", (), 0.001, 1.0, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr", "NAME=VALUE"),
        ("lr=.1,,1", "must be numbers, names or switches"),
        ("lr=log:0:1:3", "LOW > 0"),
        ("lr=log:1:.1:3", "LOW < HIGH"),
        ("lr=log:.1:1:1", "N between 2"),
        ("lr=1e400", "must be finite"),
    ],
)
def test_another_form_is_refused(text: str, message: str):
    with pytest.raises(JaxpflError, match=message):
        parse(text)


def test_points_are_the_product_without_other_methods_axes():
    grid = Grid((parse("lr=.1,1"), parse("adaped.psi_init=1,2,3")))
    assert len(grid.points()) == 6
    assert grid.points(lambda name: name == "lr") == [{"lr": 0.1}, {"lr": 1}]


def test_more_draws_keep_the_first():
    axes = parse("lr=log:1e-3:1"), parse("dropout=linear:0:1"), parse("seed_of=1,2")
    few, many = (Grid(axes, draws).points() for draws in (5, 12))
    assert len(few) == 10
    assert [p for p in few if p["seed_of"] == 1] == [p for p in many if p["seed_of"] == 1][:5]
    rates = np.log10([p["lr"] for p in many])
    assert (rates >= -3).all()
    assert (rates <= 0).all()


def test_a_grid_that_cannot_be_is_refused():
    with pytest.raises(JaxpflError, match="lr is a range"):
        Grid((parse("lr=log:.1:1"),))
    with pytest.raises(JaxpflError, match="requires a range among the axes"):
        Grid((parse("lr=.1"),), draws=3)
    with pytest.raises(JaxpflError, match="is given twice"):
        Grid((parse("lr=.1"), parse("lr=.2")))


def test_even_steps_are_exact():
    assert parse("clients=linear:1000000:1234567:2").values == (1_000_000, 1_234_567)
    assert parse("lr=linear:.1234567:.7654321:2").values == (0.1234567, 0.7654321)
    assert parse("clients=log:10:1000:3").values == (10, 100, 1000)
    assert all(type(value) is int for value in parse("clients=log:10:1000:3").values)
    assert parse("dropout=linear:0:.9999999:3").values == (0.0, 0.5, 0.9999999)
    assert Axis("dropout", (), 0.0, 0.9999999).value_at(0.99999999) < 1


def test_a_large_axis_is_quick_and_a_grid_that_is_too_large_is_refused():
    values = parse("lr=linear:1:100000:100000").values  # each compared with each other would take many minutes
    assert len(values) == 100_000
    with pytest.raises(JaxpflError, match="at most 1000000 settings, got 1100000"):
        Grid((Axis("lr", values), parse("clients=linear:10:20:11"))).points()
