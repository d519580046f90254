"""Noise in the clients, by hand: gradients clipped in every step, as DP-AdaPeD is printed; DP-SGD in every silo."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from numpy_reference import Batch, Params, backward, clip, cross_entropy, decay, distillation, forward, step, subtract
from oracle import ADAPED, SGD, SIZES, STEPS, M, Run, assert_same, classification_problem, client_row, perceptron, run

from jaxpfl import METHODS, ExecutionPlan, JaxpflError, LocalWork, Simulation, fit
from jaxpfl.core.participation import full
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.engine.build import releases_of
from jaxpfl.engine.spec import RunSpec
from jaxpfl.privacy import Mechanism
from jaxpfl.privacy.guarded import guard_examples
from jaxpfl.privacy.noise import gaussian
from jaxpfl.privacy.silos import WORD, SiloMechanism, mechanism_of

# --- clipped steps; the noise is zero -------------------------------------------------------------

SCALED = ADAPED | {"lr_psi": 0.4, "psi_init": 1.5, "psi_floor": 0.2, "c": 2.0}
ROUNDS, C1, C2 = 3, 0.28, 0.28


def mean(server: dict[str, Any], ends: list[dict[str, Any]]) -> dict[str, Any]:
    return {k: server[k] + sum(end[k] - server[k] for end in ends) / M for k in server}


def per_step(method: str, hp: dict[str, float], mechanism: Mechanism) -> Run:
    choices = {"privacy": mechanism, "weighting": "uniform"}
    return oracle.run_method(method, hp, rounds=ROUNDS, choices=choices, privacy=mechanism)


@pytest.mark.slow
def test_fedavg():
    """The gradient is clipped, weight decay is not: it is no function of the data."""
    got = per_step("fedavg", SGD, Mechanism(0.0, C1, "per_step"))
    mu, short = got.states[0].server.state, []
    for r in range(ROUNDS):
        ends = []
        for x, y in oracle.train_data():
            w = mu
            for _ in range(STEPS):
                gradient, norm = clip(backward(w, x, cross_entropy(forward(w, x), y)[1]), C1)
                w = step(w, gradient, SGD["lr"] * decay(SGD, r, STEPS), SGD["weight_decay"])
                short.append(norm > C1)
            ends.append(w)
        mu = mean(mu, ends)
        assert_same(got.states[r + 1].server.state, mu)
    assert any(short)


def adaped_step(
    theta: Params, mu: Params, psi: float, batch: Batch, factor: float, joint: bool
) -> tuple[Params, Params, float, bool]:
    hp, (x, y) = SCALED, batch
    d_student = cross_entropy(forward(theta, x), y)[1] + distillation(forward(mu, x), forward(theta, x))[2] / (2 * psi)
    theta = step(theta, backward(theta, x, d_student), hp["lr"] * factor, hp["weight_decay"])

    def scale_gradient(mu: Params) -> float:
        return 1 / (2 * psi) - hp["c"] * distillation(forward(mu, x), forward(theta, x))[0] / (2 * psi**2)

    h = backward(mu, x, distillation(forward(mu, x), forward(theta, x))[1] / (2 * psi))
    if joint:
        both, norm = clip(h | {"psi": scale_gradient(mu)}, C1)
        k, short = both.pop("psi"), norm > C1
        mu = step(mu, both, hp["lr_global"] * factor, hp["weight_decay"])
    else:
        h, of_mu = clip(h, C1)
        mu = step(mu, h, hp["lr_global"] * factor, hp["weight_decay"])
        k, of_psi = clip({"psi": scale_gradient(mu)}, C2)
        k, short = k["psi"], of_mu > C1 or of_psi > C2
    return theta, mu, max(psi - hp["lr_psi"] * k, hp["psi_floor"]), short


@pytest.mark.slow
@pytest.mark.parametrize("joint", [False, True], ids=["one after the other", "joint"])
def test_adaped(joint):
    mechanism = Mechanism(0.0, C1, "per_step", joint=joint, scale_clipping_norm=None if joint else C2)
    got = per_step("adaped", SCALED, mechanism)
    (mu, psi), short = got.states[0].server.state, []
    thetas = oracle.plain_clients(got.states[0])
    for r in range(ROUNDS):
        ends = []
        for i, batch in enumerate(oracle.train_data()):
            theta, own_mu, own_psi = thetas[i], mu, psi
            for _ in range(STEPS):
                theta, own_mu, own_psi, was = adaped_step(theta, own_mu, own_psi, batch, decay(SCALED, r, STEPS), joint)
                short.append(was)
            thetas[i] = theta
            ends.append(own_mu | {"psi": own_psi})
        mu = mean(mu | {"psi": psi}, ends)
        psi = mu.pop("psi")
        assert_same(got.states[r + 1].server.state.mu, mu)
        np.testing.assert_allclose(got.states[r + 1].server.state.psi, psi, rtol=1e-9)
        assert_same(oracle.plain_clients(got.states[r + 1]), thetas)
    assert any(short)
    assert joint or not all(short)
    assert any(np.abs(v).max() > 1e-6 for v in subtract(mu, got.states[0].server.state.mu).values())


def test_a_method_of_ones_own_that_takes_other_steps_than_are_accounted_is_refused():
    fedavg = METHODS["fedavg"]
    twice = fedavg._replace(build=lambda task, work: fedavg.build(task, replace(work, steps=2 * work.steps)))
    with pytest.raises(JaxpflError, match=r"fedavg: Algorithm\.local_steps is 8, .*local_steps = 4"):
        fit(twice, classification_problem(), rounds=1, local_steps=4, privacy=Mechanism(1.0, 1.0, "per_step"))


def test_only_our_own_methods_are_accounted_by_the_noise_of_all_clients():
    fedavg = METHODS["fedavg"]
    for method, linear in ((fedavg, True), (fedavg._replace(build=lambda task, work: fedavg.build(task, work)), False)):
        assert releases_of(RunSpec(method=method), fedavg.hyper, STEPS)["linear"] is linear


# --- DP-SGD in every silo: Poisson batches, clipped gradients of individual examples, noise of the named stream ---

HP = {"lr": 0.4, "weight_decay": 0.02, "lam": 0.3}
B, C, Z, TWICE = 5, 0.3, 0.8, 2
LATTICE = 2.0**-23
"""A release is rounded to a lattice of its noise, finer than this share of a deviation in float64."""


def silos(batches: int) -> SiloMechanism:
    return mechanism_of(
        np.array(SIZES),
        batch_size=B,
        per_round=lambda n: batches,
        once=lambda n: 0,
        releases=1,
        rounds=TWICE,
        clipping_norm=C,
        noise_multiplier=Z,
    )


def made(method: str, mechanism: SiloMechanism, hp: dict[str, float]) -> Run:
    federation, entry = classification_problem(), METHODS[method]
    algorithm = entry.build(perceptron(), LocalWork(np.array(SIZES), STEPS, B))
    algorithm, hyper = guard_examples(algorithm, method, mechanism), entry.hyper.replace(**hp)
    plan = ExecutionPlan(rounds_per_call=1)
    return run(Simulation(algorithm, perceptron(), federation, full(M), hyper, plan=plan), TWICE)


@jax.jit
def drawn_from(key: jax.Array, like: Params) -> tuple[jax.Array, Any]:
    """Random bits of a batch's draw, and the noise on its gradient."""
    bits = jax.random.bits(stream(key, Purpose.BATCHES), (max(SIZES),), jnp.uint32)
    return bits, gaussian(stream(key, Purpose.RELEASE_NOISE, 1), like, Z * C, "a test")


