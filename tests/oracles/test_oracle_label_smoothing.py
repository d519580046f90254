"""Label smoothing against NumPy: the target of the training loss is ``(1 - s) one-hot + s / K``, that of scores is not.

One step of FedAvg on full batches is a step on the pooled loss; the gradient of a client's loss by its logits is
``(softmax - target) / n``.
"""

import json

import numpy as np
import pytest
from numpy_reference import backward, cross_entropy, forward, log_softmax, step
from oracle_setup import CLASSES, assert_same, classification_problem, clients, on_host, perceptron

import jaxpfl
from jaxpfl import JaxpflError
from jaxpfl.runs.config import RunConfig, differences, resolve, to_json

RATE = 0.3


@pytest.fixture(scope="module")
def problem():
    return classification_problem()


def smoothed(logits, y, s):
    """Mean of ``-sum target log softmax``, and its gradient by the logits."""
    n, log_q = len(y), log_softmax(logits)
    target = (1 - s) * np.eye(CLASSES)[y] + s / CLASSES
    return -(target * log_q).sum() / n, (np.exp(log_q) - target) / n


@pytest.mark.slow
@pytest.mark.parametrize("s", [0.0, 0.1, 0.9])
@pytest.mark.usefixtures("float64")
def test_one_round_is_numpys(problem, s):
    of_work = {"local_steps": 1, "batch_size": 100, "lr": RATE, "label_smoothing": s}
    model, hyper = perceptron().model, {"weight_decay": 0.0}
    fit = jaxpfl.fit("fedavg", problem, model=model, rounds=1, hyper=hyper, **of_work)
    mu = on_host(fit.simulation.init([0])).server
    steps, losses = [], []
    for x, y in clients(problem.train):
        loss, d_logits = smoothed(forward(mu, x), y, s)
        steps.append((len(y), step(mu, backward(mu, x, d_logits), RATE, 0.0)))
        losses.append(loss)
    total = sum(n for n, _ in steps)
    want = {name: np.sum([n * params[name] for n, params in steps], axis=0) / total for name in mu}
    assert_same(on_host(fit.state).server, want)
    np.testing.assert_allclose(fit.history["train_loss"][0, 0], np.mean(losses), rtol=1e-12)
    score, _ = zip(*(cross_entropy(forward(want, x), y) for x, y in clients(problem.test)), strict=True)
    np.testing.assert_allclose(fit.scores["global"]["loss"][-1, 0], score, rtol=1e-12)
    kept, _ = zip(*(cross_entropy(forward(want, x), y) for x, y in clients(problem.validation)), strict=True)
    assert fit.validation is not None
    np.testing.assert_allclose(fit.validation["global"]["loss"][-1, 0], kept, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_a_teacher_is_chosen_by_the_loss_that_is_scored(problem):
    """PersFL keeps the model of the least validation loss, which smoothing does not touch."""
    of_work = {"local_steps": 1, "batch_size": 100, "lr": RATE, "label_smoothing": 0.5}
    options = {"distill_steps": 1, "imitations": (0.5,), "temperatures": (2.0,)}
    fit = jaxpfl.fit("persfl", problem, model=perceptron().model, rounds=1, options=options, **of_work)
    mu, kept = on_host(fit.simulation.init([0])).server, on_host(fit.state).clients[0]
    want = [cross_entropy(forward(mu, x), y)[0] for x, y in clients(problem.validation)]
    np.testing.assert_allclose(kept.loss, want, rtol=1e-12)


@pytest.mark.parametrize("value", [1.0, -0.1, float("nan"), "0.1", True])
def test_a_smoothing_out_of_range_is_refused(problem, value):
    with pytest.raises(JaxpflError, match="label_smoothing must be"):
        jaxpfl.fit("fedavg", problem, label_smoothing=value)
    with pytest.raises(JaxpflError, match="label_smoothing must be"):
        resolve(RunConfig(label_smoothing=value))


def test_a_run_stored_without_it_has_none_of_it():
    now = json.loads(json.dumps(to_json(resolve(RunConfig(label_smoothing=0.1)))))
    old = {name: value for name, value in now.items() if name != "label_smoothing"}
    assert now["label_smoothing"] == 0.1
    assert differences(old, now | {"label_smoothing": 0.0}) == ([], [])
    assert differences(old, now)[0] == ["label_smoothing: 0.0 -> 0.1"]
