"""Local steps against NumPy: optimizers and their memory, clipping, rate schedules, smoothed labels."""

import dataclasses
import json

import numpy as np
import numpy_reference
import optax
import oracle
import pytest
from numpy_reference import (
    backward,
    combine,
    cross_entropy,
    forward,
    log_softmax,
    run_adaped,
    run_fedavg,
    sgd,
    step,
    subtract,
)
from oracle import CLASSES, SIZES, M, Oracle, assert_same, classification_problem, clients, global_alone

import jaxpfl
from jaxpfl import METHODS, ExecutionPlan
from jaxpfl.algorithms.parts import schedules
from jaxpfl.runs.config import RunConfig, default_folder, differences, resolve, to_json

# --- optimizers -----------------------------------------------------------------------------------


class Adam:
    """``m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, w -= rate (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)``."""

    def __init__(self, b1=0.9, b2=0.999, eps=1e-8):
        self.b1, self.b2, self.eps, self.t, self.m, self.v = b1, b2, eps, 0, {}, {}

    def __call__(self, w, g, rate):
        self.t += 1
        self.m = {k: self.b1 * self.m.get(k, 0) + (1 - self.b1) * g[k] for k in g}
        self.v = {k: self.b2 * self.v.get(k, 0) + (1 - self.b2) * g[k] ** 2 for k in g}
        scale = {k: np.sqrt(self.v[k] / (1 - self.b2**self.t)) + self.eps for k in g}
        return {k: w[k] - rate * self.m[k] / (1 - self.b1**self.t) / scale[k] for k in g}


class Momentum:
    """``v = beta v + g, w -= rate v``."""

    def __init__(self, beta=0.9):
        self.beta, self.v = beta, {}

    def __call__(self, w, g, rate):
        self.v = {k: self.beta * self.v.get(k, 0) + g[k] for k in g}
        return {k: w[k] - rate * self.v[k] for k in g}


OPTIMIZERS = {
    "adam": Adam,
    "adam:b1=0.6,eps=1e-3": lambda: Adam(b1=0.6, eps=1e-3),
    "sgd:momentum=0.8": lambda: Momentum(0.8),
    "momentum": Momentum,
}


def with_optimizer(method, optimizer, formula, hp, models, **given):
    """The method's formula with its step by an optimizer, on the gradient with weight decay (and FedProx's term).

    It starts anew in every turn of a client; AdaPeD's theta and mu have one each, told apart by their rates.
    """

    def patched(world, hp, server, own, defect=""):
        memories = {}

        def step(params, gradient, rate, weight_decay):
            return memories.setdefault(rate, OPTIMIZERS[optimizer]())(
                params, combine(gradient, params, weight_decay), rate
            )

        def batches(*turn):
            if defect != "memory kept":
                memories.clear()
            return world.batches(*turn)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(numpy_reference, "step", step)
            return formula(world._replace(batches=batches), hp, server, own)

    base = {"lr": 0.05, "lr_decay": 0.7, "decay_every": 3.0, "weight_decay": 0.02}
    options, kinds = {"choices": {"optimizer": optimizer}}, ("reliable",)
    return Oracle(
        method, base | hp, patched, options=options, models=models, rounds=2, kinds=kinds, plain=True, **given
    )


SCALES = {"lr_global": 0.04, "lr_psi": 0.1, "psi_init": 0.6, "psi_floor": 0.5, "c": 5.0}
ORACLES = {
    "fedavg, momentum": with_optimizer("fedavg", "momentum", run_fedavg, {}, global_alone, defects=("memory kept",)),
    "fedprox": with_optimizer("fedprox", "adam:b1=0.6,eps=1e-3", run_fedavg, {"prox": 0.8}, global_alone),
    "adaped": with_optimizer(
        "adaped",
        "adam:b1=0.6,eps=1e-3",
        run_adaped,
        SCALES,
        lambda last: {"after": last.clients, "mu": last.server["mu"]},
    ),
}
test_rounds = oracle.check_rounds(ORACLES)


# --- steps of Ditto -------------------------------------------------------------------------------

STEPS, RATE, PERSONAL, PULL, WEIGHT_DECAY = 2, 0.4, 0.3, 0.7, 0.02
DITTO = {"lr": RATE, "lr_personal": PERSONAL, "lam": PULL, "lr_decay": 1.0, "weight_decay": WEIGHT_DECAY}


