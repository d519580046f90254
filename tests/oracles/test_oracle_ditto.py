"""Ditto against NumPy: ``v <- v - eta_v [grad f(v) + lam (v - mu)]`` about the broadcast mu, FedAvg beside it."""

from functools import cache

import numpy as np
import pytest
from numpy_reference import Round, backward, cross_entropy, forward, sgd, step
from oracle_methods import KINDS, SGD, assert_rounds, assert_scores, difference, engine, own_states, run_averaging
from oracle_setup import SIZES, Run

HYPER = SGD | {"lam": 0.7, "lr_personal": 0.3}

pytestmark = pytest.mark.usefixtures("float64")


@cache
def got(kind: str) -> Run:
    return engine("ditto", HYPER, kind)


def reference(kind: str, defect: str = "") -> list[Round]:
    def work(mu, v, batches, factor):
        w, _ = sgd(mu, batches, HYPER["lr"] * factor, HYPER["weight_decay"])
        losses = []
        for x, y in batches:
            anchor = {"anchor aliased": v, "anchor is the client's w": w}.get(defect, mu)
            loss, d_logits = cross_entropy(forward(v, x), y)
            gradient = backward(v, x, d_logits)
            gradient = {k: gradient[k] + HYPER["lam"] * (v[k] - anchor[k]) for k in v}
            rate = HYPER["lr" if defect == "one rate" else "lr_personal"] * factor
            v = step(v, gradient, rate, HYPER["weight_decay"])
            losses.append(loss)
        return v, v if defect == "v averaged" else w, {"train_loss": np.mean(losses)}

    start = got(kind)
    weights = (1.0,) * len(SIZES) if defect == "uniform mean" else SIZES
    return run_averaging(kind, HYPER, start.states[0].server, own_states(start), work, weights=weights)


@pytest.mark.parametrize("kind", KINDS)
def test_rounds(kind):
    want = reference(kind)
    assert_rounds(got(kind), want)
    assert_scores(got(kind), want[-1].clients, want[-1].server)


@pytest.mark.parametrize(
    "defect", ["anchor aliased", "anchor is the client's w", "one rate", "v averaged", "uniform mean"]
)
def test_a_defect_would_be_seen(defect):
    assert difference(got("uniform"), reference("uniform", defect)) > 1e-3


@pytest.mark.slow
def test_personal_steps_of_their_own():
    """``personal_steps`` moves v further and leaves w's steps, and so the server, as they are."""
    more = engine("ditto", HYPER, "full", personal_steps=5)
    np.testing.assert_allclose(more.states[-1].server["w1"], got("full").states[-1].server["w1"], rtol=1e-12)
    assert np.abs(more.states[-1].clients[0]["w1"] - got("full").states[-1].clients[0]["w1"]).max() > 1e-3
