"""Rate schedules against NumPy: the rate of round r is ``lr f(r)``, and what comes after training takes ``lr``."""

import dataclasses

import numpy as np
import optax
import pytest
from numpy_reference import backward, cross_entropy, forward, step
from oracle_setup import SIZES, assert_same, classification_problem, clients, on_host, perceptron

import jaxpfl
from jaxpfl import METHODS, JaxpflError, JaxpflWarning
from jaxpfl.algorithms.parts import schedules
from jaxpfl.runs.config import RunConfig, default_folder, differences, resolve, to_json

ROUNDS, STEPS = 4, 2
RATE, PERSONAL, PULL, WEIGHT_DECAY = 0.4, 0.3, 0.7, 0.02


def share(r, warmup=0, rounds=ROUNDS):
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


@pytest.fixture(scope="module")
def problem():
    return classification_problem()


def trained(start, x, y, rate, anchor=None, pull=0.0):
    for _ in range(STEPS):
        gradient = backward(start, x, cross_entropy(forward(start, x), y)[1])
        if anchor is not None:
            gradient = {k: gradient[k] + pull * (start[k] - anchor[k]) for k in start}
        start = step(start, gradient, rate, WEIGHT_DECAY)
    return start


def fitted(method, problem, schedule, **more):
    work = {"local_steps": STEPS, "batch_size": 100, "rounds": ROUNDS, "lr_schedule": schedule}
    return jaxpfl.fit(method, problem, model=perceptron().model, **work | more)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        name if name in ("cosine", "step:every=2,factor=0.5") else pytest.param(name, marks=pytest.mark.slow)
        for name in FACTORS
    ],
)
@pytest.mark.usefixtures("float64")
def test_both_of_dittos_rates_follow(problem, schedule):
    """And a newcomer's rounds take the rates themselves."""
    hyper = {"lr": RATE, "lr_personal": PERSONAL, "lam": PULL, "weight_decay": WEIGHT_DECAY}
    others = problem._replace(client_ids=problem.client_ids + 100)
    more = {"unseen": others, "adapt_rounds": 1} if schedule == "cosine" else {}
    fit = fitted("ditto", problem, schedule, hyper=hyper, **more)
    mu = on_host(fit.simulation.init([0])).server
    own = [mu] * len(SIZES)
    for r in range(ROUNDS):
        factor, data = FACTORS[schedule](r), clients(problem.train)
        own = [trained(v, *one, PERSONAL * factor, mu, PULL) for v, one in zip(own, data, strict=True)]
        new = [trained(mu, *one, RATE * factor) for one in data]
        mu = {k: np.average([w[k] for w in new], axis=0, weights=SIZES) for k in mu}
    state = on_host(fit.simulation.trim(fit.state))
    assert_same(state.server, mu)
    assert_same(state.clients[0], {k: np.stack([v[k] for v in own]) for k in mu})
    if fit.unseen is not None:
        adapted = [trained(mu, *one, PERSONAL, mu, PULL) for one in clients(problem.train)]
        want = [cross_entropy(forward(v, x), y)[0] for v, (x, y) in zip(adapted, clients(problem.test), strict=True)]
        np.testing.assert_allclose(fit.unseen["after"]["loss"][0], want, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_fine_tuning_takes_the_rate_itself(problem):
    options = {"fine_tune_steps": STEPS}
    hyper = {"lr": RATE, "weight_decay": WEIGHT_DECAY}
    fit = fitted("fedavg-ft", problem, "cosine", hyper=hyper, options=options)
    mu = on_host(fit.simulation.trim(fit.state)).server
    tuned = [trained(mu, *one, RATE) for one in clients(problem.train)]
    want = [cross_entropy(forward(w, x), y)[0] for w, (x, y) in zip(tuned, clients(problem.test), strict=True)]
    np.testing.assert_allclose(fit.scores["after"]["loss"][-1, 0], want, rtol=1e-9)


@pytest.mark.parametrize(
    ("text", "optaxs"),
    [
        ("cosine:end=0.1", optax.cosine_decay_schedule(1.0, 50, 0.1)),
        ("linear:end=0.1", optax.linear_schedule(1.0, 0.1, 50)),
        ("step:every=7,factor=0.3", optax.exponential_decay(1.0, 7, 0.3, staircase=True)),
        ("exponential:factor=0.9", optax.exponential_decay(1.0, 1, 0.9)),
    ],
)
def test_without_a_warm_up_they_are_optaxs(text, optaxs):
    schedule = schedules.parse(text, 50)
    assert schedule is not None
    rounds = np.arange(60)
    np.testing.assert_allclose(schedule.at(rounds), [optaxs(r) for r in rounds], rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("float64")
def test_a_function_of_the_round_is_the_schedule_of_that_name(problem):
    """To the bit, and behind the rounds of the run its last factor holds."""
    by_name = fitted("fedavg", problem, "exponential:factor=0.5")
    by_function = fitted("fedavg", problem, lambda r: 0.5**r)
    np.testing.assert_array_equal(by_function.history["train_loss"], by_name.history["train_loss"])
    schedule = schedules.of(optax.warmup_cosine_decay_schedule(0.0, 1.0, 2, 10, 0.1), 8)
    assert schedule is not None
    want = [optax.warmup_cosine_decay_schedule(0.0, 1.0, 2, 10, 0.1)(min(r, 7)) for r in range(12)]
    np.testing.assert_allclose([schedule.at(r) for r in range(12)], want, rtol=1e-6)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (optax.cosine_decay_schedule(0.1, 4), "the largest factor of 4 rounds is 0.1, and must be 1"),
        (optax.linear_schedule(0.0, 1.0, 50), "the largest factor of 4 rounds is 0.06, and must be 1"),
        (lambda r: 1.0 - r, r"factors >= 0 and <= 1, got -1 in round 2"),
        (lambda r: r / 0.0, r"factors >= 0 and <= 1, got nan in round 0"),
        (lambda r: [r, r], "must return one number for a round, got"),
        (lambda r: 1.0 + 0j * r, "must return real factors, got complex64"),
        (lambda r: 1.0 if r < 2 else 0.5, "JAX cannot trace the function of the round: Attempted boolean conversion"),
    ],
)
def test_what_is_no_factor_is_refused(function, message):
    with pytest.raises(JaxpflError, match=message) as error:
        schedules.of(function, ROUNDS)
    assert "\n" not in str(error.value)


