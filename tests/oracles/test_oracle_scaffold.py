"""SCAFFOLD against NumPy with option II as printed, ``c_i+ = c_i - c + (x - y) / (steps eta)``; and where it rests."""

from functools import cache

import numpy as np
import pytest
from numpy_reference import Round, average, backward, cross_entropy, decay, forward, step, subtract
from oracle_methods import KINDS, SGD, assert_rounds, assert_scores, batches, cohorts, combine, difference, engine
from oracle_setup import SIZES, STEPS, Run, least_squares, on_host, simulation, stack, three_quadratics

from jaxpfl import ExecutionPlan
from jaxpfl.core.participation import uniform

HYPER = SGD | {"server_lr": 0.7}

pytestmark = pytest.mark.usefixtures("float64")


@cache
def got(kind: str) -> Run:
    return engine("scaffold", HYPER, kind)


def reference(kind: str, defect: str = "") -> list[Round]:
    m, wd = len(SIZES), HYPER["weight_decay"]
    x = got(kind).states[0].server.model
    zero = {k: np.zeros_like(a) for k, a in x.items()}
    c, own, seen, history = zero, [zero] * m, [0] * m, []
    for r, cohort in enumerate(cohorts(kind)):
        rate, moves, changes, losses = HYPER["lr"] * decay(HYPER, r, STEPS), [], [], []
        for i in cohort:
            y, mine, given = x, [], batches(kind, i, seen[i], r)
            for features, labels in given:
                loss, d_logits = cross_entropy(forward(y, features), labels)
                gradient = combine(backward(y, features, d_logits), combine(c, own[i], -1))
                gradient = gradient if defect != "sign" else combine(gradient, combine(c, own[i], -1), -2)
                y = step(y, gradient, rate, wd)
                mine.append(loss)
            steps = STEPS if defect == "tau for a straggler's steps" else len(given)
            new = {k: own[i][k] - c[k] + (x[k] - y[k]) / (steps * rate) for k in x}
            moves.append(subtract(y, x))
            changes.append(subtract(new, own[i]))
            losses.append(np.mean(mine))
            own[i], seen[i] = new, seen[i] + 1
        ones = [1.0] * len(cohort)
        x = combine(x, subtract(average(x, moves, ones), x), HYPER["server_lr"])
        share = 1.0 if defect == "c moves by the whole mean" else len(cohort) / m
        c = combine(c, subtract(average(c, changes, ones), c), share)
        history.append(Round({"model": x, "variate": c}, list(own), list(seen), {"train_loss": float(np.mean(losses))}))
    return history


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rounds(kind):
    want = reference(kind)
    assert_rounds(got(kind), want)
    mu = want[-1].server["model"]
    assert_scores(got(kind), [mu] * len(SIZES), mu)


@pytest.mark.slow
@pytest.mark.parametrize("defect", ["sign", "tau for a straggler's steps", "c moves by the whole mean"])
def test_a_defect_would_be_seen(defect):
    assert difference(got("uniform"), reference("uniform", defect)) > 1e-3


@pytest.mark.slow
def test_the_servers_variate_is_the_mean_of_all():
    """``c = mean_i c_i`` after every round in which only some took part."""
    for state in got("uniform").states:
        for k, c in state.server.variate.items():
            np.testing.assert_allclose(c, state.clients[0][k].mean(axis=0), atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("momentum", marks=pytest.mark.slow)])
def test_rests_at_the_minimiser(optimizer):
    """On quadratics, tau > 1, cohorts of 2 of 3: the minimiser of the mean loss; plain averaging rests elsewhere."""
    parts, want = three_quadratics()

    def reached(method: str) -> np.ndarray:
        made = simulation(
            method,
            stack(parts, parts, (5, 1, 2)),
            {"lr": 0.1 if optimizer == "sgd" else 0.02, "lr_decay": 1.0, "weight_decay": 0.0},
            task=least_squares(3),
            steps=4,
            cohort=uniform(3, 2) if method == "scaffold" else None,
            plan=ExecutionPlan(rounds_per_call=600),
            choices={"optimizer": optimizer},
        )
        server = on_host(made.advance(made.init([0]), 600)[0]).server
        return server.model if method == "scaffold" else server

    np.testing.assert_allclose(reached("scaffold"), want, rtol=1e-7)
    assert np.abs(reached("fedprox") - want).max() > 1e-3
