"""FedDBE against NumPy: shifts of the features, and moving means of them that are drawn to the global one."""

from functools import cache

import numpy as np
import pytest
from numpy_reference import Params, Round, average, cross_entropy, decay, forward, step, subtract
from oracle_methods import KINDS, SGD, batches, cohorts, engine, scores
from oracle_setup import SIZES, STEPS, Run, assert_same, classification_problem, client_row, clients, distance, on_host

HYPER = SGD | {"kappa": 6.0, "mu": 0.7}

pytestmark = pytest.mark.usefixtures("float64")


@cache
def got(kind: str) -> Run:
    return engine("feddbe", HYPER, kind)


def features(w: Params, x: np.ndarray) -> np.ndarray:
    return np.tanh(x @ w["w1"] + w["b1"])


def worked(w: Params, shift, mean, given, rate: float, defect: str):
    """A client's steps; ``mean`` is None in the first round."""
    moving, measured, wd = np.zeros_like(shift), [], HYPER["weight_decay"]
    for x, y in given:
        z = features(w, x)
        if defect != "no moving mean":
            moving = (1 - HYPER["mu"]) * moving + HYPER["mu"] * z.mean(0)
        else:
            moving = HYPER["mu"] * z.mean(0)
        shifted = z if mean is None else z + shift
        loss, d_logits = cross_entropy(shifted @ w["w2"] + w["b2"], y)
        d_features = d_logits @ w["w2"].T
        d_z, apart = d_features, 0.0
        if mean is not None:
            apart = ((moving - mean) ** 2).mean() / 2
            d_z = d_features + HYPER["kappa"] * (moving - mean) / mean.size * HYPER["mu"] / len(y)
        d_h = d_z * (1 - z**2)
        if mean is not None and defect != "the shift stays":
            shift = shift - rate * (d_features.sum(0) + wd * shift)
        read = z if defect == "the head's gradient without the shift" else shifted
        w = step(w, {"w1": x.T @ d_h, "b1": d_h.sum(0), "w2": read.T @ d_logits, "b2": d_logits.sum(0)}, rate, wd)
        measured.append({"train_loss": loss, "mean_distance": apart})
    return w, shift, {name: np.mean([one[name] for one in measured]) for name in measured[0]}


def reference(kind: str, defect: str = "") -> list[Round]:
    train, start = clients(classification_problem().train), got(kind).states[0].server.averaged
    w, mean, history = start.model, None, []
    shifts, seen = [np.zeros_like(start.mean)] * len(SIZES), [0] * len(SIZES)
    for r, cohort in enumerate(cohorts(kind)):
        rate, changes, means, measured = HYPER["lr"] * decay(HYPER, r, STEPS), [], [], []
        for i in cohort:
            end, shifts[i], metrics = worked(w, shifts[i], mean, batches(kind, i, seen[i], r), rate, defect)
            changes.append(subtract(end, w))
            means.append(features(end, train[i][0]).mean(0))
            measured.append(metrics)
            seen[i] += 1
        weights = [SIZES[i] for i in cohort]
        w = average(w, changes, weights)
        if mean is None or defect == "the mean moves on":
            mean = np.average(means, axis=0, weights=weights)
        metrics = {name: float(np.mean([one[name] for one in measured])) for name in measured[0]}
        history.append(Round((w, mean), list(shifts), list(seen), metrics))
    return history


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rounds_and_predictions(kind):
    want, made = reference(kind), got(kind)
    for state, expected in zip(made.states[1:], want, strict=True):
        assert_same(tuple(state.server.averaged), expected.server)
        assert float(state.server.known) == 1
        for i, shift in enumerate(expected.clients):
            np.testing.assert_allclose(client_row(state.clients[0], i), shift, rtol=1e-9, atol=1e-14)
    for name in want[0].metrics:
        np.testing.assert_allclose(made.history[name], [one.metrics[name] for one in want], rtol=1e-9, atol=1e-15)
    assert any(shift.any() for shift in want[-1].clients)
    w, found = want[-1].server[0], on_host(made.simulation.evaluate(made.state))
    np.testing.assert_allclose(found["global"]["loss"], scores([w] * len(SIZES))["loss"], rtol=1e-9)
    for i, (x, y) in enumerate(clients(classification_problem().test)):
        logits = forward(w, x) + want[-1].clients[i] @ w["w2"]
        np.testing.assert_allclose(found["after"]["loss"][i], cross_entropy(logits, y)[0], rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "defect", ["no moving mean", "the shift stays", "the head's gradient without the shift", "the mean moves on"]
)
def test_a_defect_would_be_seen(defect):
    last, want = got("uniform").states[-1], reference("uniform", defect)[-1]
    own = np.stack([client_row(last.clients[0], i) for i in range(len(SIZES))])
    assert distance((*last.server.averaged, own), (*want.server, np.stack(want.clients))) > 1e-3
