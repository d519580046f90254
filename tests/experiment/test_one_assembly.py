"""`fit` and the command line are one way: each drift that there was is a test, and stored runs still resume."""

import dataclasses
import inspect
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import jaxpfl
from jaxpfl import JaxpflError, JaxpflWarning
from jaxpfl.data import Split
from jaxpfl.engine.build import assemble, simulation_of
from jaxpfl.engine.simulation import Simulation
from jaxpfl.engine.spec import Settings
from jaxpfl.privacy import PrivacyConfig
from jaxpfl.runs.config import (
    RunConfig,
    default_folder,
    differences,
    fill_defaults,
    from_mapping,
    resolve,
    spec_for,
    to_json,
)
from jaxpfl.runs.run import open_folder
from jaxpfl.runs.setup import Experiment, load_federation, prepare, protection_of
from jaxpfl.runs.stored_run import open_run
from jaxpfl.similarity import graphs

STORED = Path(__file__).parent / "stored_run" / "config.json"
"""Config of a run that version 0.1 stored before there was a `RunSpec`."""
SMALL = {"model": "linear", "clients": 4, "cohort": 2, "batch_size": 5, "local_steps": 2, "rounds": 2, "seeds": 2}


def command(method: str = "fedavg", **changes) -> Experiment:
    """Run as the command line prepares it."""
    return prepare(resolve(RunConfig(**SMALL | changes)), (method,))


def python(method: str = "fedavg", **changes) -> jaxpfl.Fit:
    """Run of `fit` on the same data."""
    given = SMALL | changes
    _, federation = load_federation(resolve(RunConfig(clients=given["clients"])))
    return jaxpfl.fit(method, federation, **{name: value for name, value in given.items() if name != "clients"})


@pytest.mark.slow
def test_no_test_examples_is_a_warning():
    with pytest.warns(JaxpflWarning, match="no client has test examples: every score will be NaN"):
        command(test_share=0)
    with pytest.raises(JaxpflError, match="no client has test examples"):
        prepare(resolve(RunConfig(**SMALL, test_share=0)), ("fedavg",), strict=True)


def test_a_graph_without_an_edge_is_refused_by_both(tmp_path):
    (tmp_path / "empty.csv").write_text("client,neighbour\n")
    with pytest.raises(JaxpflError, match=r"graph = .*empty.csv has no edges: network-lasso requires neighbors"):
        command("network-lasso", graph=str(tmp_path / "empty.csv"))
    with pytest.raises(JaxpflError, match="graph = given has no edges: network-lasso requires neighbors"):
        python("network-lasso", graph=graphs.from_edges([], 4))


@pytest.mark.slow
def test_draws_of_batches_and_stragglers_are_those_of_the_other():
    changes = {"stragglers": 0.9, "same_stragglers": True}
    experiment = command(**changes, seed=0)
    simulation = experiment.simulation("fedavg")
    state, _ = simulation.advance(simulation.init(range(2)), 2)
    expected = np.asarray(simulation.evaluate(state)["after"]["loss"])
    found = python(**changes).scores["after"]["loss"][-1]
    np.testing.assert_array_equal(found, expected)
    assert not np.array_equal(found, python().scores["after"]["loss"][-1])


@pytest.mark.slow
def test_what_changes_nothing_is_said_by_both():
    message = r"server_lr = 0.5 has no effect: no method of the run \(local\) has a server"
    for way in (command, python):
        with pytest.warns(JaxpflWarning, match=message):
            way("local", server_lr=0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": -0.1}, "lr must be > 0 and finite, got -0.1"),
        ({"dropout": 1.0}, "dropout must be >= 0 and < 1, got 1.0"),
        ({"cohort": 5}, r"cohort must be between 1 and the number of clients \(4\), got 5"),
        ({"participation": "poison"}, "unknown participation 'poison': did you mean 'poisson'"),
        ({"batch_size": 2**31}, "batch_size must be at most 2147483647, got 2147483648"),
    ],
)
def test_a_value_outside_its_range_is_one_line_in_both(changes, message):
    for way in (command, python):
        with pytest.raises(JaxpflError, match=message):
            way(**changes)


