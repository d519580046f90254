"""A method's numbers do not depend on how it is executed, on padding, or on the clients' order."""

from dataclasses import replace

import chex
import jax
import numpy as np
import optax
import pytest
from problem import (
    ORDER,
    WHOLE,
    assert_close,
    assert_continues,
    choose,
    disguised,
    lose_round,
    numbers,
    outcome,
    reference,
    reordered,
    simulate,
    streamed,
    traced_once,
)
from toys import CASES

from jaxpfl import METHODS, ExecutionPlan, stack_clients
from jaxpfl.algorithms.parts import optimizers
from jaxpfl.algorithms.parts.servers import WithOptState
from jaxpfl.data.passes import size_classes

WITH_FORMULAS = (
    *("adamix", "adaped", "adaped, idle", "adaped-plus", "adaped-plus, kept", "apfl", "ditto", "fedala", "fedavg"),
    *("fedavg-ft", "fedbabu", "fedbn", "feddbe", "feddyn", "fedem", "fedper", "fedprox", "fedproto", "fedrep"),
    *("fedrod", "fml", "ifca", "knn-per", "l2gd", "lg-fedavg", "local", "map-gaussian", "map-laplace", "moon"),
    *("mr-mtl", "perfedavg", "pfedme", "quped", "scaffold"),
)
"""Methods whose formulas in `tests/oracles` are compared with such rounds; their clients' ids are in no order."""


@pytest.mark.every_method(apart=WITH_FORMULAS)
@pytest.mark.usefixtures("x64")
def test_everything_that_must_not_matter_at_once(method, federation):
    """Blocks of clients, runs and devices together, a row that is nobody's, padded data with garbage in the padding, in
    another order, parameters in one vector."""
    plan = ExecutionPlan(clients="3", runs="vmap", devices=2)
    given = disguised(federation.rows(ORDER))
    other = simulate(method, given, plan=plan, dtype=np.float64)
    want = reordered(simulate(method, federation, dtype=np.float64), reference(method.name))
    with optimizers.one_vector(True):
        assert_close(outcome(other, 3, (1, 2)), want, 1e-9)
        lose_round(other, other.advance(other.init((1, 2)), 2)[0])


SERVED = ("adamix", "fedem", "fedper", "knn-per", "local", "network-lasso", "persfl")
"""Methods of each kind of state, upload and message whose clients may live in host memory; the kinds of AdaPeD, Ditto
and SCAFFOLD are in `engine/test_streamed_clients`."""
IN_PARTS = ("toy clusters", "adamix", "fedpac", "scaffold")
"""Methods with idle clients, stacks of models and two kinds of upload; single uploads of clients in groups are on four
devices in `multidevice/test_model_shards`."""


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_PARTS)
def test_models_in_parts_on_two_devices_give_the_same(name):
    plan = ExecutionPlan(model_shards=2, clients="3", runs="vmap")
    assert_close(numbers(CASES[name], plan=plan), reference(name), 1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "cohort", "plan"),  # a cohort of None is everyone, which needs no gather
    [
        ("toy medians", None, ExecutionPlan(clients="vmap")),
        ("toy clusters", 4, ExecutionPlan(clients="vmap", runs="vmap")),
        ("adaped", 4, ExecutionPlan(clients="map", runs="map", rounds_per_call=2, donate=False)),
    ],
    ids=["all at once", "cohort at once", "short calls, nothing donated"],
)
def test_any_plan_gives_the_same_numbers(federation, tmp_path, name, cohort, plan):
    """And one trace serves calls of every length, also from a checkpoint."""
    simulation = simulate(CASES[name], federation, plan=plan, cohort=cohort, dtype=np.float64, wrap=traced_once)
    assert_close(outcome(simulation, 3, (1, 2)), reference(name, cohort), 1e-9)
    assert_continues(simulation, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "clients"), [("fedem", "3"), ("ifca", "map")])
def test_chunks_of_passes_change_nothing(federation, name, clients):
    """Passes over all examples in chunks of 2, also where several clients' chunks are one list, and runs an axis."""
    short = federation._replace(
        **{name: replace(getattr(federation, name), chunk=2) for name in ("train", "validation", "test")}
    )
    plan = ExecutionPlan(clients=clients, runs="vmap", devices=1)
    assert_close(numbers(METHODS[name], short, plan=plan), reference(name), 1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("name", "clients"), [("fedem", "3"), ("adaped", "map")])
def test_full_batches_at_the_length_of_a_class_change_nothing(monkeypatch, name, clients):
    rng = np.random.default_rng(3)
    sizes = (2, 5, 40, 3, 9, 4, 2)
    assert len(size_classes(np.array(sizes))) == 3
    federation = stack_clients([(rng.normal(size=(n, 5)), rng.integers(3, size=n)) for n in sizes])
    given = {"plan": ExecutionPlan(clients=clients, runs="vmap", devices=1), "dtype": np.float64, "batch_size": 100}
    got = outcome(simulate(METHODS[name], federation, **given), 2, (1, 2), scored=False)
    monkeypatch.setattr("jaxpfl.algorithms.parts.local_work.size_classes", lambda sizes: (40,))
    assert_close(got, outcome(simulate(METHODS[name], federation, **given), 2, (1, 2), scored=False), 1e-9)


@pytest.mark.slow
def test_test_examples_reach_nothing_but_scores(method, federation):
    test, want = federation.test, reference(method.name)
    nothing = test.with_examples(x=np.full_like(test.examples.x, np.nan), y=2 - test.examples.y)
    got = numbers(method, federation._replace(test=nothing))
    chex.assert_trees_all_equal((got["state"], got["history"]), (want["state"], want["history"]))
    assert not np.array_equal(got["scores"]["after"]["loss"], want["scores"]["after"]["loss"])


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_sgd_by_name_and_as_a_factory_are_one(method, federation):
    """At the server the factory takes the general way, with its memory, and arrives where averaging does."""
    chosen, want = choose(method, optimizer=optax.sgd, server_optimizer=optax.sgd), reference(method.name)
    simulation = simulate(chosen, federation, plan=WHOLE, dtype=np.float64)
    assert isinstance(simulation.init([0]).server, WithOptState) == hasattr(method.hyper, "server_lr")
    got = outcome(simulation, 3, (1, 2), scored=False)
    if hasattr(method.hyper, "server_lr"):
        got["state"] = got["state"]._replace(server=got["state"].server.state)
    assert_close(got, want | {"scores": {}}, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_clients_in_host_memory_give_the_same_bits(name):
    with jax.enable_x64(True):
        found = outcome(streamed(name), 3, (1, 2))
    jax.tree.map(np.testing.assert_array_equal, reference(name), found)
