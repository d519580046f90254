"""MR-MTL against NumPy: own models, drawn to the uniform mean of the cohort's models; limits of lambda."""

from functools import cache

import numpy as np
import pytest
from numpy_reference import Round, backward, cross_entropy, forward, step
from oracle_methods import KINDS, SGD, assert_rounds, assert_scores, difference, engine, own_states, run_averaging
from oracle_setup import SIZES, Run

HYPER = SGD | {"lam": 0.6}

pytestmark = pytest.mark.usefixtures("float64")


@cache
def got(kind: str) -> Run:
    return engine("mr-mtl", HYPER, kind)


def reference(kind: str, defect: str = "") -> list[Round]:
    def work(mean, own, batches, factor):
        w = mean if defect == "w restarts from the mean" else own
        losses = []
        for x, y in batches:
            loss, d_logits = cross_entropy(forward(w, x), y)
            gradient = backward(w, x, d_logits)
            anchor = own if defect == "anchor is w" else mean
            gradient = {k: gradient[k] + HYPER["lam"] * (w[k] - anchor[k]) for k in w}
            w = step(w, gradient, HYPER["lr"] * factor, HYPER["weight_decay"])
            losses.append(loss)
        return w, w, {"train_loss": float(np.mean(losses))}

    weights = SIZES if defect == "mean by n_i" else (1.0,) * len(SIZES)
    start = got(kind)
    return run_averaging(kind, HYPER, start.states[0].server, own_states(start), work, weights=weights)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rounds(kind):
    want = reference(kind)
    assert_rounds(got(kind), want)
    assert_scores(got(kind), want[-1].clients, want[-1].server)


@pytest.mark.slow
@pytest.mark.parametrize("defect", ["w restarts from the mean", "anchor is w", "mean by n_i"])
def test_a_defect_would_be_seen(defect):
    assert difference(got("uniform"), reference("uniform", defect)) > 1e-3


def test_the_mean_is_that_of_the_cohorts_models():
    before, after = got("uniform").states[-2:]
    took_part = np.asarray(after.participations) > np.asarray(before.participations)
    np.testing.assert_allclose(after.server["w1"], after.clients[0]["w1"][took_part].mean(axis=0), rtol=1e-12)
