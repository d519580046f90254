"""Clients spread over two devices give the numbers of one: every method, in float64."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpfl import METHODS, ExecutionPlan, JaxpflError

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

from problem import assert_close, outcome, ragged_federation, simulate

PLANS = {
    "everyone, one by one": ("map", None),
    "everyone at once": ("vmap", None),
    "cohort, one by one": ("map", 3),
    "cohort in blocks of 2": ("2", 3),
}


@pytest.fixture(scope="module")
def six_clients():
    return jax.tree.map(lambda a: a[:6], ragged_federation())


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("method", sorted(METHODS))
def test_two_devices_give_the_numbers_of_one(six_clients, method, name):
    clients, cohort = PLANS[name]
    with jax.enable_x64(True):
        want, got = (
            outcome(
                simulate(
                    METHODS[method],
                    six_clients,
                    plan=ExecutionPlan(clients=clients, devices=devices),
                    cohort=cohort,
                    dtype=np.float64,
                ),
                3,
                (1, 2),
            )
            for devices in (1, 2)
        )
    assert_close(got, want, 1e-9)


def test_clients_and_their_states_stay_on_their_device(six_clients):
    simulation = simulate(METHODS["adaped"], six_clients)
    state, _ = simulation.advance(simulation.init([0]), 2)
    for leaf in jax.tree.leaves((state.clients, state.participations)):
        assert [s.data.shape[1] for s in leaf.addressable_shards] == [3, 3]
    for leaf in jax.tree.leaves(simulation.federation):
        assert [s.data.shape[0] for s in leaf.addressable_shards] == [3, 3]


def test_only_sums_cross_devices(six_clients):
    simulation = simulate(METHODS["fedavg"], six_clients, plan=ExecutionPlan(clients="map"))
    module = simulation.export("cpu").mlir_module()
    assert "all_reduce" in module
    assert "all_to_all" not in module


@pytest.mark.parametrize(
    ("devices", "message"), [(3, "be at most 2"), (4, "must divide"), (0, "positive"), ("two", "positive")]
)
def test_devices_that_cannot_be(six_clients, devices, message):
    with pytest.raises(JaxpflError, match=message):
        simulate(METHODS["local"], six_clients, plan=ExecutionPlan(devices=devices))


def test_automatic_choice_divides_the_clients():
    assert simulate(METHODS["local"], ragged_federation()).execution.devices == 1  # seven clients
