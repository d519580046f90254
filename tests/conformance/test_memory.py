"""Programs are asked for their memory before they run: fewer clients at once, or a clear refusal, never a crash."""

import jax
import numpy as np
import pytest
from problem import assert_close, outcome, simulate

from jaxpfl import METHODS, ExecutionPlan, JaxpflError
from jaxpfl.engine import placement, programs


def leave(monkeypatch, amount) -> None:
    """Leave so many bytes of memory free, and count small needs too."""
    monkeypatch.setattr(placement, "free_bytes", lambda devices: amount)
    monkeypatch.setattr(placement, "_SMALL", 0)


def working(federation, clients) -> int:
    plan = ExecutionPlan(clients=clients, devices=1)
    return simulate(METHODS["fedavg"], federation, cohort=None, plan=plan).memory()["working"]


@pytest.mark.slow
def test_a_block_that_does_not_fit_is_made_smaller_and_gives_the_same(federation, monkeypatch):
    plan = ExecutionPlan(devices=1)
    want_simulation = simulate(METHODS["fedavg"], federation, cohort=None, plan=plan)
    want = outcome(want_simulation, 2)
    assert want_simulation.execution.block == federation.num_clients
    together, in_turn = (working(federation, clients) for clients in ("vmap", "map"))
    assert together > in_turn > 0
    between = (together + in_turn) // 2
    leave(monkeypatch, between)
    simulation = simulate(METHODS["fedavg"], federation, cohort=None, plan=plan)
    of = simulation._programs._of
    simulation._programs._of = of._replace(scoring=of.scoring._replace(block=1))  # the limit is the round's
    assert simulation.memory()["working"] <= between
    assert 1 <= simulation.execution.block < federation.num_clients
    assert "would need" in simulation.execution.reasons[1]
    monkeypatch.undo()
    assert_close(outcome(simulation, 2), want, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("clients", ["2", "auto"])
def test_what_cannot_fit_is_refused_before_it_runs(federation, monkeypatch, clients):
    simulation = simulate(METHODS["adaped"], federation, plan=ExecutionPlan(clients=clients))
    state = simulation.init([0])
    leave(monkeypatch, 10)
    with pytest.raises(JaxpflError, match=r"'advance' needs .* of memory .* but only 10 B is free"):
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
        leave(monkeypatch, 100 * parameters)
        if fits:
            simulation.init(seeds)
            continue
        with pytest.raises(JaxpflError, match=r"fewer seeds at once \(400 now\)"):
            simulation.init(seeds)


@pytest.mark.slow
def test_first_states_are_made_in_blocks_where_all_at_once_would_not_fit(federation, monkeypatch):
    """The draws of all clients' models take several times the states; the numbers do not depend on the blocks."""
    many = federation.rows(np.tile(np.arange(federation.num_clients), 50))
    many = many._replace(client_ids=np.arange(len(many.client_ids), dtype=np.int32))
    simulation = simulate(METHODS["local"], many, plan=ExecutionPlan(devices=1))
    needs = []
    needed = placement.program_bytes
    monkeypatch.setattr(programs, "program_bytes", lambda *args: needs.append(needed(*args)) or needs[-1])
    want = simulation.init([0, 1])
    states = sum(leaf.nbytes for leaf in jax.tree.leaves((want.clients, want.counts, want.server)))
    assert needs[0] > 1.5 * states
    simulation._programs.made.clear()
    leave(monkeypatch, int(1.5 * states))
    got = simulation.init([0, 1])
    assert needs[-1] <= 1.5 * states
    for a, b in zip(jax.tree.leaves(got.clients), jax.tree.leaves(want.clients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    simulation._programs.made.clear()
    leave(monkeypatch, states)
    with pytest.raises(
        JaxpflError, match=r"^with 1 client\(s\) at once, the program 'start' needs .* is free: use fewer runs"
    ):
        simulation.init([0, 1])


def test_data_that_do_not_fit_are_refused_before_they_are_placed(federation, monkeypatch):
    federation = jax.tree.map(np.asarray, federation)
    leave(monkeypatch, 1000)
    with pytest.raises(
        JaxpflError, match=r"^the data need .* of memory, but only 1e\+03 B is free: use fewer .* client 0 12 of them"
    ):
        simulate(METHODS["fedavg"], federation)
