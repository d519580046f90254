"""Least squares of a linear model against NumPy, in float64: the loss, its distillation and its scores."""

import jax.numpy as jnp
import numpy as np
import pytest
from oracle_setup import clients, on_host, run, simulation, stack

from jaxpfl import Model, Task
from jaxpfl.models.base import as_regression

FEATURES, STEPS, ROUNDS, RATE = 3, 2, 3, 0.05
SIZES, IDS = (6, 9, 14, 4), (3, 11, 0, 7)

pytestmark = pytest.mark.usefixtures("float64")


def problem():
    rng = np.random.default_rng(3)

    def examples(n, w):
        x = rng.normal(size=(n, FEATURES))
        return x, x @ w + 0.3 * rng.normal(size=n)

    rules = rng.normal(size=(len(SIZES), FEATURES))
    pairs = [(examples(n, w), examples(5 + i, w)) for i, (n, w) in enumerate(zip(SIZES, rules, strict=True))]
    return stack([train for train, _ in pairs], [test for _, test in pairs], IDS)


def linear() -> Task:
    start = np.linspace(-0.2, 0.4, FEATURES)
    model = Model(lambda key, x: jnp.asarray(start), lambda w, x, key=None, train=False: (x @ w)[:, None])
    return as_regression(Task(model, (FEATURES,), 1))


def gradient(w, x, y):
    return x.T @ (x @ w - y) / len(y)


def local(w, x, y):
    for _ in range(STEPS):
        w = w - RATE * gradient(w, x, y)
    return w


def of_local(data, w):
    own = [w] * len(data)
    for _ in range(ROUNDS):
        own = [local(v, *one) for v, one in zip(own, data, strict=True)]
    return own, None


def of_fedavg(data, w):
    for _ in range(ROUNDS):
        w = np.average([local(w, *one) for one in data], axis=0, weights=SIZES)
    return [w] * len(data), w


def of_ditto(data, mu, lam=0.7, rate=0.1):
    own = [mu] * len(data)
    for _ in range(ROUNDS):
        for i, (x, y) in enumerate(data):
            for _ in range(STEPS):
                own[i] = own[i] - rate * (gradient(own[i], x, y) + lam * (own[i] - mu))
        mu = np.average([local(mu, *one) for one in data], axis=0, weights=SIZES)
    return own, mu


def of_adaped(data, mu, psi=2.0, c=5.0, rate_psi=0.05, floor=0.5, defect=""):
    """With the divergence |b - a|^2 / 2 of predictions; ``half``: |b - a|^2."""
    scale = 2 if defect == "half" else 1
    own = [mu] * len(data)
    for _ in range(ROUNDS):
        new = []
        for i, (x, y) in enumerate(data):
            theta, m, p = own[i], mu, psi
            for _ in range(STEPS):
                pull = scale * x.T @ (x @ (theta - m)) / len(y) / (2 * p)
                theta = theta - RATE * (gradient(theta, x, y) + pull)
                m = m + RATE * scale * x.T @ (x @ (theta - m)) / len(y) / (2 * p)
                f = scale * np.mean((x @ (theta - m)) ** 2) / 2
                p = max(p - rate_psi * (1 / (2 * p) - c * f / (2 * p**2)), floor)
            own[i] = theta
            new.append((m, p))
        mu, psi = np.mean([m for m, _ in new], axis=0), np.mean([p for _, p in new])
    return own, mu


HYPER = {
    "local": {},
    "fedavg": {},
    "ditto": {"lam": 0.7, "lr_personal": 0.1},
    "adaped": {"lr_global": RATE, "psi_init": 2.0},
}
REFERENCE = {"local": of_local, "fedavg": of_fedavg, "ditto": of_ditto, "adaped": of_adaped}
SGD = {"lr": RATE, "weight_decay": 0.0, "lr_decay": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("method", list(REFERENCE))
def test_rounds_and_scores(method):
    federation = problem()
    hyper = {**SGD, **HYPER[method]}
    found = run(simulation(method, federation, hyper, task=linear(), steps=STEPS), ROUNDS)
    own, mu = REFERENCE[method](clients(federation.train), np.linspace(-0.2, 0.4, FEATURES))
    scores = on_host(dict(found.simulation.evaluate(found.state)))
    test = clients(federation.test)
    for which, models in (("after", own), ("global", [mu] * len(test))):
        if mu is None and which == "global":
            continue
        for i, ((x, y), w) in enumerate(zip(test, models, strict=True)):
            left = x @ w - y
            got = {name: values[i] for name, values in scores[which].items()}
            np.testing.assert_allclose(got["rmse"], np.sqrt(np.mean(left**2)), rtol=1e-9)
            np.testing.assert_allclose(got["mae"], np.mean(np.abs(left)), rtol=1e-9)
            np.testing.assert_allclose(got["loss"], np.mean(left**2) / 2, rtol=1e-9)
            np.testing.assert_allclose(got["r2"], 1 - np.sum(left**2) / np.sum((y - y.mean()) ** 2), rtol=1e-9)


def test_another_distance_would_be_seen():
    data, start = clients(problem().train), np.linspace(-0.2, 0.4, FEATURES)
    right, wrong = (of_adaped(data, start, defect=defect)[1] for defect in ("", "half"))
    assert np.abs(right - wrong).max() > 1e-3
