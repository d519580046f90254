r"""FedBN by the engine in float64 against NumPy: what travels is averaged, normalisation parameters stay.

The model is ``logits = tanh(s * (a - mean a) / sqrt(var a + eps) + t) w2 + b2`` with ``a = x w1 + b1``, normalised over
the hidden units of one example; s and t stay with the client. Gradients by hand.
"""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_reference import Batch, Hyper, Params, World, average, cross_entropy, decay, step, subtract
from oracle_setup import (
    CLASSES,
    FEATURES,
    HIDDEN,
    SIZES,
    Run,
    assert_same,
    classification_problem,
    client_row,
    clients,
    distance,
    on_host,
    participation,
    run,
    simulation,
    world,
)

from jaxpfl import JaxpflError, Model, classification

ROUNDS, EPSILON = 4, 1e-3
HYPER = {"lr": 0.4, "lr_decay": 0.7, "decay_every": 4.0, "weight_decay": 0.02}
OWN = ("s", "t")
SHARED = ("w1", "b1", "w2", "b2")


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def task(norm=lambda path: path[0] in OWN):
    def init(key, x):
        shapes = {"w1": (FEATURES, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, CLASSES), "b2": (CLASSES,)}
        keys = jax.random.split(key, len(shapes))
        shared = {name: jax.random.normal(k, shapes[name]) / 2 for name, k in zip(shapes, keys, strict=True)}
        return shared | {"s": jnp.linspace(0.5, 1.5, HIDDEN), "t": jnp.linspace(-1.0, 1.0, HIDDEN)}

    def apply(params, x):
        a = x @ params["w1"] + params["b1"]
        z = (a - a.mean(1, keepdims=True)) / jnp.sqrt(a.var(1, keepdims=True) + EPSILON)
        return jnp.tanh(params["s"] * z + params["t"]) @ params["w2"] + params["b2"]

    return classification(Model(init, apply, norm=norm), (FEATURES,), CLASSES)


def forward(params: Params, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Logits, tanh, normalised values, and the inverse standard deviations."""
    a = x @ params["w1"] + params["b1"]
    inverse = 1 / np.sqrt(a.var(axis=1, keepdims=True) + EPSILON)
    z = (a - a.mean(axis=1, keepdims=True)) * inverse
    h = np.tanh(params["s"] * z + params["t"])
    return h @ params["w2"] + params["b2"], h, z, inverse


def gradient(params: Params, x: np.ndarray, y: np.ndarray) -> tuple[float, Params]:
    """Gradient of the mean loss: ``da = (dz - mean dz - z mean(z dz)) / sqrt(var + eps)``, dz by the normalised z."""
    logits, h, z, inverse = forward(params, x)
    loss, d_logits = cross_entropy(logits, y)
    d_u = (d_logits @ params["w2"].T) * (1 - h**2)
    d_z = d_u * params["s"]
    d_a = (d_z - d_z.mean(axis=1, keepdims=True) - z * (z * d_z).mean(axis=1, keepdims=True)) * inverse
    by_layer = {"w1": x.T @ d_a, "b1": d_a.sum(0), "w2": h.T @ d_logits, "b2": d_logits.sum(0)}
    return loss, by_layer | {"s": (d_u * z).sum(0), "t": d_u.sum(0)}


def run_fedbn(given: World, hp: Hyper, mu: Params, own: list[Params], defect: str = "") -> list[tuple]:
    """(mu, every nu_i, mean loss) after each round."""
    start, own, seen, history = own[0], list(own), [0] * len(own), []
    for r, cohort in enumerate(given.cohorts):
        rate, changes, losses = hp["lr"] * decay(hp, r, given.steps), [], []
        for i in cohort:
            params = mu | (start if defect == "own part starts anew" else own[i])
            batches = given.batches(i, seen[i])
            for x, y in batches:
                loss, by_parameter = gradient(params, x, y)
                params = step(params, by_parameter, rate, hp["weight_decay"])
                losses.append(loss)
            own[i] = {name: params[name] for name in OWN}
            changes.append(subtract({name: params[name] for name in SHARED}, mu))
            seen[i] += 1
        weights = [1.0 if defect == "uniform mean" else given.sizes[i] for i in cohort]
        mu = average(mu, changes, weights)
        if defect == "own part travels":
            mean = {name: np.average([own[i][name] for i in cohort], axis=0, weights=weights) for name in OWN}
            own = [mean] * len(own)
        history.append((mu, list(own), float(np.mean(losses))))
    return history


@cache
def engine(kind: str, batch_size: int) -> Run:
    made = simulation(
        "fedbn", classification_problem(), HYPER, task=task(), cohort=participation(kind), batch_size=batch_size
    )
    return run(made, ROUNDS)


def parts(state) -> tuple[Params, list[Params]]:
    """mu and every client's nu, without the places of the other part."""
    stacked = {name: state.clients[0][name] for name in OWN}
    assert all(state.clients[0][name] is None for name in SHARED)
    assert all(state.server[name] is None for name in OWN)
    return {name: state.server[name] for name in SHARED}, [client_row(stacked, i) for i in range(len(SIZES))]


def reference(kind: str, batch_size: int, defect: str = "") -> list[tuple]:
    given = world(classification_problem(), participation(kind), batch_size, ROUNDS)
    return run_fedbn(given, HYPER, *parts(engine(kind, batch_size).states[0]), defect)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "batch_size"), [("full", 100), ("uniform", 6)])
