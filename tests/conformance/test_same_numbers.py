"""A method's numbers do not depend on how it is executed, on padding, or on the clients' order."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from problem import ORDER, assert_close, lose_round, outcome, padded, reference, reordered, simulate, spoiled, streamed
from toys import CASES

from jaxpfl import METHODS, ExecutionPlan, stack_clients
from jaxpfl.algorithms.parts import optimizers
from jaxpfl.data.passes import size_classes
from jaxpfl.runs.checkpoint import Checkpoints

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
    given = spoiled(padded(federation).rows(ORDER))
    other = simulate(method, given, plan=plan, dtype=np.float64)
    want = reordered(simulate(method, federation, dtype=np.float64), reference(method.name))
    with optimizers.one_vector(True):
        assert_close(outcome(other, 3, (1, 2)), want, 1e-9)
        lose_round(other, other.advance(other.init((1, 2)), 2)[0])


SERVED = ("adamix", "fedem", "fedper", "knn-per", "local", "network-lasso", "persfl")
"""Methods of each kind of state, upload and message whose clients may live in host memory; the kinds of AdaPeD, Ditto
and SCAFFOLD are in `engine/test_streamed_clients`."""
IN_PARTS = ("toy clusters", "toy medians", "adamix", "fedpac", "scaffold")
"""Methods that between them have every part of the engine, single uploads, stacks of models and two kinds of upload."""


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", IN_PARTS)
def test_models_in_parts_on_two_devices_give_the_same(federation, name):
    plan = ExecutionPlan(model_shards=2, clients="3", runs="vmap")
    got = outcome(simulate(CASES[name], federation, plan=plan, dtype=np.float64), 3, (1, 2))
    assert_close(got, reference(name), 1e-9)


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
def test_any_plan_gives_the_same_numbers(federation, name, cohort, plan):
    got = outcome(simulate(CASES[name], federation, plan=plan, cohort=cohort, dtype=np.float64), 3, (1, 2))
    assert_close(got, reference(name, cohort), 1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("name", "clients"), [("fedem", "3"), ("ifca", "map")])
def test_chunks_of_passes_change_nothing(federation, name, clients):
    """Passes over all examples in chunks of 2, also where several clients' chunks are one list, and runs an axis."""
    short = federation._replace(
        **{name: replace(getattr(federation, name), chunk=2) for name in ("train", "validation", "test")}
    )
    plan = ExecutionPlan(clients=clients, runs="vmap", devices=1)
    got = outcome(simulate(METHODS[name], short, plan=plan, dtype=np.float64), 3, (1, 2))
    assert_close(got, reference(name), 1e-9)


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
def test_a_state_that_went_through_the_host_continues_bit_for_bit(method, federation, tmp_path):
    """However the rounds are parted into calls."""
    simulation = simulate(method, federation)
    whole, history = simulation.advance(simulation.init([0, 1]), 5)
    state, _ = simulation.advance(simulation.init([0, 1]), 2)
    Checkpoints(tmp_path).save(2, state, 1.5)
    again, seconds = Checkpoints(tmp_path).restore(simulation.init([0, 1]), 2, print)
    assert seconds == 1.5
    again, _ = simulation.advance(again, 1)
    again, last = simulation.advance(again, 2)
    for a, b in zip(
        jax.tree.leaves((whole._replace(key=(), noise=()), jax.tree.map(lambda a: a[:, 3:], history))),
        jax.tree.leaves((again._replace(key=(), noise=()), last)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_clients_in_host_memory_give_the_same_bits(name):
    with jax.enable_x64(True):
        found = outcome(streamed(name), 3, (1, 2))
    jax.tree.map(np.testing.assert_array_equal, reference(name), found)
