"""Clients in host memory: methods of every kind, to the bit, and why others are not served."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problem import outcome, ragged_federation, reference, simulate
from toys import CASES

from jaxpfl import METHODS, ExecutionPlan, JaxpflError, Simulation
from jaxpfl.engine import compiled
from jaxpfl.engine.state import server_context
from jaxpfl.engine.streamed.rounds import needs_all
from jaxpfl.engine.streamed.simulation import StreamedSimulation

REFUSED = {
    "cfl": "its server sees single uploads, and all clients take part in every round",
    "fedbuff": "its rounds are asynchronous",
    "pooled": "one client trains",
}
SERVED = ("adaped", "adamix", "ditto", "fedem", "fedper", "knn-per", "local", "network-lasso", "persfl", "scaffold")
"""One of each kind of state, upload and message that is served."""
SEES_CLIENTS = {"adamix", "fedamp", "fedpac", "network-lasso", "cfl"}
"""Methods whose servers see each upload, or send each client its own message."""


def streamed(name: str) -> Simulation:
    plan = ExecutionPlan(clients="map", runs="map", devices=1, rounds_per_call=8, clients_in="host")
    make = partial(StreamedSimulation, where="host")
    return simulate(CASES[name], ragged_federation(), plan=plan, dtype=np.float64, make=make)


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_the_numbers_are_those_of_clients_on_the_device(name: str) -> None:
    with jax.enable_x64(True):
        found = outcome(streamed(name), 3, (1, 2))
    jax.tree.map(np.testing.assert_array_equal, reference(name), found)


@pytest.mark.parametrize(("name", "why"), [*REFUSED.items(), ("toy medians", "its clients are in groups")])
def test_other_methods_are_refused(name: str, why: str) -> None:
    with pytest.raises(
        JaxpflError, match=f"plan.clients_in = host is not possible, .* {why}.*use plan.clients_in = device"
    ):
        streamed(name)


@pytest.mark.slow
def test_these_are_all_that_see_single_clients() -> None:
    """By what each registered method's server sees and sends."""

    def is_such(name: str) -> bool:
        simulation = simulate(METHODS[name], ragged_federation(), plan=ExecutionPlan(devices=1))
        state, hp = simulation.shapes_of_one_run()
        ctx, server = server_context(simulation.participation, jnp.int32(0)), simulation.algorithm.server

        def sent(hp, state):
            return server.broadcast(jax.random.key(0), hp, ctx, state).per_client

        own = compiled.shapes(sent, hp, state.server)
        return bool(needs_all(simulation.algorithm, own))

    assert {name for name in METHODS if name != "pooled" and is_such(name)} == SEES_CLIENTS
