r"""Batch normalisation by the engine in float64 against NumPy: FedBN keeps it with the clients, FedAvg averages all.

The model is ``logits = s * z + t``, z the products ``a = x w`` normalised over the batch in training, and by the
running mean and variance, which move by 0.2 of the way to each batch's, in evaluation. Gradients by hand.
"""

from __future__ import annotations

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from numpy_reference import Batch, Params, average, cross_entropy, decay, step, subtract
from oracle_setup import (
    CLASSES,
    FEATURES,
    SIZES,
    STEPS,
    Run,
    assert_same,
    classification_problem,
    client_row,
    clients,
    distance,
    draws,
    on_host,
    participation,
    run,
    simulation,
    world,
)

from jaxpfl import classification
from jaxpfl.core.randomness import Purpose

ROUNDS, EPSILON, MOMENTUM, ADAPT, TUNE = 3, 1e-3, 0.8, 3, 4
SGD = {"lr": 0.4, "lr_decay": 0.7, "decay_every": 3.0, "weight_decay": 0.02}
HYPER = {"fedbn": SGD, "fedavg": SGD | {"server_lr": 0.5}, "fedprox": SGD | {"prox": 0.3}, "fedavg-ft": SGD}
NEWCOMERS = ((8, 13, 3), (100, 101, 55))
SHARED, NORM, STATISTICS = ("w",), ("s", "t"), ("m", "v")
BATCH_SIZES = {"full": 100, "uniform": 6}

pytestmark = pytest.mark.usefixtures("float64")


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        a = nn.Dense(CLASSES, use_bias=False, param_dtype=jnp.float64)(x)
        kind = {"momentum": MOMENTUM, "epsilon": EPSILON, "param_dtype": jnp.float64}
        return nn.BatchNorm(use_running_average=not train, **kind)(a)


@cache
def task():
    return classification(Net(), (FEATURES,), CLASSES)


# --- the reference --------------------------------------------------------------------------------


def normalised(params: Params, x: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    inverse = 1 / np.sqrt(variance + EPSILON)
    return (x @ params["w"] - mean) * inverse, inverse


def predict(params: Params, x: np.ndarray) -> np.ndarray:
    return params["s"] * normalised(params, x, params["m"], params["v"])[0] + params["t"]


def train_step(params: Params, batch: Batch, rate: float, decay: float, pull=None, defect="") -> tuple[Params, float]:
    """A step of SGD by ``da = (dz - mean dz - z mean(z dz)) / sqrt(var + eps)``, and the statistics moved."""
    x, y = batch
    a = x @ params["w"]
    mean, variance = a.mean(axis=0), a.var(axis=0)
    z, inverse = normalised(params, x, mean, variance)
    loss, d_logits = cross_entropy(params["s"] * z + params["t"], y)
    d_z = d_logits * params["s"]
    d_a = (d_z - d_z.mean(axis=0) - z * (z * d_z).mean(axis=0)) * inverse
    gradient = {"w": x.T @ d_a, "s": (d_logits * z).sum(0), "t": d_logits.sum(0)}
    if pull is not None:
        anchor, prox = pull
        gradient = {k: g + prox * (params[k] - anchor[k]) for k, g in gradient.items()}
    new = step({k: params[k] for k in gradient}, gradient, rate, decay)
    if defect == "padding counts":  # as of a batch of six slots, zero where nobody is
        padded = np.concatenate([x, np.zeros((max(6 - len(x), 0), FEATURES))]) @ params["w"]
        mean, variance = padded.mean(axis=0), padded.var(axis=0)
    if defect == "statistics decay":
        params = params | {k: (1 - rate * decay) * params[k] for k in STATISTICS}
    moved = {"m": (params["m"], mean), "v": (params["v"], variance)}
    return new | {k: MOMENTUM * old + (1 - MOMENTUM) * now for k, (old, now) in moved.items()}, loss


def reference(method: str, kind: str, defect: str = "") -> list[tuple]:
    """(shared part, every client's own part, mean loss) after each round."""
    given = world(classification_problem(), participation(kind), BATCH_SIZES[kind], ROUNDS)
    shared, own = parts(engine(method, kind).states[0], method)
    hp, seen, history = HYPER[method], [0] * len(SIZES), []
    for r, cohort in enumerate(given.cohorts):
        rate, changes, losses = hp["lr"] * decay(hp, r, STEPS), [], []
        for i in cohort:
            params = shared | own[i]
            pull = (shared, hp["prox"]) if method == "fedprox" else None
            for batch in given.batches(i, seen[i]):
                params, loss = train_step(params, batch, rate, hp["weight_decay"], pull, defect)
                losses.append(loss)
            own[i] = {k: params[k] for k in own[i]}
            changes.append(subtract({k: params[k] for k in shared}, shared))
            seen[i] += 1
        mean = average(shared, changes, [1.0 if method == "fedprox" else given.sizes[i] for i in cohort])
        served = {k: hp.get("server_lr", 1.0) for k in shared}
        if defect != "the server's rate on statistics":
            served |= {k: 1.0 for k in served if k in STATISTICS}
        shared = {k: shared[k] + served[k] * (mean[k] - shared[k]) for k in shared}
        history.append((shared, list(own), float(np.mean(losses))))
    return history


# --- the engine -----------------------------------------------------------------------------------


@cache
def engine(method: str, kind: str, **options) -> Run:
    given = {"cohort": participation(kind), "batch_size": BATCH_SIZES[kind]}
    unseen = {"unseen": classification_problem(*NEWCOMERS), "adapt_rounds": ADAPT}
    made = simulation(method, classification_problem(), HYPER[method], task=task(), engine=unseen, **given, **options)
    return run(made, ROUNDS)


def named(tree) -> Params:
    """Parameters by their letters; without those that are in another part."""
    dense, norm, statistics = (tree["Dense_0"], tree["BatchNorm_0"], tree["batch_stats"]["BatchNorm_0"])
    by_letter = {"w": dense["kernel"], "s": norm["scale"], "t": norm["bias"]}
    by_letter |= {"m": statistics["mean"], "v": statistics["var"]}
    return {k: leaf for k, leaf in by_letter.items() if leaf is not None}


def parts(state, method: str) -> tuple[Params, list[Params]]:
    if method != "fedbn":
        return named(state.server), [{} for _ in SIZES]
    own = named(state.clients[0])
    assert set(named(state.server)) == set(SHARED)
    assert set(own) == set(NORM + STATISTICS)
    return named(state.server), [client_row(own, i) for i in range(len(SIZES))]


def scores(models: list[Params], tests: list[Batch]) -> dict[str, np.ndarray]:
    logits = [(predict(model, x), y) for model, (x, y) in zip(models, tests, strict=True)]
    accuracy = np.array([np.mean(a.argmax(1) == y) for a, y in logits])
    return {"accuracy": accuracy, "loss": np.array([cross_entropy(a, y)[0] for a, y in logits])}


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("fedbn", "uniform"),
        ("fedavg", "uniform"),
        pytest.param("fedprox", "uniform", marks=pytest.mark.slow),
        pytest.param("fedbn", "full", marks=pytest.mark.slow),
        pytest.param("fedavg", "full", marks=pytest.mark.slow),
    ],
)
def test_rounds(method, kind):
    got, want = engine(method, kind), reference(method, kind)
    for state, (shared, own, _) in zip(got.states[1:], want, strict=True):
        assert_same(parts(state, method), (shared, own))
    np.testing.assert_allclose(got.history["train_loss"], [loss for _, _, loss in want], rtol=1e-9)

    shared, own, _ = want[-1]
    found = on_host(got.simulation.evaluate(got.state))
    tests = clients(classification_problem().test)
    assert_same({k: found["after"][k] for k in ("accuracy", "loss")}, scores([shared | one for one in own], tests))
    assert ("global" in found) == (method != "fedbn")
    if method != "fedbn":
        assert_same(found["global"], scores([shared] * len(SIZES), tests))


