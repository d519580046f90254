"""L2GD against NumPy: one coin for all in a round, steps toward the mean of ALL personal models, and where it rests."""

from functools import cache

import jax
import numpy as np
import pytest
from numpy_reference import Round, cross_entropy, decay, forward, sgd
from oracle_methods import (
    KINDS,
    ROUNDS,
    SGD,
    assert_rounds,
    assert_scores,
    batches,
    cohorts,
    combine,
    difference,
    engine,
)
from oracle_setup import (
    SEED,
    SIZES,
    STEPS,
    Run,
    classification_problem,
    client_row,
    draws,
    least_squares,
    on_host,
    simulation,
    stack,
)

from jaxpfl import ExecutionPlan
from jaxpfl.algorithms.l2gd import probability
from jaxpfl.core.randomness import Purpose, stream

HYPER = SGD | {"lam": 0.6, "p": 0.3}

pytestmark = pytest.mark.usefixtures("float64")


@cache
def got(kind: str) -> Run:
    return engine("l2gd", HYPER, kind)


def tosses(rounds: int) -> list[bool]:
    q = HYPER["p"] * STEPS / (1 - HYPER["p"] + HYPER["p"] * STEPS)
    keys = [stream(jax.random.key(SEED), Purpose.BROADCAST, r) for r in range(rounds)]
    return [bool(jax.random.uniform(key, (), np.float32) < q) for key in keys]


def mean_of(models: list) -> dict:
    return {k: np.mean([model[k] for model in models], axis=0) for k in models[0]}


def reference(kind: str, defect: str = "") -> list[Round]:
    own = [client_row(got(kind).states[0].clients[0], i) for i in range(len(SIZES))]
    mean, p, seen, history = mean_of(own), HYPER["p"], [0] * len(SIZES), []
    for r, (cohort, aggregate) in enumerate(zip(cohorts(kind), tosses(ROUNDS), strict=True)):
        rate, losses = HYPER["lr"] * decay(HYPER, r, STEPS), []
        for i in cohort:
            given = batches(kind, i, seen[i], r)
            if aggregate:
                x, y = draw_of_one(kind, i, seen[i])
                losses.append(cross_entropy(forward(own[i], x), y)[0])
                share = rate * HYPER["lam"] / (1 if defect == "p left out" else p)
                own[i] = combine(own[i], combine(own[i], mean, -1), -share)
            else:
                scale = 1 if defect == "1 - p left out" else 1 - p
                own[i], loss = sgd(own[i], given, rate / scale, HYPER["weight_decay"])
                losses.append(loss)
            seen[i] += 1
        mean = mean_of([own[i] for i in cohort] if defect == "mean of the cohort" else own)
        history.append(Round(mean, list(own), list(seen), {"train_loss": float(np.mean(losses))}))
    return history


def draw_of_one(kind: str, i: int, seen: int):
    batch_size = {"full": 100, "uniform": 6}[kind]
    return draws(classification_problem(), i, Purpose.BATCHES, batch_size, 1, seen)[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rounds(kind):
    want = reference(kind)
    assert_rounds(got(kind), want)
    assert_scores(got(kind), want[-1].clients, want[-1].server)


def test_the_run_has_both_sides_of_the_coin():
    assert set(tosses(ROUNDS)) == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("defect", ["p left out", "1 - p left out", "mean of the cohort"])
def test_a_defect_would_be_seen(defect):
    assert difference(got("uniform"), reference("uniform", defect)) > 1e-3


@pytest.mark.parametrize("tau", [1, 10])
def test_share_of_aggregations(tau):
    """Rounds of probability q with tau local steps otherwise: of all iterations the share p aggregates."""
    q = probability(0.2, tau)
    assert q / (q + (1 - q) * tau) == pytest.approx(0.2, rel=1e-12)
    assert probability(0.2, 1) == pytest.approx(0.2, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("tau", [4])
def test_rests_near_the_minimiser(tau):
    """On quadratics, at a small rate, averaged over late rounds: ``A_i (theta_i - b_i) + lam (theta_i - mean) = 0``."""
    rng, parts, lam, d = np.random.default_rng(2), [], 0.8, 2
    for n in (8, 12, 25):
        x = rng.normal(size=(n, d))
        parts.append((x, x @ rng.normal(size=d) * 2))
    m = len(parts)
    system = np.kron(np.eye(m) - 1 / m, lam * np.eye(d))
    right = np.zeros(m * d)
    for i, (x, y) in enumerate(parts):
        block = slice(i * d, (i + 1) * d)
        system[block, block] += x.T @ x / len(y)
        right[block] = x.T @ y / len(y)
    want = np.linalg.solve(system, right).reshape(m, d)

    made = simulation(
        "l2gd",
        stack(parts, parts, (5, 1, 2)),
        {"lr": 0.01, "lr_decay": 1.0, "weight_decay": 0.0, "lam": lam, "p": 0.3},
        task=least_squares(d),
        steps=tau,
        plan=ExecutionPlan(rounds_per_call=2000),
    )
    state, late = made.init([0]), []
    state, _ = made.advance(state, 2000)
    for _ in range(100):
        state, _ = made.advance(state, 20)
        late.append(on_host(made.trim(state)).clients[0])
    np.testing.assert_allclose(np.mean(late, axis=0), want, atol=0.03)
    alone = np.array([np.linalg.lstsq(x, y, rcond=None)[0] for x, y in parts])
    assert np.abs(alone - want).max() > 0.3
