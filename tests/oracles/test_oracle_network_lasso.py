"""The network lasso against NumPy: a gradient step or tau of them, then ADMM with an explicit incidence matrix Q, as
printed but with proximal operators that are right for every p; and its limits, masks, clusters and refusals."""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from numpy_reference import Params, cross_entropy, decay, forward, sgd
from oracle_methods import BATCH_SIZES, KINDS, ROUNDS, SGD, batches, cohorts, engine, scores
from oracle_setup import (
    SIZES,
    STEPS,
    assert_same,
    classification_problem,
    clients,
    distance,
    least_squares,
    on_host,
    perceptron,
    run,
    simulation,
    stack,
)

from jaxpfl import ExecutionPlan, JaxpflError, LocalWork
from jaxpfl.algorithms.network_lasso import network_lasso
from jaxpfl.similarity import admm, graphs

N = len(SIZES)
PAIRS = [(0, 1), (1, 2), (0, 2), (2, 3)]  # node 4 has no neighbour
GRAPH = graphs.from_edges(PAIRS, N)
JOINED = graphs.from_edges([*PAIRS, (3, 4)], N)
# Shared, both, personal, neither.
MASKS = {"shared": "w1,b1", "personal": "b1,w2"}
EXACT = {"tolerance": 1e-11, "admm_steps": 20_000}
HYPER = SGD | {"lam": 0.08}
RECEIVED = ("w1", "b1"), ("b1", "w2")

pytestmark = pytest.mark.usefixtures("float64")


class After(NamedTuple):
    """A round's end: x, Z [N, d] of b1 and w2, every client's model, and the metric."""

    x: Params
    z: np.ndarray
    models: list[Params]
    loss: float


def prox(v: np.ndarray, kappa: float, p: float) -> np.ndarray:
    if p == 1:
        return np.sign(v) * np.maximum(np.abs(v) - kappa, 0)
    if p == 2:
        length = np.linalg.norm(v)
        return np.zeros_like(v) if length <= kappa else (1 - kappa / length) * v
    if np.abs(v).sum() <= kappa:
        return np.zeros_like(v)
    low, high = 0.0, np.abs(v).max()
    for _ in range(100):  # what is cut off above the level sums to kappa
        level = (low + high) / 2
        low, high = (level, high) if np.maximum(np.abs(v) - level, 0).sum() > kappa else (low, level)
    return np.clip(v, -level, level)


def z_step(y: np.ndarray, strength: float, p: float, pairs=PAIRS) -> np.ndarray:
    """``argmin 1/2 |Z - Y|^2 + strength |Z Q|_{1,p}``; columns are clients, as printed."""
    q = np.zeros((N, len(pairs)))
    for e, (i, j) in enumerate(pairs):
        q[i, e], q[j, e] = 1, -1
    rho, y = 0.7, y.T
    inverse = np.linalg.inv(np.eye(N) + rho * q @ q.T)
    w, omega = y @ q, np.zeros((len(y), len(pairs)))
    for _ in range(4000):
        z = (y + omega @ q.T + rho * w @ q.T) @ inverse
        old, w = w, np.stack([prox(v, strength / rho, p) for v in (z @ q - omega / rho).T], axis=1)
        omega = omega + rho * (w - z @ q)
        if max(np.linalg.norm(w - z @ q), np.linalg.norm((w - old) @ q.T)) < 1e-13:
            break
    return z.T


def flat(model: Params) -> np.ndarray:
    return np.concatenate([model["b1"].ravel(), model["w2"].ravel()])


