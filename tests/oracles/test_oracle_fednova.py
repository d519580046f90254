"""FedNova against NumPy, with stragglers: ``(sum p tau) sum p Delta / tau`` is what the server adds."""

from typing import Any

import numpy as np
import pytest
from numpy_reference import backward, cross_entropy, forward, step
from oracle_setup import SIZES, assert_same, classification_problem, clients, on_host, perceptron

import jaxpfl
from jaxpfl import JaxpflError

STEPS, RATE, WEIGHT_DECAY, SERVER = 6, 0.3, 0.02, 0.7


@pytest.fixture(scope="module")
def problem():
    return classification_problem()


def fitted(problem, **more):
    hyper = {"lr": RATE, "lr_decay": 1.0, "weight_decay": WEIGHT_DECAY, "server_lr": SERVER}
    given: dict[str, Any] = {"model": perceptron().model, "rounds": 1, "local_steps": STEPS, "batch_size": 100}
    given |= {"hyper": hyper, "options": {"fednova": True}}
    return jaxpfl.fit("fedavg", problem, **given | more)


@pytest.mark.usefixtures("float64")
def test_a_straggler_counts_by_its_slope(problem):
    simulation = fitted(problem, stragglers=0.7, dropout=0.2).simulation
    state = simulation.init([0])
    mu, before, unequal = on_host(state).server, simulation.counts(state), 0
    for _ in range(4):
        state, _ = simulation.advance(state, 1)
        now = simulation.counts(state)
        taken, arrived = (np.asarray(getattr(now, n) - getattr(before, n))[0] for n in ("steps", "uploads"))
        p, slopes = arrived * np.array(SIZES) / (arrived * np.array(SIZES)).sum(), []
        for (x, y), tau in zip(clients(problem.train), taken, strict=True):
            w = mu
            for _ in range(tau):
                w = step(w, backward(w, x, cross_entropy(forward(w, x), y)[1]), RATE, WEIGHT_DECAY)
            slopes.append({k: (w[k] - mu[k]) / tau for k in mu})
        effective = p @ taken
        mu = {k: mu[k] + SERVER * effective * sum(a * d[k] for a, d in zip(p, slopes, strict=True)) for k in mu}
        before, unequal = now, unequal + (len(set(taken[arrived > 0])) > 1)
    assert unequal > 1
    assert_same(on_host(state).server, mu)


@pytest.mark.slow
def test_of_equal_steps_it_is_the_mean(problem):
    nova, plain = (fitted(problem, rounds=3, options={"fednova": on}).history["train_loss"] for on in (True, False))
    np.testing.assert_allclose(nova, plain, rtol=1e-5)


def test_other_optimizers_are_refused(problem):
    with pytest.raises(JaxpflError, match=r"fedavg.fednova divides by the steps of plain sgd, not adam"):
        fitted(problem, client_optimizer="adam")
