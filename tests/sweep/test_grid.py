"""Grids: texts, points, draws that more draws do not change; axes: names, types of values, and whom they concern."""

import numpy as np
import pytest

from jaxpfl import METHODS
from jaxpfl.privacy import PrivacyConfig
from jaxpfl.runs.config import RunConfig
from jaxpfl.runs.sweep.grid import Axis, Grid, apply_settings, cohort_of, concerns, is_traced, named, parse
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
        ("lr=.1,,1", "must be numbers, strings or booleans"),
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


def of(text: str, *methods: str):
    """The axis that a text means for some methods."""
    return named(Grid((parse(text),)), methods or ("fedavg", "adaped")).axes[0]


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("lr=1,.5", "lr", (1.0, 0.5)),
        ("batch-size=5,10", "batch_size", (5, 10)),
        ("adaped.psi_init=1,3.5", "adaped.psi_init", (1.0, 3.5)),
        ("adaped.lr=paper,.1", "adaped.lr", ("paper", 0.1)),
        ("adaped.gate=true,false", "adaped.gate", (True, False)),
        ("privacy.noise-multiplier=1,2", "privacy.noise_multiplier", (1.0, 2.0)),
        ("cohort=.1m,5", "cohort", ("0.1m", 5)),
        ("model=linear,mlp:8", "model", ("linear", "mlp:8")),
        ("split-seed=0,1", "split_seed", (0, 1)),
        ("same-stragglers=true,false", "same_stragglers", (True, False)),
    ],
)
def test_names_and_types(text: str, name: str, values: tuple):
    axis = of(text)
    assert axis.name == name
    assert [(type(v), v) for v in axis.values] == [(type(v), v) for v in values]


def test_a_methods_own_name_is_enough_for_one_method():
    assert of("psi_init=1,2", "adaped").name == "adaped.psi_init"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lrr=1", "unknown axis 'lrr': did you mean 'lr'"),
        ("learning_rate=1,2", "unknown axis 'learning_rate': did you mean 'lr'"),
        ("psi_init=1", "psi_init is a hyper-parameter of adaped: write adaped.psi_init"),
        ("ditto.lam=1", "unknown method of --grid ditto.lam 'ditto'"),
        ("seeds=1,2", "seeds cannot be an axis of a sweep: use --seeds"),
        ("lr=a", "lr in --grid must be float"),
        ("cohort=2m", "cohort must be a count, or a share"),
        ("lr=1,1.0", "lr has the value 1"),
        ("task=binary,regression", "task cannot be an axis of a sweep"),
    ],
)
def test_what_is_no_axis_is_refused(text: str, message: str):
    with pytest.raises(JaxpflError, match=message):
        of(text)


def test_a_range_of_whole_numbers_is_refused():
    with pytest.raises(JaxpflError, match=r"clients in --grid must be int.*; instead of a range, write --grid"):
        named(Grid((parse("clients=log:10:100"),), 3), ("fedavg",))


def test_axes_concern_methods_that_have_a_use_for_them():
    local, fedavg = METHODS["local"], METHODS["fedavg"]
    for name in ("server_lr", "compress", "privacy.epsilon"):
        assert concerns(name, fedavg)
        assert not concerns(name, local)
    assert concerns("adaped.psi_init", METHODS["adaped"])
    assert not concerns("adaped.psi_init", fedavg)
    assert concerns("graph", METHODS["network-lasso"])
    assert not concerns("graph", fedavg)
    assert concerns("clients", local)


def test_numbers_are_rows_and_shapes_are_programs():
    adaped, config = METHODS["adaped"], RunConfig()
    assert all(is_traced(name, adaped, config) for name in ("lr", "server_lr", "adaped.psi_init", "privacy.epsilon"))
    assert not any(is_traced(name, adaped, config) for name in ("clients", "adaped.gate", "rounds", "batch_size"))
    in_steps = RunConfig(privacy=PrivacyConfig(noise_multiplier=1.0, delta=1e-5, noise="per_step"))
    assert not is_traced("privacy.epsilon", adaped, in_steps)


def test_settings_take_their_place():
    config = apply_settings(RunConfig(set=("adaped.lr=1",)), {"lr": 0.5, "adaped.lr": 2.0, "privacy.epsilon": 3.0})
    assert config.lr == 0.5
    assert config.privacy.epsilon == 3.0
    assert config.set == ("adaped.lr=1", "adaped.lr=2.0")


def test_a_share_of_the_clients():
    assert cohort_of({"cohort": ".1m"}, 25) == 2
    assert cohort_of({"cohort": ".01m"}, 25) == 1
    assert cohort_of({"cohort": 5}, 25) is None
    assert apply_settings(RunConfig(), {"cohort": ".1m"}).cohort is None