def trained(params, batch, rate, optimizer=None, anchor=None, clip=None, defect="", norms=None):
    """Parameters after the steps on one batch; ``norms`` collects those of the gradients."""
    optimizer, (x, y) = optimizer or Momentum(0.0), batch
    for _ in range(STEPS):
        gradient = backward(params, x, cross_entropy(forward(params, x), y)[1])
        if anchor is not None:
            gradient = combine(gradient, subtract(params, anchor), PULL)
        if defect == "clipped with weight decay":
            gradient = combine(gradient, params, WEIGHT_DECAY)
        if clip is not None:
            norm = np.sqrt(sum(np.sum(g**2) for g in gradient.values()))
            norms.append(norm)
            by_array = {k: np.sqrt(np.sum(g**2)) for k, g in gradient.items()}
            by = by_array if defect == "clipped by array" else dict.fromkeys(params, norm)
            gradient = {k: g * min(1, clip / by[k]) for k, g in gradient.items()}
        if defect != "clipped with weight decay":
            gradient = combine(gradient, params, WEIGHT_DECAY)
        params = optimizer(params, gradient, rate)
    return params


def ditto_round(mu, own, factor=1.0, cohort=range(M), memories=None, **given):
    """Both of Ditto's descents, and the mean by n_i: the new mu; ``own`` changes in place."""
    ends = []
    for i in cohort:
        by_w, by_v = memories[i] if memories else (None, None)
        batch = oracle.train_data()[i]
        ends.append(trained(mu, batch, RATE * factor, by_w, **given))
        own[i] = trained(own[i], batch, PERSONAL * factor, by_v, mu, **given)
    return {k: np.average([w[k] for w in ends], axis=0, weights=[SIZES[i] for i in cohort]) for k in mu}


def stacked(own):
    return {k: np.stack([v[k] for v in own]) for k in own[0]}


def fitted(method="ditto", problem=None, **more):
    given = {"model": oracle.perceptron().model, "rounds": 4, "local_steps": STEPS, "batch_size": 100}
    given |= {"hyper": DITTO if method == "ditto" else {"lr": RATE, "weight_decay": WEIGHT_DECAY}}
    return jaxpfl.fit(method, problem or classification_problem(), **given | more)


def start_of(fit):
    mu = oracle.on_host(fit.simulation.init([0])).server
    return mu, [mu] * M


@pytest.mark.slow
def test_each_of_dittos_descents_keeps_its_optimizer_across_rounds():
    """Clients are out of the cohort for some rounds, and w starts from a new mu in each."""
    optimizer = "adam:b1=0.6,eps=1e-3"
    fit = fitted(rounds=1, cohort=2, client_optimizer=optimizer, keep_optimizer=True)
    (mu, own), simulation = start_of(fit), fit.simulation
    memories, seen = [(OPTIMIZERS[optimizer](), OPTIMIZERS[optimizer]()) for _ in SIZES], np.zeros(M, int)
    state = simulation.init([0])
    for _ in range(5):
        state, _ = simulation.advance(state, 1)
        now = np.asarray(simulation.counts(state).participations)[0]
        cohort, seen = np.flatnonzero(now > seen), now
        mu = ditto_round(mu, own, cohort=cohort, memories=memories)
    assert seen.max() > 2 > seen.min()
    end = oracle.on_host(simulation.trim(state))
    assert_same(end.server, mu)
    assert_same(end.clients[0].own, stacked(own))
    assert end.clients[0].rounds.tolist() == seen.tolist()


@pytest.mark.slow
def test_an_optimizer_without_zeros_begins_as_itself():
    """AdaGrad's accumulator starts at 0.1, so a first round is that of a new optimizer; the second is not."""
    given = {"rounds": 2, "client_optimizer": "adagrad"}
    kept, new = (fitted("fedavg", keep_optimizer=on, **given) for on in (True, False))
    assert kept.history["train_loss"][0, 0] == new.history["train_loss"][0, 0]
    assert not np.allclose(kept.scores["global"]["loss"][-1], new.scores["global"]["loss"][-1])


@pytest.mark.slow
def test_any_plan_gives_the_same_numbers_with_kept_optimizers():
    def loss(**plan):
        given = {"client_optimizer": "adam", "keep_optimizer": True, "cohort": 2, "batch_size": 4, "seeds": 2}
        plan = ExecutionPlan(**plan)
        return fitted("adaped", model="mlp:5", plan=plan, **given).history["train_loss"]

    np.testing.assert_allclose(loss(clients="vmap"), loss(clients="map"), rtol=1e-4)


