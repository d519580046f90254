"""A method's numbers do not depend on how it is executed, on padding, or on the clients' order."""

import jax
import numpy as np
import pytest
from problem import assert_close, moved, outcome, simulate

from jaxpfl import ExecutionPlan, data

# Each plan with the cohort that it is asked to run: None is everyone, which needs no gather.
PLANS = {
    "all at once": (ExecutionPlan(clients="vmap"), None),
    "cohort at once": (ExecutionPlan(clients="vmap", runs="vmap"), 4),
    "blocks of 3 of all": (ExecutionPlan(clients="3", runs="map"), None),
    "short calls, nothing donated": (
        ExecutionPlan(clients="map", runs="map", rounds_per_call=2, donate=False),
        4,
    ),
}


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", PLANS)
def test_any_plan_gives_the_same_numbers(method, federation, name):
    plan, cohort = PLANS[name]
    one_by_one = ExecutionPlan(clients="map", runs="map", rounds_per_call=8)
    want, got = (
        outcome(simulate(method, federation, plan=p, cohort=cohort, dtype=np.float64), 3, (1, 2))
        for p in (one_by_one, plan)
    )
    assert_close(got, want, 1e-9)


@pytest.mark.every_method(slow=True)
@pytest.mark.usefixtures("x64")
def test_everything_that_must_not_matter_at_once(method, federation):
    """Blocks of clients, runs and devices together, on padded data with garbage in the padding, in another order."""
    one_by_one = ExecutionPlan(clients="map", runs="map", devices=1)
    simulation = simulate(method, federation, plan=one_by_one, dtype=np.float64)
    want = outcome(simulation, 3, (1, 2))
    padded = data.pad(federation, train_capacity=19, validation_capacity=5, test_capacity=9)
    together = ExecutionPlan(clients="3", runs="vmap", devices=2)
    other = simulate(method, data.permute(spoiled(padded), ORDER), plan=together, dtype=np.float64)
    assert_close(outcome(other, 3, (1, 2)), reordered(simulation, want), 1e-9)


ORDER = np.array([3, 0, 6, 2, 5, 1, 4])


def reordered(simulation, result):
    """The outcome of the same clients in that order."""
    scores = jax.tree.map(lambda a: a[:, ORDER], result["scores"])
    return result | {"state": moved(simulation, result["state"], ORDER), "scores": scores}


def spoiled(federation):
    """NaN and labels of no class where there is only padding of what a method may see."""

    def spoil(split):
        x = np.where(split.mask[..., None], split.x, np.nan)
        return split._replace(x=x, y=np.where(split.mask, split.y, 10**6))

    return federation._replace(train=spoil(federation.train), validation=spoil(federation.validation))


@pytest.mark.slow
def test_one_float32_round_under_two_plans(method, federation):
    want, got = (outcome(simulate(method, federation, plan=ExecutionPlan(clients=c)), 1) for c in ("map", "vmap"))
    assert_close(got, want, 1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("batch_size", [6, 100], ids=["mini-batches", "full batches"])
def test_padding_changes_nothing(method, federation, batch_size):
    padded = data.pad(federation, train_capacity=19, validation_capacity=5, test_capacity=9)
    want, got = (outcome(simulate(method, f, dtype=np.float64, batch_size=batch_size), 3) for f in (federation, padded))
    assert_close(got, want, 1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_garbage_in_the_padding_reaches_nothing(method, federation):
    want, got = (outcome(simulate(method, f, dtype=np.float64), 3)["state"] for f in (federation, spoiled(federation)))
    assert_close(got, want, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_order_of_clients_changes_nothing(method, federation):
    simulation = simulate(method, federation, dtype=np.float64)
    want = reordered(simulation, outcome(simulation, 3))
    got = outcome(simulate(method, data.permute(federation, ORDER), dtype=np.float64), 3)
    assert_close(got, want, 1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_seeds_together_equal_seeds_alone(method, federation):
    simulation = simulate(method, federation, plan=ExecutionPlan(runs="vmap"), dtype=np.float64)
    together = outcome(simulation, 3, (5, 6, 7))
    for i, seed in enumerate((5, 6, 7)):
        alone = outcome(simulation, 3, (seed,))
        assert_close(alone, jax.tree.map(lambda a, i=i: a[i : i + 1], together), 1e-9)


def test_call_lengths_change_no_bit(method, federation):
    simulation = simulate(method, federation)
    state = simulation.init([0])
    for length in (1, 3, 2):
        state, _ = simulation.advance(state, length)
    whole, _ = simulation.advance(simulation.init([0]), 6)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
        if not jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(a, b)


def test_a_state_that_went_through_the_host_continues_bit_for_bit(method, federation, tmp_path):
    from jaxpfl.experiment.checkpoint import Checkpoints

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
