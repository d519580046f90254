"""Clients in host memory: which methods are not served, and why; `test_same_numbers` has the numbers of others."""

import jax
import jax.numpy as jnp
import pytest
from problem import ragged_federation, simulate, streamed

from jaxpfl import METHODS, ExecutionPlan, JaxpflError
from jaxpfl.engine import programs
from jaxpfl.engine.state import server_context
from jaxpfl.engine.streamed.rounds import needs_all

REFUSED = {
    "cfl": "its server uses individual uploads, and all clients take part in every round",
    "fedbuff": "its rounds are asynchronous",
    "pooled": "it trains a single client on all data",
}
SEES_CLIENTS = {"adamix", "fedamp", "fedpac", "network-lasso", "cfl"}
"""Methods whose servers see individual uploads, or send each client its own message."""


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

        own = programs.shapes(sent, hp, state.server)
        return bool(needs_all(simulation.algorithm, own))

    assert {name for name in METHODS if name != "pooled" and is_such(name)} == SEES_CLIENTS