def private_step(
    w: Params, of_client: int, key: jax.Array, descent: int, t: int, pull: Any, mechanism: SiloMechanism
) -> Params:
    """One step of DP-SGD in NumPy; noise and batch are those of the streams that the round names."""
    x, y = oracle.train_data()[of_client]
    silo = next(silo for silo in mechanism.silos if silo.examples == len(y))
    own = stream(key, Purpose.EXAMPLES, descent, t)
    bits, noise = drawn_from(own, w)
    scores = np.asarray(bits)[: len(y)].astype(np.int64) // 2
    drawn = np.flatnonzero((scores < silo.threshold) | (len(y) <= B))
    drawn = drawn[np.argsort(scores[drawn])][: mechanism.slots]
    total = {name: np.zeros_like(value) for name, value in w.items()}
    for i in drawn:
        gradient, _ = clip(backward(w, x[[i]], cross_entropy(forward(w, x[[i]]), y[[i]])[1]), C)
        total = {name: total[name] + g for name, g in gradient.items()}
    mean = {name: (g + np.asarray(noise[name])) / (silo.threshold / WORD * len(y)) for name, g in total.items()}
    if pull is not None:
        mean = {name: g + HP["lam"] * (w[name] - pull[name]) for name, g in mean.items()}
    return step(w, mean, HP["lr"], HP["weight_decay"])


def near(got: Any, want: Any) -> None:
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=STEPS * TWICE * HP["lr"] * Z * C * LATTICE)


@pytest.mark.slow
def test_mr_mtl():
    """Silos of one size (6) have sampled batches of 5 of 6 examples, the smallest whole ones."""
    mechanism = silos(STEPS)
    assert mechanism.silos[0].threshold == WORD > mechanism.silos[1].threshold
    got = made("mr-mtl", mechanism, HP)
    released = jax.random.wrap_key_data(jnp.asarray(got.states[0].noise))
    mean, own = got.states[0].server, oracle.plain_clients(got.states[0])
    for r in range(TWICE):
        for i, client_id in enumerate(classification_problem().client_ids):
            key = stream(released, Purpose.LOCAL_WORK, r, int(client_id))
            for t in range(STEPS):
                own[i] = private_step(own[i], i, key, 0, t, mean, mechanism)
            near(client_row(got.states[r + 1].clients[0], i), own[i])
        mean = {name: np.mean([w[name] for w in own], axis=0) for name in mean}
        near(got.states[r + 1].server, mean)


@pytest.mark.slow
def test_ditto_draws_batches_and_noise_anew_for_the_personal_model():
    mechanism = silos(2 * STEPS)
    got = made("ditto", mechanism, HP | {"lr_personal": HP["lr"]})
    released = jax.random.wrap_key_data(jnp.asarray(got.states[0].noise))
    mu, own = got.states[0].server, oracle.plain_clients(got.states[0])
    for r in range(TWICE):
        ends = []
        for i, client_id in enumerate(classification_problem().client_ids):
            key, w = stream(released, Purpose.LOCAL_WORK, r, int(client_id)), mu
            for t in range(STEPS):
                w = private_step(w, i, key, 0, t, None, mechanism)
                own[i] = private_step(own[i], i, key, 1, t, mu, mechanism)
            ends.append(w)
            near(client_row(got.states[r + 1].clients[0], i), own[i])
        weights = np.array(SIZES) / sum(SIZES)
        mu = {name: sum(s * w[name] for s, w in zip(weights, ends, strict=True)) for name in mu}
        near(got.states[r + 1].server, mu)
