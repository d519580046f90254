"""A method's numbers do not depend on how it is executed, on padding, or on the clients' order."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from problem import ORDER, assert_close, outcome, padded, reference, reordered, simulate, spoiled
from toys import CASES

from jaxpfl import METHODS, ExecutionPlan, stack_clients
from jaxpfl.data.passes import size_classes

# Each plan with the cohort that it is asked to run: None is everyone, which needs no gather.
PLANS = {
    "all at once": (ExecutionPlan(clients="vmap"), None),
    "cohort at once": (ExecutionPlan(clients="vmap", runs="vmap"), 4),
    "blocks of 3 of all": (ExecutionPlan(clients="3", runs="map"), None),
    "short calls, nothing donated": (ExecutionPlan(clients="map", runs="map", rounds_per_call=2, donate=False), 4),
}


@pytest.mark.every_method(slow=True)
@pytest.mark.usefixtures("x64")
def test_everything_that_must_not_matter_at_once(method, federation):
    """Blocks of clients, runs and devices together, a row that is nobody's, padded data with garbage in the padding, in
    another order."""
    plan = ExecutionPlan(clients="3", runs="vmap", devices=2)
    given = spoiled(padded(federation).rows(ORDER))
    other = simulate(method, given, plan=plan, dtype=np.float64)
    want = reordered(simulate(method, federation, dtype=np.float64), reference(method.name))
    assert_close(outcome(other, 3, (1, 2)), want, 1e-9)


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
    ("plan", "name"),
    [
        ("all at once", "toy medians"),
        ("cohort at once", "toy clusters"),
        ("blocks of 3 of all", "local"),
        ("short calls, nothing donated", "adaped"),
    ],
)
def test_any_plan_gives_the_same_numbers(federation, plan, name):
    execution, cohort = PLANS[plan]
    got = outcome(simulate(CASES[name], federation, plan=execution, cohort=cohort, dtype=np.float64), 3, (1, 2))
    assert_close(got, reference(name, cohort), 1e-9)


@pytest.mark.slow
def test_one_float32_round_under_two_plans(method, federation):
    want, got = (outcome(simulate(method, federation, plan=ExecutionPlan(clients=c)), 1) for c in ("map", "vmap"))
    assert_close(got, want, 1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_with_full_batches_neither_padding_nor_order_change_anything(method, federation):
    simulation = simulate(method, federation, dtype=np.float64, batch_size=100)
    other = simulate(method, padded(federation).rows(ORDER), dtype=np.float64, batch_size=100)
    assert_close(outcome(other, 3), reordered(simulation, outcome(simulation, 3)), 1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("name", "clients"), [("fedem", "3"), ("ifca", "map")])
def test_chunks_of_passes_change_nothing(federation, name, clients):
    """Passes over all examples in chunks of 2, also where several clients' chunks are one list, and runs an axis."""
    short = federation._replace(
        **{name: replace(getattr(federation, name), chunk=2) for name in ("train", "validation", "test")}
    )
    want, got = (
        outcome(simulate(METHODS[name], given, plan=plan, dtype=np.float64), 2, (1, 2))
        for given, plan in (
            (federation, ExecutionPlan(clients="map", runs="map", devices=1)),
            (short, ExecutionPlan(clients=clients, runs="vmap", devices=1)),
        )
    )
    assert_close(got, want, 1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("name", "clients"), [("fedem", "3"), ("adaped", "map")])
def test_full_batches_at_the_length_of_a_class_change_nothing(monkeypatch, name, clients):
    rng = np.random.default_rng(3)
    sizes = (2, 5, 40, 3, 9, 4, 2)
    assert len(size_classes(np.array(sizes))) == 3
    federation = stack_clients([(rng.normal(size=(n, 5)), rng.integers(3, size=n)) for n in sizes])
    plan = ExecutionPlan(clients=clients, runs="vmap", devices=1)
    got = outcome(simulate(METHODS[name], federation, plan=plan, dtype=np.float64, batch_size=100), 2, (1, 2))
    monkeypatch.setattr("jaxpfl.algorithms.parts.local_work.size_classes", lambda sizes: (40,))
    want = outcome(simulate(METHODS[name], federation, plan=plan, dtype=np.float64, batch_size=100), 2, (1, 2))
    assert_close(got, want, 1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_garbage_in_the_padding_reaches_nothing(method, federation):
    want, got = (outcome(simulate(method, f, dtype=np.float64), 3)["state"] for f in (federation, spoiled(federation)))
    assert_close(got, want, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_seeds_together_equal_seeds_alone(method, federation):
    simulation = simulate(method, federation, plan=ExecutionPlan(runs="vmap"), dtype=np.float64)
    together = outcome(simulation, 3, (5, 6, 7))
    for i, seed in enumerate((5, 6, 7)):
        alone = outcome(simulation, 3, (seed,))
        assert_close(alone, jax.tree.map(lambda a, i=i: a[i : i + 1], together), 1e-9)


@pytest.mark.slow
def test_call_lengths_change_no_bit(method, federation):
    simulation = simulate(method, federation)
    state = simulation.init([0])
    for length in (1, 3, 2):
        state, _ = simulation.advance(state, length)
    whole, _ = simulation.advance(simulation.init([0]), 6)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
        if not jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_state_that_went_through_the_host_continues_bit_for_bit(method, federation, tmp_path):
    from jaxpfl.runs.checkpoint import Checkpoints

    simulation = simulate(method, federation)
    state, _ = simulation.advance(simulation.init([0, 1]), 2)
    Checkpoints(tmp_path).save(2, state, 1.5)
    again, seconds = Checkpoints(tmp_path).restore(simulation.init([0, 1]), 2, print)
    assert seconds == 1.5
    state, history = simulation.advance(state, 3)
    again, history_again = simulation.advance(again, 3)
    for a, b in zip(
        jax.tree.leaves((state._replace(key=(), noise=()), history)),
        jax.tree.leaves((again._replace(key=(), noise=()), history_again)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