def test_rounds(kind, batch_size):
    got, want = engine(kind, batch_size), reference(kind, batch_size)
    for state, (mu, own, _) in zip(got.states[1:], want, strict=True):
        assert_same(parts(state), (mu, own))
    np.testing.assert_allclose(got.history["train_loss"], [loss for _, _, loss in want], rtol=1e-9)

    mu, own, _ = want[-1]
    tests = clients(classification_problem().test)
    logits = [(forward(mu | nu, x)[0], y) for nu, (x, y) in zip(own, tests, strict=True)]
    scores = on_host(got.simulation.evaluate(got.state))
    assert "global" not in scores
    for which in ("before", "after"):
        assert_same(scores[which]["loss"], np.array([cross_entropy(a, y)[0] for a, y in logits]))
        assert_same(scores[which]["accuracy"], np.array([np.mean(a.argmax(1) == y) for a, y in logits]))


@pytest.mark.slow
@pytest.mark.parametrize("defect", ["own part travels", "own part starts anew", "uniform mean"])
def test_defects_would_be_seen(defect):
    mu, own, _ = reference("uniform", 6, defect)[-1]
    assert distance(parts(engine("uniform", 6).states[-1]), (mu, own)) > 1e-3


@pytest.mark.slow
def test_all_start_from_the_models_own_normalisation():
    _, own = parts(engine("uniform", 6).states[0])
    for nu in own:
        assert_same(nu, {"s": np.linspace(0.5, 1.5, HIDDEN), "t": np.linspace(-1.0, 1.0, HIDDEN)}, rtol=0)


def test_gradient_by_hand():
    rng = np.random.default_rng(0)
    batch: Batch = (rng.normal(size=(6, FEATURES)), rng.integers(CLASSES, size=6))
    params = {name: np.asarray(leaf) for name, leaf in task().init(jax.random.key(1)).items()}
    for name, by_hand in gradient(params, *batch)[1].items():
        for place in np.ndindex(by_hand.shape):
            shift = np.zeros_like(params[name])
            shift[place] = 1e-6
            up, down = (gradient(params | {name: params[name] + sign * shift}, *batch)[0] for sign in (1, -1))
            np.testing.assert_allclose(by_hand[place], (up - down) / 2e-6, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("norm", [None, lambda path: False])
def test_a_model_without_normalisation_is_refused(norm):
    with pytest.raises(JaxpflError, match=r"this model names none: .* mlp-ln, cnn-gn or resnet") as error:
        simulation("fedbn", classification_problem(), HYPER, task=task(norm))
    assert "\n" not in str(error.value)
