"""pFedMe against NumPy: K proximal steps of theta on each mini-batch, then ``w <- w - eta lam (w - theta)``."""

from functools import cache

import numpy as np
import pytest
from numpy_reference import Round, backward, cross_entropy, forward, step
from oracle_methods import (
    KINDS,
    SGD,
    assert_rounds,
    assert_scores,
    combine,
    difference,
    engine,
    own_states,
    run_averaging,
    scores,
)
from oracle_setup import Run, distance, on_host

from jaxpfl import METHODS, JaxpflError
from jaxpfl.algorithms.parts.hyper import replace

HYPER = SGD | {"lam": 0.9, "lr_global": 0.6, "server_lr": 0.8}
INNER = 3

pytestmark = pytest.mark.usefixtures("float64")


@cache
def got(kind: str) -> Run:
    return engine("pfedme", HYPER, kind, inner_steps=INNER)


def reference(kind: str, defect: str = "") -> list[Round]:
    eta, lam, wd = HYPER["lr_global"], HYPER["lam"], HYPER["weight_decay"]
    beta = 0.0 if defect == "beta = 0" else HYPER["server_lr"]

    def work(mu, own, batches, factor):
        theta, w, losses = mu, mu, []
        for x, y in batches:
            for _ in range(INNER):
                anchor = {"anchor aliased": theta, "anchor is mu": mu}.get(defect, w)
                loss, d_logits = cross_entropy(forward(theta, x), y)
                gradient = combine(backward(theta, x, d_logits), combine(theta, anchor, -1), lam)
                theta = step(theta, gradient, HYPER["lr"] * factor, 2 * wd if defect == "weight decay twice" else wd)
            pull = {k: lam * (w[k] - theta[k]) for k in w}
            w = step(w, pull, eta * factor, wd if defect == "weight decay on w" else 0.0)
            losses.append(loss)
        personal = w if defect == "w is the personal model" else theta
        return personal, combine(mu, combine(w, mu, -1), beta), {"train_loss": np.mean(losses)}

    start = got(kind)
    return run_averaging(kind, HYPER, start.states[0].server, own_states(start), work)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rounds(kind):
    want = reference(kind)
    assert_rounds(got(kind), want)
    assert_scores(got(kind), want[-1].clients, want[-1].server)


DEFECTS = [
    "anchor aliased",
    "anchor is mu",
    "weight decay twice",
    "weight decay on w",
    "w is the personal model",
    "beta = 0",
]


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_would_be_seen(defect):
    assert difference(got("uniform"), reference("uniform", defect)) > 1e-3


@pytest.mark.slow
def test_scored_on_w_would_be_seen():
    """The scores are theta's, and w's are others."""
    measured = on_host(got("full").simulation.evaluate(got("full").state))
    on_w = scores(reference("full", "w is the personal model")[-1].clients)
    assert distance(measured["after"]["loss"], on_w["loss"]) > 1e-2


def test_beta_of_zero_is_refused():
    with pytest.raises(JaxpflError, match=r"pfedme\.server_lr must be > 0"):
        replace("pfedme", METHODS["pfedme"].hyper, {"server_lr": 0.0})
