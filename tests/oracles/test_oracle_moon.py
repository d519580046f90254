"""MOON against NumPy: steps that draw features to the global model's and away from the last model's."""

from functools import cache

import numpy as np
import pytest
from numpy_reference import Params, Round, average, cross_entropy, decay, forward, step, subtract
from oracle_methods import KINDS, SGD, assert_rounds, assert_scores, batches, cohorts, difference, engine
from oracle_setup import SIZES, STEPS, Run

HYPER = SGD | {"mu": 2.0, "temperature": 0.6}

pytestmark = pytest.mark.usefixtures("float64")


@cache
def got(kind: str) -> Run:
    return engine("moon", HYPER, kind)


def features(w: Params, x: np.ndarray) -> np.ndarray:
    return np.tanh(x @ w["w1"] + w["b1"])


def cosine(z: np.ndarray, a: np.ndarray) -> tuple[float, np.ndarray]:
    """Cosine of two vectors, and its gradient by the first."""
    lengths = np.linalg.norm(z) * np.linalg.norm(a)
    value = z @ a / lengths
    return value, a / lengths - value * z / (z @ z)


def contrastive(z, glob, prev) -> tuple[float, np.ndarray]:
    """The contrastive loss of one example, and its gradient by z."""
    t = HYPER["temperature"]
    (near, d_near), (far, d_far) = cosine(z, glob), cosine(z, prev)
    share = np.exp(near / t) / (np.exp(near / t) + np.exp(far / t))
    return -np.log(share), -(1 - share) / t * (d_near - d_far)


def worked(start: Params, previous: Params, given, rate: float, defect: str) -> tuple[Params, dict[str, float]]:
    w, measured = start, []
    for x, y in given:
        z, loss, d_logits = features(w, x), *cross_entropy(forward(w, x), y)
        pairs = features(start, x), features(previous, x)
        if defect == "drawn to the last model":
            pairs = pairs[::-1]
        if defect == "the global model moves along":
            pairs = z, pairs[1]
        each = [contrastive(*rows) for rows in zip(z, *pairs, strict=True)]
        pull = HYPER["mu"] * np.stack([gradient for _, gradient in each]) / len(y)
        d_h = (d_logits @ w["w2"].T + pull) * (1 - z**2)
        gradient = {"w1": x.T @ d_h, "b1": d_h.sum(0), "w2": z.T @ d_logits, "b2": d_logits.sum(0)}
        w = step(w, gradient, rate, HYPER["weight_decay"])
        measured.append({"train_loss": loss, "contrast": np.mean([value for value, _ in each])})
    return w, {name: np.mean([one[name] for one in measured]) for name in measured[0]}


def reference(kind: str, defect: str = "") -> list[Round]:
    server = got(kind).states[0].server
    own, seen, history = [server] * len(SIZES), [0] * len(SIZES), []
    for r, cohort in enumerate(cohorts(kind)):
        rate, changes, measured = HYPER["lr"] * decay(HYPER, r, STEPS), [], []
        for i in cohort:
            previous = server if defect == "the last model left out" else own[i]
            own[i], metrics = worked(server, previous, batches(kind, i, seen[i], r), rate, defect)
            changes.append(subtract(own[i], server))
            measured.append(metrics)
            seen[i] += 1
        server = average(server, changes, [SIZES[i] for i in cohort])
        metrics = {name: float(np.mean([one[name] for one in measured])) for name in measured[0]}
        history.append(Round(server, list(own), list(seen), metrics))
    return history


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rounds(kind):
    want = reference(kind)
    assert_rounds(got(kind), want)
    assert_scores(got(kind), [want[-1].server] * len(SIZES), want[-1].server)


@pytest.mark.slow
@pytest.mark.parametrize(
    "defect", ["drawn to the last model", "the global model moves along", "the last model left out"]
)
def test_a_defect_would_be_seen(defect):
    assert difference(got("uniform"), reference("uniform", defect)) > 1e-3