def reference(
    kind: str, start: Params, p: float = 2, *, defect: str = "", left_out: tuple[int, ...] = (), c: float = 1.0
) -> list[After]:
    x, fixed = {k: start[k] for k in RECEIVED[0]}, start["b2"]
    z = np.tile(flat({"b1": 0 * start["b1"], "w2": start["w2"]}), (N, 1))
    seen, history = [0] * N, []

    def model(n: int) -> Params:
        size = len(start["b1"])
        return {"w1": x["w1"], "b1": x["b1"] + z[n, :size], "w2": z[n, size:].reshape(start["w2"].shape), "b2": fixed}

    for r, cohort in enumerate(cohorts(kind)):
        rate, moved, y, losses = SGD["lr"] * decay(SGD, r, STEPS), [], z.copy(), []
        cohort = [n for n in cohort if n not in left_out]
        for n in cohort:
            old, new, mine = model(n), model(n), []
            for batch in batches(kind, n, seen[n], r):
                new, loss = sgd(new, [batch], rate, SGD["weight_decay"])
                new["b2"] = new["b2"] if defect == "what is fixed moves" else fixed
                mine.append(loss)
            change = {k: new[k] - old[k] for k in new}
            moved.append(change)
            y[n] += c * flat(change)
            losses.append(np.mean(mine))
            seen[n] += 1
        share = 1.0 if defect == "a full pull on a part of the clients" else len(cohort) / N
        tau = 1 if defect == "tau left out of the pull" else STEPS
        over = N if defect == "x by the mean over all" else len(cohort)
        x = {k: x[k] + sum(change[k] for change in moved) / over for k in x}
        z = z_step(y, rate * tau * HYPER["lam"] * share, p)
        history.append(After(x, z, [model(n) for n in range(N)], float(np.mean(losses))))
    return history


@cache
def got(kind: str, p: float = 2.0, scaling: str = "sum"):
    return engine("network-lasso", HYPER, kind, choices={"graph": GRAPH}, p=p, scaling=scaling, **MASKS, **EXACT)


def first_model(run_) -> Params:
    server = run_.states[0].server
    size = len(server.shared["b1"])
    w2 = server.z[0, size:].reshape(-1, len(server.fixed["b2"]))
    return {"w1": server.shared["w1"], "b1": server.shared["b1"], "w2": w2, "b2": server.fixed["b2"]}


def assert_rounds(run_, want: list[After]) -> None:
    for state, expected in zip(run_.states[1:], want, strict=True):
        x = {k: state.server.shared[k] for k in RECEIVED[0]}
        assert_same((x, state.server.z), (expected.x, expected.z), rtol=1e-8)
    np.testing.assert_allclose(run_.history["train_loss"], [r.loss for r in want], rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [2, 1, math.inf])
def test_rounds(kind, p):
    """Everybody with full batches; and three of five with stragglers. Every kind of mask."""
    made = got(kind, float(p))
    want = reference(kind, first_model(made), p)
    assert_rounds(made, want)
    assert max(made.history["admm_primal"].max(), made.history["admm_dual"].max()) <= EXACT["tolerance"]
    measured = on_host(made.simulation.evaluate(made.state))
    assert measured["after"].keys() == {"accuracy", "loss", "diverged"}
    assert "global" not in measured
    np.testing.assert_allclose(measured["after"]["loss"], scores(want[-1].models)["loss"], rtol=1e-7)


@pytest.mark.slow
def test_conjugate_gradients_give_the_same(monkeypatch):
    monkeypatch.setattr(admm, "MOST_DENSE", 0)
    made = engine("network-lasso", HYPER, "full", choices={"graph": GRAPH}, **MASKS, **EXACT)
    assert_rounds(made, reference("full", first_model(made)))


@pytest.mark.slow
def test_the_prints_scale():
    made = got("full", 2.0, "mean")
    assert_rounds(made, reference("full", first_model(made), c=1 / N))


@pytest.mark.slow
@pytest.mark.parametrize(
    "defect",
    [
        "what is fixed moves",
        "a full pull on a part of the clients",
        "tau left out of the pull",
        "x by the mean over all",
    ],
)
def test_a_defect_would_be_seen(defect):
    made = got("uniform")
    want = reference("uniform", first_model(made), defect=defect)[-1]
    assert distance(made.states[-1].server.z, want.z) + distance(made.states[-1].server.shared, want.x) > 1e-3


@pytest.mark.slow
def test_a_diverged_client_adds_nothing_and_is_only_drawn():
    """Its G is zero and nobody's z is NaN; its own is drawn to its neighbours."""
    bad, problem = 1, classification_problem()
    train = clients(problem.train)
    train[bad] = np.full_like(train[bad][0], np.inf), train[bad][1]
    federation = stack(train, clients(problem.test), problem.client_ids.tolist())
    hp = {"batch_size": BATCH_SIZES["full"], "choices": {"graph": GRAPH}}
    made = run(simulation("network-lasso", federation, HYPER, **hp, **MASKS, **EXACT), ROUNDS)
    assert_rounds(made, reference("full", first_model(made), left_out=(bad,)))
    assert made.states[-1].diverged.tolist() == [ROUNDS if i == bad else 0 for i in range(N)]
    assert distance(made.states[-1].server.z[bad], made.states[0].server.z[bad]) > 1e-3