@pytest.mark.parametrize(
    ("method", "defect"),
    [("fedbn", "padding counts"), ("fedbn", "statistics decay"), ("fedavg", "the server's rate on statistics")],
)
def test_a_defect_would_be_seen(method, defect):
    shared, own, _ = reference(method, "uniform", defect)[-1]
    assert distance(parts(engine(method, "uniform").states[-1], method), (shared, own)) > 1e-4


def newcomer(i: int, steps: int, purpose: Purpose, nth: int = 0) -> list[Batch]:
    return draws(classification_problem(*NEWCOMERS), i, purpose, BATCH_SIZES["uniform"], steps, nth)


def test_new_clients_of_fedbn_arrive_with_initial_statistics_and_make_their_own():
    got = engine("fedbn", "uniform")
    shared, _, _ = reference("fedbn", "uniform")[-1]
    start = {"s": np.ones(CLASSES), "t": np.zeros(CLASSES), "m": np.zeros(CLASSES), "v": np.ones(CLASSES)}
    found, tests = (
        on_host(got.simulation.evaluate_unseen(got.state)),
        clients(classification_problem(*NEWCOMERS).test),
    )
    assert_same(found["before"], scores([shared | start] * 3, tests))
    models, rate = [], SGD["lr"] * decay(SGD, ROUNDS - 1, STEPS)
    for i in range(3):
        own = start
        for nth in range(ADAPT):  # the message is the same in every round
            params = shared | own
            for batch in newcomer(i, STEPS, Purpose.BATCHES, nth):
                params, _ = train_step(params, batch, rate, SGD["weight_decay"])
            own = {k: params[k] for k in own}
        models.append(shared | own)
    assert_same({k: found["after"][k] for k in ("accuracy", "loss")}, scores(models, tests))


@pytest.mark.slow
def test_fine_tuning_moves_the_statistics_to_the_clients_own():
    got = engine("fedavg-ft", "uniform", fine_tune_steps=TUNE)
    found, tests = (
        on_host(got.simulation.evaluate_unseen(got.state)),
        clients(classification_problem(*NEWCOMERS).test),
    )
    mu, rate = named(got.states[-1].server), SGD["lr"] * decay(SGD, ROUNDS - 1, STEPS)
    assert_same(found["before"], scores([mu] * 3, tests))
    models = []
    for i in range(3):
        params = mu
        for batch in newcomer(i, TUNE, Purpose.PERSONALIZE_BATCHES):
            params, _ = train_step(params, batch, rate, SGD["weight_decay"])
        models.append(params)
    assert_same({k: found["after"][k] for k in ("accuracy", "loss")}, scores(models, tests))
