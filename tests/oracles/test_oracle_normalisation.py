r"""Normalised models against NumPy: what travels is averaged, the rest stays with the clients.

Gradients by hand, with ``da = (dz - mean dz - z mean(z dz)) / sqrt(var + eps)`` of the normalised z.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import linen as nn
from numpy_reference import average, averaged, cross_entropy, decay, run_rounds, step, subtract
from oracle import CLASSES, FEATURES, HIDDEN, NEWCOMERS, ROUNDS, SETTINGS, SGD, STEPS, M, Oracle, assert_same

from jaxpfl import Model, classification
from jaxpfl.core.randomness import Purpose

EPSILON, MOMENTUM, ADAPT, TUNE = 1e-3, 0.8, 3, 4


def without_statistics(d_z, z, inverse, axis):
    """Gradient by what is normalised over an axis, from that by the normalised z."""
    mean = d_z.mean(axis=axis, keepdims=True)
    return (d_z - mean - z * (z * d_z).mean(axis=axis, keepdims=True)) * inverse


# --- normalised over the hidden units of one example ----------------------------------------------

OWN = ("s", "t")


def layer_norm(norm=lambda path: path[0] in OWN):
    """``logits = tanh(s * (a - mean a) / sqrt(var a + eps) + t) w2 + b2`` with ``a = x w1 + b1``."""

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


def layer_forward(params, x):
    """Logits, tanh, normalised values, and the inverse standard deviations."""
    a = x @ params["w1"] + params["b1"]
    inverse = 1 / np.sqrt(a.var(axis=1, keepdims=True) + EPSILON)
    z = (a - a.mean(axis=1, keepdims=True)) * inverse
    h = np.tanh(params["s"] * z + params["t"])
    return h @ params["w2"] + params["b2"], h, z, inverse


def layer_gradient(params, x, y):
    logits, h, z, inverse = layer_forward(params, x)
    loss, d_logits = cross_entropy(logits, y)
    d_u = (d_logits @ params["w2"].T) * (1 - h**2)
    d_a = without_statistics(d_u * params["s"], z, inverse, 1)
    by_layer = {"w1": x.T @ d_a, "b1": d_a.sum(0), "w2": h.T @ d_logits, "b2": d_logits.sum(0)}
    return loss, by_layer | {"s": (d_u * z).sum(0), "t": d_u.sum(0)}


def fedbn(world, hp, mu, own, defect=""):
    first = own[0]

    def work(mu, nu, turn):
        params, losses = mu | (first if defect == "own part starts anew" else nu), []
        for x, y in turn.batches:
            loss, gradient = layer_gradient(params, x, y)
            params = step(params, gradient, hp["lr"] * turn.factor, hp["weight_decay"])
            losses.append(loss)
        return {k: params[k] for k in nu}, {k: params[k] for k in mu}, {"train_loss": np.mean(losses)}

    def serve(mu, uploads, cohort, own):
        weights = [1.0] * M if defect == "uniform mean" else world.sizes
        if defect == "own part travels":
            own[:] = [averaged(weights)(own[0], [own[i] for i in cohort], cohort, own)] * M
        return averaged(weights)(mu, uploads, cohort, own)

    return run_rounds(world, hp, mu, own, work, serve)


def layer_models(last):
    def model(nu):
        return lambda x: layer_forward(last.server | nu, x)[0]

    return {"after": [model(nu) for nu in last.clients]}


# --- normalised over the batch --------------------------------------------------------------------

STATISTICS = ("m", "v")


class Net(nn.Module):
    """``logits = s * z + t``, z the products ``a = x w`` normalised over the batch in training.

    And by the running mean and variance, which move by 0.2 of the way to each batch's, in evaluation.
    """

    @nn.compact
    def __call__(self, x, train: bool):
        a = nn.Dense(CLASSES, use_bias=False, param_dtype=jnp.float64)(x)
        kind = {"momentum": MOMENTUM, "epsilon": EPSILON, "param_dtype": jnp.float64}
        return nn.BatchNorm(use_running_average=not train, **kind)(a)


def predict(params):
    inverse = 1 / np.sqrt(params["v"] + EPSILON)
    return lambda x: params["s"] * (x @ params["w"] - params["m"]) * inverse + params["t"]


def batch_step(params, batch, rate, weight_decay, pull=None, defect=""):
    """A step of SGD, and the statistics moved."""
    x, y = batch
    a = x @ params["w"]
    mean, variance = a.mean(axis=0), a.var(axis=0)
    inverse = 1 / np.sqrt(variance + EPSILON)
    z = (a - mean) * inverse
    loss, d_logits = cross_entropy(params["s"] * z + params["t"], y)
    d_a = without_statistics(d_logits * params["s"], z, inverse, 0)
    gradient = {"w": x.T @ d_a, "s": (d_logits * z).sum(0), "t": d_logits.sum(0)}
    if pull is not None:
        anchor, prox = pull
        gradient = {k: g + prox * (params[k] - anchor[k]) for k, g in gradient.items()}
    new = step({k: params[k] for k in gradient}, gradient, rate, weight_decay)
    if defect == "padding counts":  # as of a batch of six slots, zero where nobody is
        padded = np.concatenate([x, np.zeros((max(6 - len(x), 0), FEATURES))]) @ params["w"]
        mean, variance = padded.mean(axis=0), padded.var(axis=0)
    if defect == "statistics decay":
        params = params | {k: (1 - rate * weight_decay) * params[k] for k in STATISTICS}
    moved = {"m": (params["m"], mean), "v": (params["v"], variance)}
    return new | {k: MOMENTUM * old + (1 - MOMENTUM) * now for k, (old, now) in moved.items()}, loss


def batch_norm(world, hp, shared, own, defect=""):
    """FedBN keeps normalisation and statistics with the clients; FedAvg and FedProx average all."""

    def work(shared, nu, turn):
        params, losses = shared | nu, []
        pull = (shared, hp["prox"]) if "prox" in hp else None
        for batch in turn.batches:
            params, loss = batch_step(params, batch, hp["lr"] * turn.factor, hp["weight_decay"], pull, defect)
            losses.append(loss)
        return {k: params[k] for k in nu}, {k: params[k] for k in shared}, {"train_loss": np.mean(losses)}

    def serve(shared, uploads, cohort, own):
        weights = [1.0 if "prox" in hp else world.sizes[i] for i in cohort]
        mean = average(shared, [subtract(upload, shared) for upload in uploads], weights)
        served = {k: hp.get("server_lr", 1.0) for k in shared}
        if defect != "the server's rate on statistics":
            served |= {k: 1.0 for k in served if k in STATISTICS}
        return {k: shared[k] + served[k] * (mean[k] - shared[k]) for k in shared}

    return run_rounds(world, hp, shared, own, work, serve)


def by_letter(tree):
    """Parameters by their letters; without those that are in another part."""
    dense, norm, statistics = (tree["Dense_0"], tree["BatchNorm_0"], tree["batch_stats"]["BatchNorm_0"])
    letters = {"w": dense.get("kernel"), "s": norm.get("scale"), "t": norm.get("bias")}
    letters |= {"m": statistics.get("mean"), "v": statistics.get("var")}
    return {k: leaf for k, leaf in letters.items() if leaf is not None}


def lettered(state):
    if state.clients[0] == ():
        return by_letter(oracle.plain(state.server)), [{}] * M
    return by_letter(oracle.plain(state.server)), [by_letter(one) for one in oracle.plain_clients(state)]


def batch_models(last):
    models = {"after": [predict(last.server | one) for one in last.clients]}
    return models if last.clients[0] else models | {"mu": predict(last.server)}


@cache
def batch_norm_oracle(**options):
    unseen = {"unseen": oracle.classification_problem(*NEWCOMERS), "adapt_rounds": ADAPT}
    task = classification(Net(), (FEATURES,), CLASSES)
    return {"options": {"task": task, "engine": unseen} | options, "view": lettered, "seen": 1e-4, "plain": True}


ORACLES = {
    "fedbn": Oracle(
        "fedbn",
        SGD,
        fedbn,
        ("own part travels", "own part starts anew", "uniform mean"),
        {"task": layer_norm()},
        layer_models,
    ),
    "fedbn, batch": Oracle(
        "fedbn",
        SGD,
        batch_norm,
        ("padding counts", "statistics decay"),
        models=batch_models,
        quick=True,
        **batch_norm_oracle(),
    ),
    "fedavg, batch": Oracle(
        "fedavg",
        SGD | {"server_lr": 0.5},
        batch_norm,
        ("the server's rate on statistics",),
        models=batch_models,
        **batch_norm_oracle(),
    ),
    "fedprox, batch": Oracle("fedprox", SGD | {"prox": 0.3}, batch_norm, models=batch_models, **batch_norm_oracle()),
}
test_rounds = oracle.check_rounds(ORACLES)


@pytest.mark.slow
def test_all_start_from_the_models_own_normalisation():
    want = {"s": np.linspace(0.5, 1.5, HIDDEN), "t": np.linspace(-1.0, 1.0, HIDDEN)}
    server, own = ORACLES["fedbn"].view(ORACLES["fedbn"].got().states[0])
    assert set(server) == {"w1", "b1", "w2", "b2"}
    assert_same(own, [want] * M, rtol=0)


LAST_RATE = SGD["lr"] * decay(SGD, ROUNDS - 1, STEPS)


def assert_newcomers(run, before, after):
    found, tests = (
        oracle.on_host(run.simulation.evaluate_unseen(run.state)),
        oracle.clients(oracle.classification_problem(*NEWCOMERS).test),
    )
    assert_same(found["before"], oracle.scores([predict(model) for model in before], tests))
    want = oracle.scores([predict(model) for model in after], tests)
    assert_same({k: found["after"][k] for k in want}, want)


@pytest.mark.slow
def test_new_clients_of_fedbn_arrive_with_initial_statistics_and_make_their_own():
    one = ORACLES["fedbn, batch"]
    shared, problem = one.want()[-1].server, oracle.classification_problem(*NEWCOMERS)
    start = {"s": np.ones(CLASSES), "t": np.zeros(CLASSES), "m": np.zeros(CLASSES), "v": np.ones(CLASSES)}
    models = []
    for i in range(3):
        own = start
        for nth in range(ADAPT):  # the message is the same in every round
            params = shared | own
            for batch in oracle.draws(problem, i, Purpose.BATCHES, SETTINGS["uniform"].batch_size, STEPS, nth):
                params, _ = batch_step(params, batch, LAST_RATE, SGD["weight_decay"])
            own = {k: params[k] for k in own}
        models.append(shared | own)
    assert_newcomers(one.got(), [shared | start] * 3, models)


@pytest.mark.slow
def test_fine_tuning_moves_the_statistics_to_the_clients_own():
    one = Oracle("fedavg-ft", SGD, batch_norm, **batch_norm_oracle(fine_tune_steps=TUNE))
    run, models = one.got(), []
    mu, _ = lettered(run.states[-1])
    for i in range(3):
        params = mu
        for batch in oracle.tuning_batches(
            i, SETTINGS["uniform"].batch_size, TUNE, oracle.classification_problem(*NEWCOMERS)
        ):
            params, _ = batch_step(params, batch, LAST_RATE, SGD["weight_decay"])
        models.append(params)
    assert_newcomers(run, [mu] * 3, models)
