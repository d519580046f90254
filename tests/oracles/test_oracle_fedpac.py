"""FedPAC against NumPy: aligned features, and heads combined by a quadratic program, solved on every support."""

from functools import cache
from itertools import combinations

import jax
import numpy as np
import pytest
from numpy_reference import Params, average, backward, cross_entropy, decay, forward, step
from oracle_methods import AVAILABILITY, BATCH_SIZES, KINDS, SGD, batches, cohorts, engine, scores
from oracle_setup import (
    CLASSES,
    HEAD,
    IDS,
    SEED,
    SIZES,
    STEPS,
    Run,
    assert_same,
    classification_problem,
    client_row,
    clients,
    distance,
    draws,
    filled,
    on_host,
    perceptron,
    run,
    simulation,
    stack,
)

from jaxpfl import JaxpflError, LocalWork
from jaxpfl.algorithms.fedpac import RIDGE, fedpac
from jaxpfl.algorithms.parts.class_means import least_on_simplex
from jaxpfl.core.randomness import Purpose

HYPER = SGD | {"lr_head": 0.3, "lam": 0.8}
HEAD_STEPS = 2

pytestmark = pytest.mark.usefixtures("float64")


@cache
def got(kind: str) -> Run:
    return engine("fedpac", HYPER, kind, head_steps=HEAD_STEPS)


def filled_all(shared) -> tuple:
    return filled(shared.body), shared.means, shared.known


def features(w: Params, x: np.ndarray) -> np.ndarray:
    return np.tanh(x @ w["w1"] + w["b1"])


def head_batches(kind: str, i: int, seen: int, r: int):
    drawn = draws(classification_problem(), i, Purpose.BATCHES, BATCH_SIZES[kind], HEAD_STEPS, seen)
    return drawn[: min(int(AVAILABILITY[kind].step_limit(jax.random.key(SEED), r, IDS[i], STEPS)), HEAD_STEPS)]


def least(q: np.ndarray) -> np.ndarray:
    """The least ``a^T Q a`` on the simplex: of the solutions on every support that are not negative."""
    best, value = np.zeros(len(q)), np.inf
    for size in range(1, len(q) + 1):
        for support in map(list, combinations(range(len(q)), size)):
            y = np.linalg.solve(q[np.ix_(support, support)], np.ones(size))
            a = np.zeros(len(q))
            a[support] = y / y.sum()
            if (a >= 0).all() and a @ q @ a < value:
                best, value = a, a @ q @ a
    return best