@pytest.mark.slow
def test_new_clients_keep_their_optimizers_in_their_rounds():
    others = classification_problem()
    given = {"client_optimizer": "adam", "unseen": others._replace(client_ids=others.client_ids + 100)}
    kept, new = (fitted(adapt_rounds=2, keep_optimizer=on, rounds=2, **given).unseen for on in (True, False))
    assert not np.allclose(kept["after"]["loss"], new["after"]["loss"])


@pytest.mark.slow
def test_each_of_dittos_models_is_clipped_alone():
    """``g min(1, c / |g|)``, before weight decay and momentum.

    g is the gradient with its proximal term, and |g| the norm over all of its arrays.
    """
    clip = 0.6
    fit = fitted(rounds=2, client_optimizer="sgd:momentum=0.8", clip_gradients=clip)
    ends, norms = {}, []
    for defect in ("", "clipped with weight decay", "clipped by array"):
        mu, own = start_of(fit)
        for _ in range(2):
            memories = [(Momentum(0.8), Momentum(0.8)) for _ in SIZES]
            mu = ditto_round(mu, own, memories=memories, clip=clip, defect=defect, norms=norms)
        ends[defect] = mu, own
    assert 0.2 < (np.array(norms) > clip).mean() < 0.8  # some are clipped, some are not
    state, (mu, own) = oracle.on_host(fit.simulation.trim(fit.state)), ends.pop("")
    assert_same(state.server, mu)
    assert_same(state.clients[0], stacked(own))
    for wrong, _ in ends.values():
        assert max(np.abs(wrong[k] - mu[k]).max() for k in mu) > 1e-4


# --- rate schedules -------------------------------------------------------------------------------


def share(r, warmup=0, rounds=4):
    return min(max(r - warmup, 0) / (rounds - warmup), 1)


FACTORS = {
    "constant": lambda r: 1.0,
    "constant:warmup=2": lambda r: (1 / 3, 2 / 3, 1.0, 1.0)[r],
    "cosine": lambda r: (1 + np.cos(np.pi * share(r))) / 2,
    "cosine:end=0.1,warmup=1": lambda r: 0.5 if r == 0 else 0.1 + 0.45 * (1 + np.cos(np.pi * share(r, 1))),
    "linear:end=0.2": lambda r: 1 - 0.8 * share(r),
    "step:every=2,factor=0.5": lambda r: (1.0, 1.0, 0.5, 0.5)[r],
    "exponential:factor=0.7": lambda r: 0.7**r,
}


def test_the_factors_of_schedules():
    """The rate of round r is ``lr f(r)``."""
    for text, factor in FACTORS.items():
        at = schedules.parse(text, 4).value
        np.testing.assert_allclose([at(np.float64(r)) for r in range(4)], [factor(r) for r in range(4)], rtol=1e-12)
    assert schedules.parse("cosine:end=0.1", 4).value(np.float64(9)) == pytest.approx(0.1)  # behind the last round


@pytest.mark.slow
def test_both_of_dittos_rates_follow_the_schedule():
    """And a newcomer's rounds take the rates themselves."""
    others = classification_problem()
    unseen = {"unseen": others._replace(client_ids=others.client_ids + 100), "adapt_rounds": 1}
    hyper = {k: v for k, v in DITTO.items() if k != "lr_decay"}
    fit = fitted(lr_schedule="cosine", hyper=hyper, **unseen)
    mu, own = start_of(fit)
    for r in range(4):
        mu = ditto_round(mu, own, FACTORS["cosine"](r))
    state = oracle.on_host(fit.simulation.trim(fit.state))
    assert_same(state.server, mu)
    assert_same(state.clients[0], stacked(own))
    adapted = [trained(mu, one, PERSONAL, anchor=mu) for one in oracle.train_data()]
    np.testing.assert_allclose(fit.unseen["after"]["loss"][0], oracle.scores(adapted)["loss"], rtol=1e-9)


@pytest.mark.slow
def test_fine_tuning_takes_the_rate_itself():
    fit = fitted("fedavg-ft", lr_schedule="cosine", options={"fine_tune_steps": STEPS})
    mu = oracle.on_host(fit.simulation.trim(fit.state)).server
    tuned = [sgd(mu, [one] * STEPS, RATE, WEIGHT_DECAY)[0] for one in oracle.train_data()]
    np.testing.assert_allclose(fit.scores["after"]["loss"][-1, 0], oracle.scores(tuned)["loss"], rtol=1e-9)


