"""Programs are asked for their memory before they run: fewer clients at once, or a clear refusal, never a crash."""

import jax
import numpy as np
import pytest
from problem import assert_close, outcome, simulate

from jaxpfl import METHODS, ExecutionPlan, JaxpflError
from jaxpfl.engine import memory


def working(federation, clients) -> int:
    plan = ExecutionPlan(clients=clients, devices=1)
    return simulate(METHODS["fedavg"], federation, cohort=None, plan=plan).memory()["working"]


def test_more_clients_at_once_need_more(federation):
    assert working(federation, "vmap") > working(federation, "map") > 0


def test_a_block_that_does_not_fit_is_made_smaller_and_gives_the_same(federation, monkeypatch):
    plan = ExecutionPlan(devices=1)
    want_simulation = simulate(METHODS["fedavg"], federation, cohort=None, plan=plan)
    want = outcome(want_simulation, 2)
    assert want_simulation.execution.block == federation.num_clients
    between = (working(federation, "vmap") + working(federation, "map")) // 2
    monkeypatch.setattr(memory, "free", lambda devices: between)
    simulation = simulate(METHODS["fedavg"], federation, cohort=None, plan=plan)
    simulation._scoring = simulation._scoring._replace(block=1)  # the limit is the round's
    assert simulation.memory()["working"] <= between
    assert 1 <= simulation.execution.block < federation.num_clients
    assert "would need" in simulation.execution.reasons[1]
    monkeypatch.undo()
    assert_close(outcome(simulation, 2), want, 1e-4)


@pytest.mark.parametrize("clients", ["auto", *(pytest.param(c, marks=pytest.mark.slow) for c in ("vmap", "2"))])
def test_what_cannot_fit_is_refused_before_it_runs(federation, monkeypatch, clients):
    simulation = simulate(METHODS["adaped"], federation, plan=ExecutionPlan(clients=clients))
    state = simulation.init([0])
    monkeypatch.setattr(memory, "free", lambda devices: 10)
    with pytest.raises(JaxpflError, match=r"advance needs .* of memory .* 10 B are free"):
        simulation.advance(state, 1)
    with pytest.raises(JaxpflError, match=r"the states need .* of memory"):
        simulation.init([0])
    monkeypatch.undo()
    state, history = simulation.advance(state, 1)  # nothing was lost
    assert np.isfinite(history["train_loss"]).all()


def test_states_of_the_server_count_too(federation, monkeypatch):
    """FedAvg's clients have none; what many seeds or a large model take is the server's."""
    simulation = simulate(METHODS["fedavg"], federation)
    parameters = sum(leaf[0].nbytes for leaf in jax.tree.leaves(simulation.init([0]).server))
    for seeds, fits in ((range(3), True), (range(400), False)):
        monkeypatch.setattr(memory, "free", lambda devices: 100 * parameters)
        if fits:
            simulation.init(seeds)
            continue
        with pytest.raises(JaxpflError, match=r"fewer seeds at once \(400 now\)"):
            simulation.init(seeds)


def test_unknown_memory_is_no_limit(federation, monkeypatch):
    monkeypatch.setattr(memory, "free", lambda devices: None)
    simulation = simulate(METHODS["fedavg"], federation)
    simulation.advance(simulation.init([0]), 1)


@pytest.mark.parametrize(
    ("amount", "text"), [(10, "10 B"), (1536, "1.5 KiB"), (3 * 2**30, "3 GiB"), (2**42, "4.1e+03 GiB")]
)
def test_readable(amount, text):
    assert memory.readable(amount) == text