@pytest.mark.slow
def test_a_rate_means_the_same_in_both():
    """All the method's rates, and the cohort's: K/m of the clients that are trained."""
    changes = {"lr": 0.3, "server_lr": 0.5, "participation": "poisson"}
    run, simulation = command("ditto", **changes).runs["ditto"], python("ditto", **changes).simulation
    for name, value in vars(run.hp).items():
        np.testing.assert_allclose(getattr(simulation.hp, name), value, rtol=1e-6)
    assert run.hp.lr == run.hp.lr_personal == 0.3
    here, there = run.cohorts, simulation.participation
    assert (here.name, here.rate, here.capacity) == (there.name, there.rate, there.capacity) == ("poisson", 0.5, 4)


@pytest.mark.slow
def test_privacy_is_one_mechanism_and_one_claim():
    config = PrivacyConfig(epsilon=8.0, quantile=0.5, delta=1e-3, clipping_norm=0.5)
    experiment, result = command(privacy=config), python(privacy=config)
    protection = protection_of(experiment.runs["fedavg"])
    assert protection.statement is not None
    assert result.statement(1e-3).epsilon == protection.statement.epsilon
    given = python(privacy=protection.mechanism)
    np.testing.assert_array_equal(given.personalized_accuracy, result.personalized_accuracy)
    assert given.simulation.algorithm.noise == experiment.simulation("fedavg").algorithm.noise


def test_a_setting_is_declared_once_and_is_a_keyword_a_flag_and_a_field():
    shared = {field.name for field in dataclasses.fields(Settings)}
    assert shared <= set(inspect.signature(jaxpfl.fit).parameters)
    assert shared <= to_json(RunConfig()).keys()
    split = {field.name for field in dataclasses.fields(Split)}
    assert split == set(inspect.signature(jaxpfl.federate).parameters) - {"source"}
    assert split <= to_json(RunConfig()).keys()
    assert "same_stragglers: The same clients are slow" in str(jaxpfl.fit.__doc__)
    for kind in (Settings, Split):
        assert all(field.metadata["help"].endswith((".", ")")) for field in dataclasses.fields(kind))


def test_a_spec_is_enough_for_a_simulation():
    config = resolve(RunConfig(**SMALL, set=("fine_tune_steps=3", "fedavg-ft.lr=0.2")))
    spec = spec_for(config, "fedavg-ft", ("fedavg-ft",))
    assert dict(spec.hyper) == {"lr": 0.2}
    assert dict(spec.options) == {"fine_tune_steps": 3}
    assert tuple(spec.seeds) == (0, 1)
    _, federation = load_federation(config)
    assert isinstance(simulation_of(spec, federation), Simulation)
    assert assemble(spec, federation).work.steps == 2
    with pytest.raises(JaxpflError, match="rounds must be at least 1, got 0"):
        dataclasses.replace(spec, rounds=0)


def test_a_stored_run_is_read_and_not_resumed_in_other_orders(tmp_path):
    """Its config is today's; as clients drew their examples in another order, it is not continued."""
    record = json.loads(STORED.read_text())
    config = resolve(from_mapping(record["config"], "config.json"))
    assert to_json(config) == fill_defaults(record["config"])
    shutil.copy(STORED, tmp_path / "config.json")
    assert open_run(tmp_path).config == config
    with pytest.raises(JaxpflError, match="another version drew the examples in a different order"):
        open_folder(tmp_path, prepare(config, tuple(record["methods"])), resume=True)


def test_a_setting_that_there_was_not_has_its_default_in_a_stored_run():
    now = to_json(resolve(RunConfig()))
    old = {name: value for name, value in now.items() if name != "same_stragglers"}
    old["privacy"] = {name: value for name, value in now["privacy"].items() if name != "noise_seed"}
    assert differences(old, now) == ([], [])
    assert differences(old, now | {"same_stragglers": True})[0] == ["same_stragglers: False -> True"]


@dataclasses.dataclass(frozen=True)
class Flags(RunConfig):
    """As the command line's own, which state a field anew."""

    set: tuple[str, ...] = ()


def test_the_folder_of_a_run_keeps_its_name():
    """With ``--resume`` alone, a run is found again: settings at their defaults are not in the name."""
    for config in (RunConfig(), Flags()):
        assert default_folder("run", resolve(config), ("fedavg",), False) == Path("runs/run-digits-e4b49bd0")
