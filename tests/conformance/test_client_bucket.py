"""Rows that are nobody's change no number of any method, and a method that cannot have them is run without."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from problem import CLASSES, MODELS, assert_close, graph_of, outcome, simulate
from toys import participation

from jaxpfl import METHODS, ExecutionPlan, LocalWork, Simulation
from jaxpfl.engine.assemble import make_simulation, make_task

WITHOUT = {
    "adamix": "its server sees single uploads",
    "network-lasso": "its server sees single uploads",
    "toy medians": "its clients are in groups",
}
"""Methods that cannot be in a bucket, and why."""


def bucketed(method, federation, plan, cohort) -> Simulation:
    """As `simulate`, but a registered method is built as `fit` builds it: for clients of any number."""
    if method is not METHODS.get(method.name):
        return simulate(method, federation, plan=plan, cohort=cohort, dtype=np.float64)
    task = make_task(MODELS.get(method.name, "mlp:6"), federation, CLASSES)
    work = LocalWork(np.asarray(federation.train.size), 3, 6)
    work = replace(work, graph=graph_of(federation) if method.graph else None)
    cohorts = participation(method.name, federation.num_clients, cohort)
    return make_simulation(method, task, work, federation, cohorts, method.hyper, options={}, plan=plan)


def check(method, federation, plan, cohort):
    federation = jax.tree.map(lambda a: a.astype(float) if np.issubdtype(a.dtype, np.floating) else a, federation)
    simulation = bucketed(method, federation, plan, cohort)
    assert simulation.execution.reasons[-1].startswith("no bucket") == (method.name in WITHOUT)
    if method.name in WITHOUT:
        assert simulation.execution.reasons[-1] == f"no bucket: {WITHOUT[method.name]}"
        return
    assert simulation.placement.rows == 10 + 10 % simulation.execution.devices
    one_by_one = ExecutionPlan(clients="map", runs="map", devices=1)
    want = outcome(simulate(method, federation, plan=one_by_one, cohort=cohort, dtype=np.float64), 3, (1, 2))
    assert_close(outcome(simulation, 3, (1, 2)), want, 1e-9)


@pytest.mark.every_method(slow=True)
@pytest.mark.usefixtures("x64")
def test_a_bucket_changes_no_number(method, federation):
    """Three rounds of four of seven clients, as ten rows; together with blocks, runs as one axis and two devices."""
    check(method, federation, ExecutionPlan(clients="3", runs="vmap", devices=2, client_bucket=10), 4)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("clients", ["vmap", "3"])
def test_everyone_in_a_bucket(method, federation, clients):
    """Full participation, whose programs gather nothing if all clients run at once."""
    check(method, federation, ExecutionPlan(clients=clients, devices=1, client_bucket=10), None)
