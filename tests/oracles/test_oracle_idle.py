"""AdaPeD with unsampled clients' iterations (Algorithm 7): every state of every client, against NumPy, in float64."""

import jax
import numpy as np
import pytest
from numpy_reference import run_adaped
from oracle_setup import SIZES, STEPS, assert_same, classification_problem, client_row, participation, run, simulation
from oracle_setup import world as world_of

CAP, ROUNDS, BATCH = 2, 8, 6
HYPER = {"lr": 0.4, "lr_decay": 0.7, "decay_every": 4.0, "weight_decay": 0.02}
HYPER |= {"lr_global": 0.3, "lr_psi": 0.1, "psi_init": 0.6, "psi_floor": 0.5, "c": 5.0}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def rounds():
    """The engine's run, and the rows of each round's cohort."""
    with jax.enable_x64(True):
        made = simulation(
            "adaped",
            classification_problem(),
            HYPER,
            cohort=participation("uniform"),
            batch_size=BATCH,
            idle_rounds=CAP,
        )
        world = world_of(classification_problem(), participation("uniform"), BATCH, ROUNDS)
        return run(made, ROUNDS), world


@pytest.mark.slow
def test_every_round(rounds):
    got, world = rounds
    start = got.states[0]
    own = [client_row(start.clients[0].theta, i) for i in range(len(SIZES))]
    want = run_adaped(world, HYPER, start.server.mu, own, idle_cap=CAP)
    for state, expected in zip(got.states[1:], want, strict=True):
        assert_same(state.server._asdict(), expected.server)
        for i in range(len(SIZES)):
            assert_same(client_row(state.clients[0].theta, i), expected.clients[i])


def test_the_run_has_every_case(rounds):
    """In the cohort, outside it, at the cap, and outside before the first reception: else the test above is hollow."""
    _, world = rounds
    streak, seen, cases = np.zeros(len(SIZES), int), np.zeros(len(SIZES), bool), set()
    for cohort in world.cohorts:
        for i in range(len(SIZES)):
            if i in cohort:
                cases.add("in the cohort after idling" if streak[i] else "in the cohort")
                streak[i], seen[i] = 0, True
            else:
                cases.add("at the cap" if streak[i] == CAP else "outside" if seen[i] else "before the first reception")
                streak[i] = min(streak[i] + 1, CAP)
    assert cases == {
        "in the cohort",
        "in the cohort after idling",
        "outside",
        "at the cap",
        "before the first reception",
    }


def test_counts_and_cost(rounds):
    """Every turn costs tau client-steps, in the cohort or alone; a client keeps what it last received."""
    got, world = rounds
    streak, idled, taken = (np.zeros(len(SIZES), int) for _ in range(3))
    received = [got.states[0].server] * len(SIZES)
    for r, cohort in enumerate(world.cohorts):
        alone = np.array([i not in cohort and streak[i] < CAP for i in range(len(SIZES))])
        inside = np.array([i in cohort for i in range(len(SIZES))])
        idled, taken, streak = idled + alone, taken + inside, np.where(inside, 0, streak + alone)
        state = got.states[r + 1]
        np.testing.assert_array_equal(state.counts.idle_rounds, idled)
        np.testing.assert_array_equal(state.counts.idle_streak, streak)
        np.testing.assert_array_equal(state.counts.steps, STEPS * (idled + taken))
        np.testing.assert_array_equal(got.history["idle"][r], alone.sum())
        for i in range(len(SIZES)):
            received[i] = got.states[r].server if i in cohort else received[i]
            assert_same(client_row(state.clients[0].received, i), received[i])


@pytest.mark.slow
def test_idle_clients_change_nothing_at_the_server_before_they_return(rounds):
    """They upload nothing: the first round's server is that of Algorithm 2."""
    got, _ = rounds
    plain = run(
        simulation("adaped", classification_problem(), HYPER, cohort=participation("uniform"), batch_size=BATCH), 1
    )
    assert_same(got.states[1].server, plain.states[1].server)


@pytest.mark.slow
def test_full_participation_leaves_nobody_idle():
    made = simulation("adaped", classification_problem(), HYPER, idle_rounds=CAP)
    got = run(made, 2)
    assert "idle" not in got.history
    np.testing.assert_array_equal(got.states[-1].counts.idle_rounds, 0)
