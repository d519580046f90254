"""Clipped local steps against NumPy: ``g min(1, c / |g|)``, before weight decay and momentum.

g is the gradient with its proximal term, and |g| the norm over all of its arrays.
"""

import numpy as np
import pytest
from numpy_reference import backward, cross_entropy, forward
from oracle_setup import SIZES, assert_same, classification_problem, clients, on_host, perceptron

import jaxpfl
from jaxpfl import JaxpflError

ROUNDS, STEPS, RATE, PULL, WEIGHT_DECAY, BETA = 2, 3, 0.4, 0.7, 0.02, 0.8
CLIP = 0.3


@pytest.fixture(scope="module")
def problem():
    return classification_problem()


def trained(start, x, y, clip, anchor=None, *, defect=""):
    """Parameters after the steps, and the norms of their gradients."""
    params, momentum, norms = start, dict.fromkeys(start, 0.0), []
    for _ in range(STEPS):
        gradient = backward(params, x, cross_entropy(forward(params, x), y)[1])
        if anchor is not None:
            gradient = {k: gradient[k] + PULL * (params[k] - anchor[k]) for k in params}
        if defect == "with weight decay":
            gradient = {k: gradient[k] + WEIGHT_DECAY * params[k] for k in params}
        norms.append(np.sqrt(sum(np.sum(g**2) for g in gradient.values())))
        by = dict.fromkeys(params, norms[-1])
        if defect == "by array":
            by = {k: np.sqrt(np.sum(g**2)) for k, g in gradient.items()}
        gradient = {k: g * min(1, clip / by[k]) for k, g in gradient.items()}
        if defect != "with weight decay":
            gradient = {k: gradient[k] + WEIGHT_DECAY * params[k] for k in params}
        momentum = {k: BETA * momentum[k] + gradient[k] for k in params}
        params = {k: params[k] - RATE * momentum[k] for k in params}
    return params, norms


def fitted(method, problem, clip, **more):
    work = {"local_steps": STEPS, "batch_size": 100, "rounds": ROUNDS, "client_optimizer": f"sgd:momentum={BETA}"}
    rates = {"lr": RATE, "lr_decay": 1.0, "weight_decay": WEIGHT_DECAY}
    hyper = rates | ({"lam": PULL, "lr_personal": RATE} if method == "ditto" else {})
    given = {"model": perceptron().model, "hyper": hyper, "clip_gradients": clip}
    return jaxpfl.fit(method, problem, **given | work | more)


def reference(start, problem, clip, defect=""):
    """Ditto, and all norms of gradients."""
    mu, own, norms = start, [start] * len(SIZES), []
    for _ in range(ROUNDS):
        data = clients(problem.train)
        near = [trained(v, *one, clip, mu, defect=defect) for v, one in zip(own, data, strict=True)]
        new = [trained(mu, *one, clip, defect=defect) for one in data]
        own, norms = [v for v, _ in near], norms + [n for _, found in near + new for n in found]
        mu = {k: np.average([w[k] for w, _ in new], axis=0, weights=SIZES) for k in mu}
    return mu, {k: np.stack([v[k] for v in own]) for k in mu}, np.array(norms)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_each_of_dittos_models_is_clipped_alone(problem):
    fit = fitted("ditto", problem, CLIP)
    start = on_host(fit.simulation.init([0])).server
    mu, own, norms = reference(start, problem, CLIP)
    assert 0.2 < (norms > CLIP).mean() < 0.8  # some are clipped, some are not
    state = on_host(fit.simulation.trim(fit.state))
    assert_same(state.server, mu)
    assert_same(state.clients[0], own)
    for defect in ("with weight decay", "by array"):
        wrong, _, _ = reference(start, problem, CLIP, defect)
        assert max(np.abs(wrong[k] - mu[k]).max() for k in mu) > 1e-4


@pytest.mark.slow
def test_a_bound_that_is_never_met_changes_nothing(problem):
    loose, off = (fitted("fedavg", problem, clip).history["train_loss"] for clip in (1e9, None))
    np.testing.assert_array_equal(loose, off)


@pytest.mark.parametrize("clip", [0, -1.0, float("nan"), float("inf")])
def test_a_bound_out_of_range_is_refused(problem, clip):
    with pytest.raises(JaxpflError, match="clip_gradients must be > 0 and finite, got"):
        fitted("fedavg", problem, clip)
