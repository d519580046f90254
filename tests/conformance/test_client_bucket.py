"""Rows that are nobody's change no number where everyone takes part; with a cohort, every method is asked at once with
all else that must not matter."""

import pytest
from problem import as_fit_builds, assert_close, outcome, reference
from test_same_numbers import WITHOUT_BUCKET

from jaxpfl import ExecutionPlan


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("clients", ["vmap", "3"])
def test_everyone_in_a_bucket(method, federation, clients):
    """Full participation, whose programs gather nothing if all clients run at once."""
    plan = ExecutionPlan(clients=clients, devices=1, client_bucket=10)
    simulation = as_fit_builds(method, federation, plan=plan, cohort=None)
    if method.name in WITHOUT_BUCKET:
        assert simulation.placement.rows == federation.num_clients
        return
    assert simulation.placement.rows == 10
    assert_close(outcome(simulation, 3, (1, 2)), reference(method.name, None), 1e-9)
