"""Client optimizers in two rounds of every method, against the NumPy reference with its step replaced by hand.

``g`` is the gradient with weight decay (and FedProx's term): Adam ``m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2,
w -= rate (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)``; momentum ``v = beta v + g, w -= rate v``. Both start anew
in every round of a client; AdaPeD's theta and mu have one each, which the reference tells apart by their rates.
"""

import jax
import numpy as np
import numpy_reference
import pytest
from numpy_reference import run_adaped, run_fedavg, run_local
from oracle_setup import (
    SIZES,
    assert_same,
    classification_problem,
    client_row,
    distance,
    participation,
    run,
    simulation,
    world,
)

ROUNDS = 2
BASE = {"lr": 0.05, "lr_decay": 0.7, "decay_every": 3.0, "weight_decay": 0.02}
HYPER = {
    "local": BASE,
    "fedavg": BASE,
    "fedprox": BASE | {"prox": 0.8},
    "adaped": BASE | {"lr_global": 0.04, "lr_psi": 0.1, "psi_init": 0.6, "psi_floor": 0.5, "c": 5.0},
}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


class Adam:
    def __init__(self, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8):
        self.b1, self.b2, self.eps, self.t, self.m, self.v = b1, b2, eps, 0, {}, {}

    def __call__(self, w: dict, g: dict, rate: float) -> dict:
        self.t += 1
        self.m = {k: self.b1 * self.m.get(k, 0) + (1 - self.b1) * g[k] for k in g}
        self.v = {k: self.b2 * self.v.get(k, 0) + (1 - self.b2) * g[k] ** 2 for k in g}
        scale = {k: np.sqrt(self.v[k] / (1 - self.b2**self.t)) + self.eps for k in g}
        return {k: w[k] - rate * self.m[k] / (1 - self.b1**self.t) / scale[k] for k in g}


class Momentum:
    def __init__(self, beta: float):
        self.beta, self.v = beta, {}

    def __call__(self, w: dict, g: dict, rate: float) -> dict:
        self.v = {k: self.beta * self.v.get(k, 0) + g[k] for k in g}
        return {k: w[k] - rate * self.v[k] for k in g}


OPTIMIZERS = {
    "adam": Adam,
    "adam:b1=0.6,eps=1e-3": lambda: Adam(b1=0.6, eps=1e-3),
    "sgd:momentum=0.8": lambda: Momentum(0.8),
    "momentum": lambda: Momentum(0.9),
}


def engine(method: str, optimizer: str):
    made = simulation(
        method,
        classification_problem(),
        HYPER[method],
        cohort=participation("uniform"),
        batch_size=6,
        choices={"optimizer": optimizer},
    )
    return run(made, ROUNDS)


def reference(method: str, optimizer: str, start, monkeypatch, *, anew: bool = True) -> list:
    memories = {}

    def step(params, gradient, rate, weight_decay):
        g = {k: gradient[k] + weight_decay * w for k, w in params.items()}
        return memories.setdefault(rate, OPTIMIZERS[optimizer]())(params, g, rate)

    monkeypatch.setattr(numpy_reference, "step", step)
    given = world(classification_problem(), participation("uniform"), 6, ROUNDS)

    def batches(i: int, seen: int):  # asked for at the start of a client's round
        if anew:
            memories.clear()
        return given.batches(i, seen)

    watched, hp = given._replace(batches=batches), HYPER[method]
    own = [client_row(start.clients[0], i) for i in range(len(SIZES))]
    if method == "local":
        return run_local(watched, hp, own)
    if method == "adaped":
        return run_adaped(watched, hp, start.server.mu, own)
    return run_fedavg(watched, hp, start.server, prox=hp.get("prox", 0.0), uniform=method == "fedprox")


# Two optimizers with one method, and AdaPeD, which has two memories, with one; all pairs in the slow run.
EVERY_TIME = {("fedavg", "adam"), ("fedavg", "momentum"), ("adaped", "adam:b1=0.6,eps=1e-3")}
PAIRS = [pytest.param(m, o, marks=() if (m, o) in EVERY_TIME else pytest.mark.slow) for m in HYPER for o in OPTIMIZERS]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "optimizer"), PAIRS)
def test_rounds(method, optimizer, monkeypatch):
    got = engine(method, optimizer)
    want = reference(method, optimizer, got.states[0], monkeypatch)
    for state, expected in zip(got.states[1:], want, strict=True):
        assert_same(state.server._asdict() if method == "adaped" else state.server, expected.server)
        for i in range(len(SIZES)):
            assert_same(client_row(state.clients[0], i), expected.clients[i])
    for name, values in got.history.items():
        if name in want[0].metrics:
            np.testing.assert_allclose(values, [r.metrics[name] for r in want], rtol=1e-9)


@pytest.mark.slow
def test_a_memory_that_were_kept_would_be_seen(monkeypatch):
    got = engine("fedavg", "momentum")
    kept = reference("fedavg", "momentum", got.states[0], monkeypatch, anew=False)
    assert distance(got.states[-1].server, kept[-1].server) > 1e-3
