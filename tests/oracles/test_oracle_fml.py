"""Federated mutual learning against NumPy: two models, each taught by the other's fixed predictions."""

from functools import cache

import numpy as np
import pytest
from numpy_reference import Round, backward, cross_entropy, distillation, forward, step
from oracle_methods import KINDS, SGD, assert_rounds, assert_scores, difference, engine, own_states, run_averaging
from oracle_setup import Run

HYPER = SGD | {"lr_global": 0.3, "alpha": 0.35, "beta": 0.6}

pytestmark = pytest.mark.usefixtures("float64")


@cache
def got(kind: str) -> Run:
    return engine("fml", HYPER, kind)


def reference(kind: str, defect: str = "") -> list[Round]:
    alpha, beta, wd = HYPER["alpha"], HYPER["beta"], HYPER["weight_decay"]
    if defect == "alpha and beta swapped":
        alpha, beta = beta, alpha

    def work(received, theta, batches, factor):
        mu, losses = received, []
        for x, y in batches:
            a, b = forward(theta, x), forward(mu, x)
            loss, ce_a = cross_entropy(a, y)
            ce_b = cross_entropy(b, y)[1]
            _, leak_b, kl_a = distillation(b, a)  # mu teaches theta
            _, leak_a, kl_b = distillation(a, b)  # theta teaches mu
            d_a, d_b = alpha * ce_a + (1 - alpha) * kl_a, beta * ce_b + (1 - beta) * kl_b
            if defect == "teachers not detached":
                d_a, d_b = d_a + (1 - beta) * leak_a, d_b + (1 - alpha) * leak_b
            if defect == "divergences reversed":
                d_a, d_b = alpha * ce_a + (1 - alpha) * leak_a, beta * ce_b + (1 - beta) * leak_b
            new = step(theta, backward(theta, x, d_a), HYPER["lr"] * factor, wd)
            if defect == "mu learns from the new theta":
                d_b = beta * ce_b + (1 - beta) * distillation(forward(new, x), b)[2]
            mu = step(mu, backward(mu, x, d_b), HYPER["lr_global"] * factor, wd)
            theta = new
            losses.append(loss)
        return theta, mu, {"train_loss": np.mean(losses)}

    start = got(kind)
    return run_averaging(kind, HYPER, start.states[0].server, own_states(start), work)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rounds(kind):
    want = reference(kind)
    assert_rounds(got(kind), want)
    assert_scores(got(kind), want[-1].clients, want[-1].server)


DEFECTS = [
    "teachers not detached",
    "divergences reversed",
    "alpha and beta swapped",
    "mu learns from the new theta",
]


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_would_be_seen(defect):
    assert difference(got("uniform"), reference("uniform", defect)) > 1e-3


@pytest.mark.slow
def test_clients_of_another_architecture():
    """Models that meet in their logits only: both train, and the global one keeps its structure."""
    mixed = engine("fml", HYPER, "full", architectures="same+linear")
    assert len(mixed.states[-1].clients) == 2
    assert mixed.states[-1].server.keys() == mixed.states[0].server.keys()
    assert not mixed.states[-1].diverged.any()