# --- limits ---------------------------------------------------------------------------------------


def all_personal(lam: float, **more):
    graph = more.pop("graph", JOINED)
    return simulation(
        "network-lasso", classification_problem(), SGD | {"lam": lam}, choices={"graph": graph}, **EXACT | more
    )


@pytest.mark.slow
def test_no_pull_is_local_training_from_a_common_start():
    made = all_personal(0.0)
    end = run(made, ROUNDS)
    models = on_host(made.personal_models(end.state))
    start = {k: v[0] for k, v in on_host(made.personal_models(made.init([17]))).items()}
    for i in range(N):
        alone = start
        for r in range(ROUNDS):
            given = batches("full", i, r, r)
            alone, _ = sgd(alone, given, SGD["lr"] * decay(SGD, r, STEPS), SGD["weight_decay"])
        assert_same({k: v[i] for k, v in models.items()}, alone)
    np.testing.assert_array_equal(made.clusters(end.state), [range(N)])
    assert (end.history["fused_edges"] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.0, 2.0])
def test_a_large_pull_gives_everybody_the_mean_as_printed(p):
    """Every column becomes ``mean(Z_t) - eta mean(G) / N``, G the gradients at Z_t."""
    apart, together = (all_personal(lam, scaling="mean", steps=1, p=p) for lam in (0.0, 1e4))
    state, _ = apart.advance(apart.init([17]), 3)
    z = on_host(state).server.z
    models = [{k: v[i] for k, v in on_host(apart.personal_models(state)).items()} for i in range(N)]
    eta, moves = SGD["lr"] * decay(SGD, 3, 1), []
    for model, batch in zip(models, clients(classification_problem().train), strict=True):
        new, _ = sgd(model, [batch], eta, SGD["weight_decay"])
        moves.append(np.concatenate([(new[k] - model[k]).ravel() for k in sorted(model)]))
    assert np.ptp(z, axis=0).max() > 1e-3
    state, history = together.advance(state, 1)
    want = z.mean(axis=0) + np.mean(moves, axis=0) / N
    np.testing.assert_allclose(on_host(state).server.z, np.tile(want, (N, 1)), atol=1e-9)
    np.testing.assert_array_equal(together.clusters(state), [[0] * N])
    assert history["fused_edges"] == 1


@pytest.mark.slow
def test_all_shared_is_uniform_averaging():
    hp = SGD | {"server_lr": 1.0}
    want = run(simulation("fedavg", classification_problem(), hp, choices={"weighting": "uniform"}), ROUNDS)
    made = all_personal(0.3, shared="*", personal="none")
    end = run(made, ROUNDS)
    assert_same(end.states[-1].server.shared, want.states[-1].server)
    assert_same(on_host(made.evaluate(end.state))["global"], on_host(want.simulation.evaluate(want.state))["global"])


@pytest.mark.slow
def test_one_client_trains_alone():
    federation = classification_problem((6,), (3,))
    choices = {"graph": graphs.from_edges([], 1)}
    made = run(simulation("network-lasso", federation, HYPER, choices=choices), 2)
    ((x, y),) = clients(federation.train)
    model = {k: v[0] for k, v in on_host(made.simulation.personal_models(made.simulation.init([17]))).items()}
    for r in range(2):
        model, _ = sgd(model, [(x, y)] * STEPS, SGD["lr"] * decay(SGD, r, STEPS), SGD["weight_decay"])
    assert_same({k: v[0] for k, v in on_host(made.simulation.personal_models(made.state)).items()}, model)


@pytest.mark.slow
def test_duplicate_clients_are_one():
    """The same examples under two ids: the same z, fused however weak the pull."""
    pair, other = clients(classification_problem().train)[:2]
    federation = stack([pair, pair, other], [pair, pair, other], (3, 11, 0))
    choices = {"graph": graphs.from_edges([(0, 1), (1, 2)], 3)}
    made = run(simulation("network-lasso", federation, SGD | {"lam": 1e-4}, choices=choices, **EXACT), 3)
    z = made.states[-1].server.z
    np.testing.assert_allclose(z[0], z[1], atol=1e-9)
    np.testing.assert_array_equal(made.simulation.clusters(made.state), [[0, 0, 1]])


