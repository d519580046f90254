"""Axes: their names, the types of their values, and whom they concern."""

import pytest

from jaxpfl import METHODS
from jaxpfl.privacy import PrivacyConfig
from jaxpfl.runs.config import RunConfig
from jaxpfl.runs.sweep.grid import Grid, apply_settings, cohort_of, concerns, is_traced, named, parse
from jaxpfl.support.errors import JaxpflError


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
    with pytest.raises(JaxpflError, match=r"clients in --grid must be int.*: list its values instead of a range"):
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