def statistics(w: Params, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """V and m, class by class."""
    n, v, m = len(y), 0.0, np.zeros((CLASSES, w["b1"].size))
    for k in set(y.tolist()):
        rows, p = features(w, x)[y == k], (y == k).sum() / n
        m[k] = p * rows.mean(0)
        v += p * (rows**2).sum(1).mean() - p**2 * (rows.mean(0) ** 2).sum()
    return v / n, m


def heads_weights(given) -> np.ndarray:
    out = []
    for _, own in given:
        q = np.array([[((own - a) * (own - b)).sum() for _, b in given] for _, a in given])
        q += np.diag([v for v, _ in given])
        out.append(least(q + RIDGE * np.diag(q).mean() * np.eye(len(given))))
    return np.array(out)


def worked(w: Params, means, known, given, rate: float, defect: str) -> tuple[Params, dict[str, float]]:
    measured = []
    for x, y in given:
        z, loss, d_logits = features(w, x), *cross_entropy(forward(w, x), y)
        away = (z - means[y]) * known[y, None]
        d_h = (d_logits @ w["w2"].T + HYPER["lam"] * 2 * away / z.size) * (1 - z**2)
        gradient = {"w1": x.T @ d_h, "b1": d_h.sum(0), "w2": z.T @ d_logits, "b2": d_logits.sum(0)}
        new = step(w, gradient, rate, HYPER["weight_decay"])
        w = new if defect == "the head moves with the body" else new | {k: w[k] for k in HEAD}
        measured.append({"train_loss": loss, "mean_distance": (away**2).mean()})
    return w, {name: np.mean([one[name] for one in measured]) for name in measured[0]}


def reference(kind: str, defect: str = ""):
    """After each round: body, heads, class means, which are known, and metrics; and the steps of all clients."""
    train, start = clients(classification_problem().train), got(kind).states[0].server
    body, means, known = filled(start.shared.body), start.shared.means, start.shared.known
    heads = [filled(client_row(start.heads, i)) for i in range(len(SIZES))]
    seen, steps, history = [0] * len(SIZES), [0] * len(SIZES), []
    for r, cohort in enumerate(cohorts(kind)):
        factor = decay(HYPER, r, STEPS)
        ends, stats, measured = [], [], []
        sums, counts = np.zeros_like(means), np.zeros(CLASSES)
        for i in cohort:
            w = body | heads[i]
            stats.append(statistics(w, *train[i]))
            for x, y in head_batches(kind, i, seen[i], r):
                gradient = backward(w, x, cross_entropy(forward(w, x), y)[1])
                new = step(w, gradient, HYPER["lr_head"] * factor, HYPER["weight_decay"])
                w |= {k: new[k] for k in HEAD}
                steps[i] += 1
            given = batches(kind, i, seen[i], r)
            w, metrics = worked(w, means, known, given, HYPER["lr"] * factor, defect)
            steps[i], seen[i] = steps[i] + len(given), seen[i] + 1
            ends.append(w)
            measured.append(metrics)
            x, y = train[i]
            if defect == "statistics of the trained body":
                stats[-1] = statistics(w, x, y)
            for row, k in zip(features(w, x), y, strict=True):
                sums[k] += row
                counts[k] += 1
        changes = [{k: w[k] - body[k] for k in body} for w in ends]
        body = average(body, changes, [SIZES[i] for i in cohort])
        a = heads_weights(stats)
        if defect == "uniform heads":
            a = np.full_like(a, 1 / len(a))
        for place, i in enumerate(cohort):
            heads[i] = {k: sum(share * w[k] for share, w in zip(a[place], ends, strict=True)) for k in HEAD}
        has = counts > 0
        means = np.where(has[:, None], sums / np.maximum(counts, 1)[:, None], means)
        known = np.where(has, 1.0, known)
        metrics = {name: float(np.mean([one[name] for one in measured])) for name in measured[0]}
        history.append((body, list(heads), means, known, metrics, a))
    return history, steps


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rounds(kind):
    (want, steps), made = reference(kind), got(kind)
    for state, (body, heads, means, known, _, a) in zip(made.states[1:], want, strict=True):
        shared = state.server.shared
        assert_same(filled_all(shared), (body, means, known), rtol=1e-8)
        for i in range(len(SIZES)):
            assert_same(filled(client_row(state.server.heads, i)), heads[i], rtol=1e-8)
        assert ((a > 0) & (a < 1)).any()
    for name in ("train_loss", "mean_distance"):
        np.testing.assert_allclose(made.history[name], [one[4][name] for one in want], rtol=1e-8, atol=1e-15)
    found = on_host(made.simulation.evaluate(made.state))
    assert "global" not in found
    models = [want[-1][0] | head for head in want[-1][1]]
    np.testing.assert_allclose(found["after"]["loss"], scores(models)["loss"], rtol=1e-8)
    np.testing.assert_array_equal(made.simulation.gradients(made.state).training[0], steps)


@pytest.mark.slow
@pytest.mark.parametrize("defect", ["the head moves with the body", "statistics of the trained body", "uniform heads"])
def test_a_defect_would_be_seen(defect):
    server, (want, _) = got("uniform").states[-1].server, reference("uniform", defect)
    heads = [filled(client_row(server.heads, i)) for i in range(len(SIZES))]
    assert distance((filled(server.shared.body), heads), (want[-1][0], want[-1][1])) > 1e-3


@pytest.mark.slow
def test_a_diverged_client_adds_nothing_and_keeps_its_head():
    bad, problem = 1, classification_problem()
    parts = [clients(problem.train), clients(problem.test)]
    rest = [i for i in range(len(SIZES)) if i != bad]
    less = stack(*([part[i] for i in rest] for part in parts), [IDS[i] for i in rest])
    parts[0][bad] = np.full_like(parts[0][bad][0], np.inf), parts[0][bad][1]
    made, other = (run(simulation("fedpac", one, HYPER), 2) for one in (stack(*parts, IDS), less))
    start, end, want = made.states[0].server, made.states[-1].server, other.states[-1].server
    assert_same(filled_all(end.shared), filled_all(want.shared))
    for place, i in enumerate(rest):
        assert_same(filled(client_row(end.heads, i)), filled(client_row(want.heads, place)))
    assert_same(filled(client_row(end.heads, bad)), filled(client_row(start.heads, bad)), rtol=0)
    assert made.states[-1].diverged.tolist() == [2 if i == bad else 0 for i in range(len(SIZES))]


def test_the_quadratic_program():
    rng = np.random.default_rng(0)
    solve = jax.jit(least_on_simplex)
    for _ in range(40):
        a = rng.normal(size=(6, 4))
        q, valid = a @ a.T + np.diag(rng.uniform(1e-3, 1, 6)), rng.uniform(size=6) < 0.8
        valid[0] = True
        want = np.zeros(6)
        want[valid] = least(q[np.ix_(valid, valid)])
        np.testing.assert_allclose(solve(q, valid), want, atol=1e-11)
    np.testing.assert_array_equal(solve(q, np.zeros(6, bool)), 0)
    np.testing.assert_allclose(solve(np.eye(6), np.ones(6, bool)), np.full(6, 1 / 6))


def test_no_step_on_the_head_is_refused():
    with pytest.raises(JaxpflError, match=r"fedpac\.head_steps must be >= 1, got 0"):
        fedpac(perceptron(), LocalWork(np.array(SIZES), STEPS, 6), head_steps=0)
