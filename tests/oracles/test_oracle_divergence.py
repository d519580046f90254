"""A client whose update is not finite: it uploads zero weight, keeps its state, is counted, touches nobody.

The others' round is that of the federation without it: ``mu + sum_{i != bad} w_i d_i / sum_{i != bad} w_i``.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from oracle_setup import (
    IDS,
    SEED,
    SIZES,
    Run,
    assert_same,
    classification_problem,
    client_row,
    clients,
    distance,
    least_squares,
    run,
    simulation,
    stack,
)

from jaxpfl import ExecutionPlan, Federation
from jaxpfl.algorithms import FEDERATED

BAD, ROUNDS = 1, 2
KEPT = [i for i in range(len(SIZES)) if i != BAD]
OF_ALL = {"l2gd": {"p": 1e-3}, "scaffold": {}, "feddyn": {}, "fedamp": {}}
"""Methods whose server keeps a mean over all m clients, or models of all; hyper-parameters with which every round takes
local steps."""


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def spoiled(spoil) -> Federation:
    """A federation with one bad client."""
    problem = classification_problem()
    train = clients(problem.train)
    train[BAD] = spoil(train[BAD][0]), train[BAD][1]
    return stack(train, clients(problem.test), IDS, clients(problem.validation))


def without() -> Federation:
    """The same, that client left out."""
    problem = classification_problem()
    splits = (problem.train, problem.test, problem.validation)
    train, test, validation = ([clients(split)[i] for i in KEPT] for split in splits)
    return stack(train, test, [IDS[i] for i in KEPT], validation)


@cache
def undisturbed(method: str) -> Run:
    return run(simulation(method, without(), {}), ROUNDS)


def infinite(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[2, 1] = np.inf
    return x


def check(got: Run, others: Run) -> None:
    start = got.states[0]
    for state, other in zip(got.states[1:], others.states[1:], strict=True):
        assert_same(state.server, other.server)
        for place, i in enumerate(KEPT):
            assert_same(client_row(state.clients, i), client_row(other.clients, place))
        assert_same(client_row(state.clients, BAD), client_row(start.clients, BAD), rtol=0)
    assert got.states[-1].diverged.tolist() == [ROUNDS if i == BAD else 0 for i in range(len(SIZES))]
    assert got.states[-1].participations.tolist() == [ROUNDS] * len(SIZES)
    assert got.history["diverged"].tolist() == [1] * ROUNDS
    assert got.history["participants"].tolist() == [len(SIZES)] * ROUNDS
    assert others.history["diverged"].tolist() == [0] * ROUNDS
    means = others.history.keys() - {"participants", "diverged"}
    assert_same({k: got.history[k] for k in means}, {k: others.history[k] for k in means})


@pytest.mark.slow
@pytest.mark.parametrize("blocks", ["map", "vmap", "2"])
def test_any_plan(blocks):
    plan = ExecutionPlan(clients=blocks, rounds_per_call=1)
    check(run(simulation("adaped", spoiled(infinite), {}, plan=plan), ROUNDS), undisturbed("adaped"))


def seldom(methods: Iterable[str]) -> list[Any]:
    """All of them; most in the slow run only."""
    return [
        pytest.param(name, marks=() if name in ("fedavg", "scaffold") else pytest.mark.slow) for name in sorted(methods)
    ]


@pytest.mark.parametrize(
    "method", seldom(set(FEDERATED) - {"adaped", "network-lasso", "fedpac", "cfl"} - OF_ALL.keys())
)
def test_every_method(method):
    check(run(simulation(method, spoiled(infinite), {}), ROUNDS), undisturbed(method))


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(OF_ALL))
def test_methods_whose_server_keeps_a_mean_over_all(method):
    """The diverged client is one of the m of that mean, so there is no run without it to compare; it stands still."""
    got = run(simulation(method, spoiled(infinite), OF_ALL[method]), ROUNDS)
    first, last = got.states[0], got.states[-1]
    assert_same(client_row(last.clients, BAD), client_row(first.clients, BAD), rtol=0)
    assert last.diverged.tolist() == [ROUNDS if i == BAD else 0 for i in range(len(SIZES))]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((last.server, last.clients)))
    for i in KEPT:
        assert distance(client_row(last.clients, i), client_row(first.clients, i)) > 1e-3


@pytest.mark.slow
def test_mini_batches():
    made = [simulation("fedavg", f, {}, batch_size=4) for f in (spoiled(infinite), without())]
    check(*(run(s, ROUNDS) for s in made))


@pytest.mark.parametrize("method", [pytest.param("local", marks=pytest.mark.slow), "fedavg"])
def test_overflow(method):
    """Finite data, but a rate that is too high for one client: its steps overflow."""
    federations = spoiled(lambda x: x * 1e120), without()
    made = [simulation(method, f, {"lr": 0.05}, task=least_squares(4)) for f in federations]
    check(*(run(s, ROUNDS) for s in made))


@pytest.mark.slow
def test_it_is_scored_with_the_state_that_it_keeps():
    got, others = run(simulation("local", spoiled(infinite), {}), ROUNDS), undisturbed("local")
    evaluate = got.simulation.evaluate
    before, after = evaluate(got.simulation.init([SEED])), evaluate(got.state)
    expected = others.simulation.evaluate(others.state)
    for name, score in after["after"].items():
        assert score[0, BAD] == before["after"][name][0, BAD]
        np.testing.assert_allclose(score[0, KEPT], expected["after"][name][0], rtol=1e-9)


@pytest.mark.parametrize("method", seldom(FEDERATED))
def test_all_diverge(method):
    """Nobody has weight: server and clients stand still."""
    bad = classification_problem()
    bad.train.examples.x[bad.train.start, 0] = np.inf
    got = run(simulation(method, bad, OF_ALL.get(method, {})), 1)
    start, end = got.states
    jax.tree.map(np.testing.assert_array_equal, (end.server, end.clients), (start.server, start.clients))
    assert end.diverged.tolist() == [1] * len(SIZES)
    assert got.history["diverged"].tolist() == [len(SIZES)]