@pytest.mark.slow
def test_a_function_of_the_round_is_the_schedule_of_that_name():
    """To the bit, and behind the rounds of the run its last factor holds."""
    by_name, by_function = (
        fitted("fedavg", lr_schedule=schedule).history["train_loss"]
        for schedule in ("exponential:factor=0.5", lambda r: 0.5**r)
    )
    np.testing.assert_array_equal(by_function, by_name)
    function = optax.warmup_cosine_decay_schedule(0.0, 1.0, 2, 10, 0.1)
    at = schedules.resolve(function, 8).value
    np.testing.assert_allclose([at(r) for r in range(12)], [function(min(r, 7)) for r in range(12)], rtol=1e-6)


def test_the_rates_that_decay_are_declared():
    """The server's rate, psi's, and those of an adaptation step or of a mixture's weights do not."""
    fields = [field for method in METHODS.values() for field in dataclasses.fields(method.hyper)]
    found = {field.name for field in fields if field.metadata["decays"]}
    assert found >= {"lr", "lr_personal", "lr_alpha", "lr_global", "lr_location"}
    assert not found & {"server_lr", "lr_psi", "lr_scale", "alpha", "lr_weights", "weight_decay"}


def test_a_resumed_run_keeps_its_schedule_and_its_labels():
    """And grows by rounds only where the schedule does not depend on their number."""
    now = {name: to_json(resolve(RunConfig(lr_schedule=name))) for name in ("decay", "cosine", "exponential")}
    old = {name: value for name, value in now["decay"].items() if name not in ("lr_schedule", "label_smoothing")}
    assert differences(old, now["decay"]) == ([], [])
    assert differences(old, now["cosine"])[0] == ["lr_schedule: decay -> cosine"]
    more = {"rounds": now["decay"]["rounds"] + 1}
    assert not differences(now["exponential"], now["exponential"] | more)[0]
    assert (
        "lr_schedule = cosine depends on the number of rounds" in differences(now["cosine"], now["cosine"] | more)[0][0]
    )
    folders = {default_folder("run", resolve(RunConfig(lr_schedule=name)), ("fedavg",), False) for name in now}
    assert len(folders) == 3
    smoothed = json.loads(json.dumps(to_json(resolve(RunConfig(label_smoothing=0.1)))))
    assert differences(old, smoothed)[0] == ["label_smoothing: 0.0 -> 0.1"]


# --- smoothed labels ------------------------------------------------------------------------------


def smoothed_gradient(logits, y, s):
    """Mean of ``-sum target log softmax`` for ``(1 - s) one-hot + s / K``, and ``(softmax - target) / n``."""
    n, log_q = len(y), log_softmax(logits)
    target = (1 - s) * np.eye(CLASSES)[y] + s / CLASSES
    return -(target * log_q).sum() / n, (np.exp(log_q) - target) / n


@pytest.mark.slow
def test_smoothed_labels_are_of_training_and_not_of_scores():
    """One step of FedAvg on full batches is a step on the pooled loss."""
    s = 0.9
    fit = fitted("fedavg", rounds=1, local_steps=1, label_smoothing=s, hyper={"lr": RATE, "weight_decay": 0.0})
    (mu, _), ends, losses, problem = start_of(fit), [], [], classification_problem()
    for x, y in oracle.train_data():
        loss, d_logits = smoothed_gradient(forward(mu, x), y, s)
        ends.append(step(mu, backward(mu, x, d_logits), RATE, 0.0))
        losses.append(loss)
    want = {k: np.average([w[k] for w in ends], axis=0, weights=SIZES) for k in mu}
    assert_same(oracle.on_host(fit.state).server, want)
    np.testing.assert_allclose(fit.history["train_loss"][0, 0], np.mean(losses), rtol=1e-12)
    for found, data in ((fit.scores, oracle.scored_data()), (fit.validation, clients(problem.validation))):
        np.testing.assert_allclose(found["global"]["loss"][-1, 0], oracle.scores([want] * M, data)["loss"], rtol=1e-12)


@pytest.mark.slow
def test_a_teacher_is_chosen_by_the_loss_that_is_scored():
    """PersFL keeps the model of the least validation loss, which smoothing does not touch."""
    options = {"distill_steps": 1, "imitations": (0.5,), "temperatures": (2.0,)}
    fit = fitted("persfl", rounds=1, label_smoothing=0.5, options=options)
    mu, _ = start_of(fit)
    want = oracle.scores([mu] * M, clients(classification_problem().validation))["loss"]
    np.testing.assert_allclose(oracle.on_host(fit.state).clients[0].loss, want, rtol=1e-12)
