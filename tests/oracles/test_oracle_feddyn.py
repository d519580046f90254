"""FedDyn against NumPy, h as the mean of all clients' vectors; and where it rests."""

from functools import cache

import numpy as np
import pytest
from numpy_reference import Round, average, backward, cross_entropy, decay, forward, step, subtract
from oracle_methods import KINDS, SGD, assert_rounds, assert_scores, batches, cohorts, combine, difference, engine
from oracle_setup import SIZES, STEPS, Run, least_squares, on_host, simulation, stack, three_quadratics

from jaxpfl import ExecutionPlan
from jaxpfl.core.participation import uniform

HYPER = SGD | {"alpha": 0.8}
ALPHA = HYPER["alpha"]

pytestmark = pytest.mark.usefixtures("float64")


@cache
def got(kind: str) -> Run:
    return engine("feddyn", HYPER, kind)


def reference(kind: str, defect: str = "") -> list[Round]:
    m = len(SIZES)
    theta = got(kind).states[0].server.model
    zero = {k: np.zeros_like(a) for k, a in theta.items()}
    h, own, seen, history = zero, [zero] * m, [0] * m, []
    for r, cohort in enumerate(cohorts(kind)):
        rate, moves, losses = HYPER["lr"] * decay(HYPER, r, STEPS), [], []
        for i in cohort:
            w, mine = theta, []
            for x, y in batches(kind, i, seen[i], r):
                loss, d_logits = cross_entropy(forward(w, x), y)
                gradient = backward(w, x, d_logits)
                sign = 1 if defect == "sign" else -1
                gradient = {k: gradient[k] + sign * own[i][k] + ALPHA * (w[k] - theta[k]) for k in w}
                w = step(w, gradient, rate, HYPER["weight_decay"])
                mine.append(loss)
            moves.append(subtract(w, theta))
            losses.append(np.mean(mine))
            own[i], seen[i] = combine(own[i], moves[-1], -ALPHA), seen[i] + 1
        mean = average(zero, moves, [SIZES[i] if defect == "mean by n_i" else 1.0 for i in cohort])
        h = combine(h, mean, -ALPHA * (1 if defect == "h moves by the whole mean" else len(cohort) / m))
        theta = combine(combine(theta, mean), h, 0 if defect == "h left out" else -1 / ALPHA)
        history.append(Round({"model": theta, "h": h}, list(own), list(seen), {"train_loss": float(np.mean(losses))}))
    return history


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rounds(kind):
    want = reference(kind)
    assert_rounds(got(kind), want)
    assert_scores(got(kind), [want[-1].server["model"]] * len(SIZES), want[-1].server["model"])


@pytest.mark.slow
@pytest.mark.parametrize("defect", ["sign", "mean by n_i", "h moves by the whole mean", "h left out"])
def test_a_defect_would_be_seen(defect):
    assert difference(got("uniform"), reference("uniform", defect)) > 1e-3


def test_h_is_the_mean_of_all():
    for state in got("uniform").states:
        for k, h in state.server.h.items():
            np.testing.assert_allclose(h, state.clients[0][k].mean(axis=0), atol=1e-14)


@pytest.mark.slow
def test_rests_at_the_minimiser():
    """On quadratics, cohorts of 2 of 3: the minimiser of the mean loss; plain averaging rests elsewhere."""
    parts, want = three_quadratics()

    def reached(method: str, **more: float) -> np.ndarray:
        made = simulation(
            method,
            stack(parts, parts, (5, 1, 2)),
            {"lr": 0.1, "lr_decay": 1.0, "weight_decay": 0.0} | more,
            task=least_squares(3),
            steps=20,
            cohort=uniform(3, 2) if method == "feddyn" else None,
            plan=ExecutionPlan(rounds_per_call=400),
        )
        server = on_host(made.advance(made.init([0]), 400)[0]).server
        return server.model if method == "feddyn" else server

    np.testing.assert_allclose(reached("feddyn", alpha=1.0), want, rtol=1e-7)
    assert np.abs(reached("fedprox") - want).max() > 1e-3
