"""A client whose update is not finite: it uploads zero weight, keeps its state, is counted, and touches nobody else.

The others' round is the round of the federation without it: ``mu + sum_{i != bad} w_i d_i / sum_{i != bad} w_i``.
"""

import jax
import numpy as np
import pytest
from oracle_setup import (
    IDS,
    SIZES,
    Run,
    assert_same,
    classification_problem,
    client_row,
    clients,
    least_squares,
    run,
    simulation,
    stack,
)

from jaxpfl import METHODS, ExecutionPlan, Federation

BAD, ROUNDS = 1, 2
KEPT = [i for i in range(len(SIZES)) if i != BAD]


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def federations(spoil) -> tuple[Federation, Federation]:
    """One with a bad client, and the same without that client."""
    problem = classification_problem()
    train, test = clients(problem.train), clients(problem.test)
    x, y = train[BAD]
    train[BAD] = spoil(x), y
    without = stack([train[i] for i in KEPT], [test[i] for i in KEPT], [IDS[i] for i in KEPT])
    return stack(train, test, IDS), without


def infinite(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[2, 1] = np.inf
    return x


def check(got: Run, without: Run) -> None:
    start = got.states[0]
    for state, other in zip(got.states[1:], without.states[1:], strict=True):
        assert_same(state.server, other.server)
        for place, i in enumerate(KEPT):
            assert_same(client_row(state.clients, i), client_row(other.clients, place))
        assert_same(client_row(state.clients, BAD), client_row(start.clients, BAD), rtol=0)
    assert got.states[-1].diverged.tolist() == [ROUNDS if i == BAD else 0 for i in range(len(SIZES))]
    assert got.states[-1].participations.tolist() == [ROUNDS] * len(SIZES)
    assert got.history["diverged"].tolist() == [1] * ROUNDS
    assert got.history["participants"].tolist() == [len(SIZES)] * ROUNDS
    assert without.history["diverged"].tolist() == [0] * ROUNDS
    means = without.history.keys() - {"participants", "diverged"}
    assert_same({k: got.history[k] for k in means}, {k: without.history[k] for k in means})


@pytest.mark.parametrize("blocks", ["map", "vmap", "2"])
def test_any_plan(blocks):
    plan = ExecutionPlan(clients=blocks, rounds_per_call=1)
    check(*(run(simulation("adaped", f, {}, plan=plan), ROUNDS) for f in federations(infinite)))


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"adaped"}))
def test_every_method(method):
    check(*(run(simulation(method, f, {}), ROUNDS) for f in federations(infinite)))


def test_mini_batches():
    check(*(run(simulation("fedavg", f, {}, batch_size=4), ROUNDS) for f in federations(infinite)))


@pytest.mark.parametrize("method", ["local", "fedavg"])
def test_overflow(method):
    """Finite data, a rate that is too high for one client: its steps grow without bound, the others' converge."""
    made = [
        simulation(method, f, {"lr": 0.05}, task=least_squares(4)) for f in federations(lambda x: x * 1e120)
    ]
    check(*(run(s, ROUNDS) for s in made))


def test_it_is_scored_with_the_state_that_it_keeps():
    got, without = (run(simulation("local", f, {}), ROUNDS) for f in federations(infinite))
    before = got.simulation.evaluate(got.simulation.init([17]))["after"]
    for name, score in got.scores["after"].items():
        assert score[BAD] == before[name][0, BAD]
        np.testing.assert_allclose(score[KEPT], without.scores["after"][name], rtol=1e-9)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_all_diverge(method):
    """Nobody has weight: server and clients stand still."""
    bad = classification_problem()
    bad.train.x[:, 0, 0] = np.inf
    got = run(simulation(method, bad, {}), 1)
    start, end = got.states
    assert_same((end.server, end.clients), (start.server, start.clients), rtol=0)
    assert end.diverged.tolist() == [1] * len(SIZES)
    assert got.history["diverged"].tolist() == [len(SIZES)]