def test_a_stored_run_takes_no_function():
    with pytest.raises(JaxpflError, match=r"lr_schedule of a stored run is text, got .*jaxpfl.fit takes it"):
        resolve(RunConfig(lr_schedule=optax.constant_schedule(1.0)))


def test_the_rates_that_decay_are_declared():
    """The server's rate, psi's, and those of an adaptation step or of a mixture's weights do not."""
    found = {
        field.name
        for method in METHODS.values()
        for field in dataclasses.fields(method.hyper)
        if field.metadata["decays"]
    }
    assert found >= {"lr", "lr_personal", "lr_alpha", "lr_global", "lr_location"}
    assert not found & {"server_lr", "lr_psi", "lr_scale", "alpha", "lr_weights", "weight_decay"}


@pytest.mark.slow
def test_streamed_and_resumed_runs_are_the_run(problem):
    def run(place):
        # To the bit on one device; the slow run has two.
        plan = jaxpfl.ExecutionPlan(clients_in=place, devices=1)
        return fitted("fedavg", problem, "cosine:warmup=1", cohort=3, plan=plan)

    whole, streamed, again = run("device"), run("host"), run("device").simulation
    np.testing.assert_array_equal(streamed.history["train_loss"], whole.history["train_loss"])
    half, _ = whole.simulation.advance(whole.simulation.init([0]), 2)
    _, history = again.advance(again.adopt(whole.simulation.trim(half)), 2)
    np.testing.assert_array_equal(history["train_loss"], whole.history["train_loss"][:, 2:])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cosin", "unknown lr_schedule 'cosin': did you mean 'cosine'"),
        ("cosine:ends=1", "unknown argument of lr_schedule cosine 'ends': did you mean 'end'"),
        ("cosine:end=2", "lr_schedule cosine:end must be a number >= 0 and <= 1, got '2'"),
        ("step", "lr_schedule step needs every"),
        ("step:every=0", "lr_schedule step:every must be a number >= 1, got '0'"),
        ("exponential:factor=nan", "exponential:factor must be a number"),
        ("constant:warmup=5", r"lr_schedule constant:warmup must be below the number of rounds \(4\), got 5"),
        ("decay:warmup=1", "unknown argument of lr_schedule decay 'warmup'"),
    ],
)
def test_what_is_no_schedule_is_refused(problem, text, message):
    with pytest.raises(JaxpflError, match=message):
        fitted("fedavg", problem, text)


@pytest.mark.slow
def test_a_decay_beside_a_schedule_changes_nothing(problem):
    with pytest.warns(JaxpflWarning, match="fedavg.lr_decay = 0.5 changes nothing: lr_schedule = constant"):
        fitted("fedavg", problem, "constant", hyper={"lr_decay": 0.5}, rounds=1)


def test_a_resumed_run_keeps_its_schedule():
    """And grows by rounds only where the schedule does not depend on their number."""
    now = {name: to_json(resolve(RunConfig(lr_schedule=name))) for name in ("decay", "cosine", "exponential")}
    old = {name: value for name, value in now["decay"].items() if name != "lr_schedule"}
    assert differences(old, now["decay"]) == ([], [])
    assert differences(old, now["cosine"])[0] == ["lr_schedule: decay -> cosine"]
    more = {"rounds": now["decay"]["rounds"] + 1}
    assert not differences(now["exponential"], now["exponential"] | more)[0]
    assert "lr_schedule = cosine is of the whole run" in differences(now["cosine"], now["cosine"] | more)[0][0]
    folders = {default_folder("run", resolve(RunConfig(lr_schedule=name)), ("fedavg",), False) for name in now}
    assert len(folders) == 3