@pytest.mark.slow
def test_newcomers_are_sent_the_mean():
    made = all_personal(0.05, engine={"unseen": classification_problem((8, 13), (100, 101)), "adapt_rounds": 2})
    state, _ = made.advance(made.init([17]), 2)
    mean = {k: v.mean(axis=0) for k, v in on_host(made.personal_models(state)).items()}
    got_ = on_host(made.evaluate_unseen(state))
    tests = clients(classification_problem((8, 13), (100, 101)).test)
    want = np.array([cross_entropy(forward(mean, x), y)[0] for x, y in tests])
    for which in ("before", "after"):
        np.testing.assert_allclose(got_[which]["loss"], want, rtol=1e-9)


# --- clusters -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("p", [2.0, math.inf])
def test_planted_clusters_are_recovered(p):
    """Twelve linear clients of three models on a complete graph, and one without neighbours: the three models at a
    middle lambda, each client alone at zero, one model at a large one; all in one program."""
    rng, features = np.random.default_rng(3), 4
    truth = np.repeat([0, 1, 2], 4)
    centers = 2 * rng.normal(size=(4, features))
    parts = []
    for kind in [*truth, 3]:
        x = rng.normal(size=(100, features))
        parts.append((x, x @ centers[kind] + 0.3 * rng.normal(size=100)))
    federation = stack(parts, parts, range(13))
    graph = graphs.from_edges([(i, j) for i in range(12) for j in range(i)], 13)
    made = simulation(
        "network-lasso",
        federation,
        {"lr": 0.1, "lr_decay": 1.0, "weight_decay": 0.0, "lam": np.array([0.0, 0.2, 10.0])},
        task=least_squares(features),
        steps=2,
        choices={"graph": graph},
        p=p,
        tolerance=1e-7,
        admm_steps=500,
        plan=ExecutionPlan(rounds_per_call=60),
    )
    state, history = made.advance(made.init([0, 0, 0]), 60)
    alone, middle, one = made.clusters(state)
    np.testing.assert_array_equal(alone, range(13))
    np.testing.assert_array_equal(middle, [*truth, 3])
    np.testing.assert_array_equal(one, [0] * 12 + [1])
    within = 3 * 6 / graph.edges
    np.testing.assert_allclose(history["fused_edges"][:, -1], [0, within, 1])
    # The one without neighbours is left alone by every lambda.
    z = np.asarray(state.server.z)[:, 12]
    np.testing.assert_allclose(z, np.tile(z[0], (3, 1)), atol=1e-9)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"p": 3.0}, "p must be 1, 2 or inf, got 3.0"),
        ({"scaling": "means"}, "did you mean 'mean'"),
        ({"admm_steps": 0}, "network-lasso.admm_steps must be >= 1, got 0"),
        ({"tolerance": 0.0}, "network-lasso.tolerance must be > 0 and < 1, got 0.0"),
        ({"shared": "w1,w3"}, r"network-lasso.shared: no parameter fits 'w3' \(there are b1, b2, w1, w2\)"),
        ({"personal": "head/*"}, "network-lasso.personal: no parameter fits 'head/.'"),
        ({"personal": "none"}, "network-lasso has nothing to train"),
        ({"graph": graphs.from_edges([], N + 1)}, "the graph has 6 nodes, expected the 5 clients"),
        ({"graph": None}, "network-lasso needs a graph of the clients"),
    ],
)
def test_refusals(options, message):
    work = LocalWork(np.array(SIZES), STEPS, 6, graph=options.pop("graph", GRAPH))
    with pytest.raises(JaxpflError, match=message):
        network_lasso(perceptron(), work, **options)


def test_a_graph_of_unseen_clients_too_is_refused():
    work = LocalWork(np.array([*SIZES, 8]), STEPS, 6, unseen=1, graph=graphs.from_edges([], N + 1))
    with pytest.raises(JaxpflError, match="the graph has 6 nodes, expected the 5 clients"):
        network_lasso(perceptron(), work)
