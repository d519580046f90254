"""DP-SGD in every silo by hand: Poisson batches, clipped gradients of single examples, noise of the named stream."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_reference import Params, backward, cross_entropy, forward, step
from oracle_setup import SIZES, STEPS, Run, classification_problem, client_row, clients, perceptron, run

from jaxpfl import METHODS, ExecutionPlan, LocalWork, Simulation
from jaxpfl.core.participation import full
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.privacy.guarded import guard_examples
from jaxpfl.privacy.noise import gaussian
from jaxpfl.privacy.silos import WORD, SiloMechanism, mechanism_of

pytestmark = pytest.mark.usefixtures("float64")

HP = {"lr": 0.4, "weight_decay": 0.02, "lam": 0.3}
B, C, Z, ROUNDS = 5, 0.3, 0.8, 2
LATTICE = 2.0**-23
"""A release is rounded to a lattice of its noise, finer than this share of a deviation in float64."""


def silos(batches: int) -> SiloMechanism:
    return mechanism_of(
        np.array(SIZES),
        batch_size=B,
        per_round=lambda n: batches,
        once=lambda n: 0,
        releases=1,
        rounds=ROUNDS,
        clipping_norm=C,
        noise_multiplier=Z,
    )


def made(method: str, mechanism: SiloMechanism, hp: dict[str, float]) -> Run:
    federation, entry = classification_problem(), METHODS[method]
    algorithm = entry.build(perceptron(), LocalWork(np.array(SIZES), STEPS, B))
    algorithm, hyper = guard_examples(algorithm, method, mechanism), entry.hyper.replace(**hp)
    plan = ExecutionPlan(rounds_per_call=1)
    return run(Simulation(algorithm, perceptron(), federation, full(len(SIZES)), hyper, plan=plan), ROUNDS)


@jax.jit
def drawn_from(key: jax.Array, like: Params) -> tuple[jax.Array, Any]:
    """Random bits of a batch's draw, and the noise on its gradient."""
    bits = jax.random.bits(stream(key, Purpose.BATCHES), (max(SIZES),), jnp.uint32)
    return bits, gaussian(stream(key, Purpose.RELEASE_NOISE, 1), like, Z * C)


def private_step(
    w: Params, of_client: int, key: jax.Array, descent: int, t: int, pull: Any, mechanism: SiloMechanism
) -> Params:
    """One step of DP-SGD in NumPy; noise and batch are those of the streams that the round names."""
    x, y = clients(classification_problem().train)[of_client]
    silo = next(silo for silo in mechanism.silos if silo.examples == len(y))
    own = stream(key, Purpose.EXAMPLES, descent, t)
    bits, noise = drawn_from(own, w)
    scores = np.asarray(bits)[: len(y)].astype(np.int64) // 2
    drawn = np.flatnonzero((scores < silo.threshold) | (len(y) <= B))
    drawn = drawn[np.argsort(scores[drawn])][: mechanism.slots]
    total = {name: np.zeros_like(value) for name, value in w.items()}
    for i in drawn:
        gradient = backward(w, x[[i]], cross_entropy(forward(w, x[[i]]), y[[i]])[1])
        norm = np.sqrt(sum(np.sum(g**2) for g in gradient.values()))
        total = {name: total[name] + g / max(norm / C, 1) for name, g in gradient.items()}
    mean = {name: (g + np.asarray(noise[name])) / (silo.threshold / WORD * len(y)) for name, g in total.items()}
    if pull is not None:
        mean = {name: g + HP["lam"] * (w[name] - pull[name]) for name, g in mean.items()}
    return step(w, mean, HP["lr"], HP["weight_decay"])


def near(got: Any, want: Any) -> None:
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=STEPS * ROUNDS * HP["lr"] * Z * C * LATTICE)


@pytest.mark.slow
def test_mr_mtl():
    """Silos of one size (6) have sampled batches of 5 of 6 examples, the smallest whole ones."""
    mechanism = silos(STEPS)
    assert mechanism.silos[0].threshold == WORD > mechanism.silos[1].threshold
    got = made("mr-mtl", mechanism, HP)
    released = jax.random.wrap_key_data(jnp.asarray(got.states[0].noise))
    mean, own = got.states[0].server, [client_row(got.states[0].clients[0], i) for i in range(len(SIZES))]
    for r in range(ROUNDS):
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
    mu, own = got.states[0].server, [client_row(got.states[0].clients[0], i) for i in range(len(SIZES))]
    for r in range(ROUNDS):
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
