"""The network lasso against NumPy: local steps, then ADMM with an explicit incidence matrix Q.

As printed but with proximal operators that are right for every p; and its limits, masks and clusters.
"""

import math

import numpy as np
import oracle
import pytest
from numpy_reference import Params, flat, run_rounds, sgd, subtract
from oracle import NEWCOMERS, ROUNDS, SEED, SETTINGS, SGD, STEPS, M, Oracle, assert_same, cases, client_row, clients

from jaxpfl import ExecutionPlan
from jaxpfl.similarity import admm, graphs

N = M
PAIRS = [(0, 1), (1, 2), (0, 2), (2, 3)]  # node 4 has no neighbour
GRAPH = {"choices": {"graph": graphs.from_edges(PAIRS, N)}}
JOINED = {"choices": {"graph": graphs.from_edges([*PAIRS, (3, 4)], N)}}
# Shared, both, personal, neither.
MASKS = {"shared": "w1,b1", "personal": "b1,w2"}
EXACT = {"tolerance": 1e-11, "admm_steps": 20_000}
HYPER = SGD | {"lam": 0.08}


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


def whole(server, n: int) -> Params:
    """Client n's model from x, Z [N, d] of b1 and w2, and what stays as it began."""
    x, z, fixed = server["x"], server["z"], server["fixed"]
    size = len(x["b1"])
    return {"w1": x["w1"], "b1": x["b1"] + z[n, :size], "w2": z[n, size:].reshape(size, len(fixed)), "b2": fixed}


def network_lasso(p: float = 2, c: float = 1.0):
    def formula(world, hp, server, own, defect=""):
        def work(server, own, turn):
            old = new = whole(server, turn.row)
            losses = []
            for batch in turn.batches:
                new, loss = sgd(new, [batch], hp["lr"] * turn.factor, hp["weight_decay"])
                new["b2"] = new["b2"] if defect == "what is fixed moves" else old["b2"]
                losses.append(loss)
            return own, (turn.factor, subtract(new, old)), {"train_loss": np.mean(losses)}

        def serve(server, uploads, cohort, own):
            y, changes = server["z"].copy(), [change for _, change in uploads]
            for n, change in zip(cohort, changes, strict=True):
                y[n] += c * flat({name: change[name] for name in ("b1", "w2")})
            share = 1.0 if defect == "a full pull on a part of the clients" else len(cohort) / N
            tau = 1 if defect == "tau left out of the pull" else STEPS
            over = N if defect == "x by the mean over all" else len(cohort)
            x = {k: a + sum(change[k] for change in changes) / over for k, a in server["x"].items()}
            z = z_step(y, hp["lr"] * uploads[0][0] * tau * hp["lam"] * share, p)
            return server | {"x": x, "z": z}

        return run_rounds(world, hp, server, own, work, serve)

    return formula


def parts(state):
    server = state.server
    x = {k: server.shared[k] for k in ("w1", "b1")}
    return {"x": x, "z": server.z, "fixed": server.fixed["b2"]}, [()] * N


def lasso(*given, defects=(), kinds=("uniform",), **options):
    def models(last):
        return {"after": [whole(last.server, n) for n in range(N)]}

    options = GRAPH | MASKS | EXACT | options
    formula = network_lasso(*given)
    return Oracle("network-lasso", HYPER, formula, defects, options, models, parts, rtol=1e-8, kinds=kinds, plain=True)


ORACLES = {
    "p=2": lasso(
        defects=(
            "what is fixed moves",
            "a full pull on a part of the clients",
            "tau left out of the pull",
            "x by the mean over all",
        ),
    ),
    "p=1": lasso(1, p=1.0),
    "p=inf": lasso(math.inf, p=math.inf),
    "the print's scale": lasso(2, 1 / N, kinds=("full",), scaling="mean"),
}


@pytest.mark.parametrize(("name", "kind"), cases(ORACLES))
def test_rounds(name, kind):
    """Everybody with full batches; and three of five with stragglers. Every kind of mask."""
    ORACLES[name].check(kind)
    history = ORACLES[name].got(kind).history
    assert max(history["admm_primal"].max(), history["admm_dual"].max()) <= EXACT["tolerance"]


@pytest.mark.slow
def test_conjugate_gradients_give_the_same(monkeypatch):
    monkeypatch.setattr(admm, "MOST_DENSE", 0)
    got = oracle.run_setting("network-lasso", HYPER, SETTINGS["uniform"], 2, **GRAPH, **MASKS, **EXACT)
    for state, want in zip(got.states[1:], ORACLES["p=2"].want(), strict=False):
        assert_same(parts(state)[0], want.server, rtol=1e-8)


@pytest.mark.slow
def test_a_diverged_client_adds_nothing_and_is_only_drawn():
    """Its G is zero and nobody's z is NaN; its own is drawn to its neighbours."""
    bad, problem = 1, oracle.spoiled(1)
    made = oracle.run_method("network-lasso", HYPER, problem=problem, **GRAPH, **MASKS, **EXACT)
    given = oracle.world(SETTINGS["full"])._replace(cohorts=[[n for n in range(N) if n != bad]] * ROUNDS)
    for state, want in zip(made.states[1:], network_lasso()(given, HYPER, *parts(made.states[0])), strict=True):
        assert_same(parts(state)[0], want.server, rtol=1e-8)
    assert made.states[-1].diverged.tolist() == [ROUNDS if i == bad else 0 for i in range(N)]
    assert oracle.distance(made.states[-1].server.z[bad], made.states[0].server.z[bad]) > 1e-3


# --- limits ---------------------------------------------------------------------------------------


def all_personal(lam: float, **more):
    return oracle.simulation("network-lasso", SGD | {"lam": lam}, **JOINED | EXACT | more)


def personal_models(made, state):
    models = oracle.on_host(made.personal_models(state))
    return [client_row(models, i) for i in range(len(models["b1"]))]


@pytest.mark.slow
def test_newcomers_are_sent_the_mean():
    unseen = oracle.classification_problem(*NEWCOMERS)
    made = all_personal(0.05, engine={"unseen": unseen, "adapt_rounds": 2})
    state, _ = made.advance(made.init([SEED]), 2)
    models, found = personal_models(made, state), oracle.on_host(made.evaluate_unseen(state))
    mean = {k: np.mean([model[k] for model in models], axis=0) for k in models[0]}
    want = oracle.scores([mean] * 3, clients(unseen.test))
    for which in ("before", "after"):
        np.testing.assert_allclose(found[which]["loss"], want["loss"], rtol=1e-9)


# --- clusters -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_planted_clusters_are_recovered():
    """Twelve linear clients of three models on a complete graph, and one without neighbours: the three models at a
    middle lambda, each client alone at zero, one model at a large one; all in one program."""
    rng, features = np.random.default_rng(3), 4
    truth = np.repeat([0, 1, 2], 4)
    centers = 2 * rng.normal(size=(4, features))
    parts = []
    for kind in [*truth, 3]:
        x = rng.normal(size=(100, features))
        parts.append((x, x @ centers[kind] + 0.3 * rng.normal(size=100)))
    federation = oracle.stack(parts, parts, range(13))
    graph = graphs.from_edges([(i, j) for i in range(12) for j in range(i)], 13)
    made = oracle.simulation(
        "network-lasso",
        {"lr": 0.1, "lr_decay": 1.0, "weight_decay": 0.0, "lam": np.array([0.0, 0.2, 10.0])},
        problem=federation,
        task=oracle.least_squares(features),
        steps=2,
        choices={"graph": graph},
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
