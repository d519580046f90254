"""Four rounds of every method by the engine in float64 against the NumPy reference: all that a round leaves.

Unequal clients, one smaller than a batch; the rate decays inside the run; weight decay is on.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_reference import Round, decay, run_adaped, run_fedavg, run_local, sgd
from oracle_methods import scores
from oracle_setup import (
    IDS,
    SEED,
    SIZES,
    STEPS,
    Run,
    assert_same,
    classification_problem,
    client_row,
    draws,
    on_host,
    participation,
    run,
    simulation,
    world,
)

from jaxpfl.core.protocol import ClientContext, Message
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.core.types import Splits

ROUNDS, TUNE = 4, 5
SGD = {"lr": 0.4, "lr_decay": 0.7, "decay_every": 4.0, "weight_decay": 0.02}
ADAPED = {"lr_global": 0.3, "lr_psi": 0.1, "psi_init": 0.6, "psi_floor": 0.5, "c": 5.0}
HYPER = {
    "local": SGD,
    "fedavg": SGD,
    "fedavg-ft": SGD,
    "fedprox": SGD | {"prox": 0.8},
    "adaped": SGD | ADAPED,
}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@cache
def engine(method: str, kind: str, batch_size: int) -> Run:
    options = {"fine_tune_steps": TUNE} if method == "fedavg-ft" else {}
    made = simulation(
        method,
        classification_problem(),
        HYPER[method],
        cohort=participation(kind),
        batch_size=batch_size,
        **options,
    )
    return run(made, ROUNDS)


def reference(method: str, kind: str, batch_size: int, start) -> list[Round]:
    given = world(classification_problem(), participation(kind), batch_size, ROUNDS)
    hp = HYPER[method]
    own = [client_row(start.clients[0], i) for i in range(len(SIZES))]
    if method == "local":
        return run_local(given, hp, own)
    if method == "adaped":
        return run_adaped(given, hp, start.server.mu, own)
    # FedAvg weights n_i, the others uniform.
    return run_fedavg(given, hp, start.server, prox=hp.get("prox", 0.0), uniform=method == "fedprox")


def personal_models(method: str, last: Round, batch_size: int) -> list:
    """local, AdaPeD: theta_i. FedAvg, FedProx: mu. FedAvg+: mu after SGD steps at the last round's rate."""
    if method in ("local", "adaped"):
        return last.clients
    if method != "fedavg-ft":
        return [last.server] * len(SIZES)
    hp = HYPER[method]
    rate = hp["lr"] * decay(hp, ROUNDS - 1, STEPS)
    problem = classification_problem()
    return [
        sgd(
            last.server,
            draws(problem, i, Purpose.PERSONALIZE_BATCHES, batch_size, TUNE, 0),
            rate,
            hp["weight_decay"],
        )[0]
        for i in range(len(SIZES))
    ]


@pytest.mark.parametrize(
    ("kind", "batch_size"),
    [pytest.param("full", 100, marks=pytest.mark.slow), ("uniform", 6)],
    ids=["everyone, full batches", "mini-batches"],
)
@pytest.mark.parametrize("method", HYPER)
def test_rounds(method, kind, batch_size):
    got = engine(method, kind, batch_size)
    want = reference(method, kind, batch_size, got.states[0])
    for state, expected in zip(got.states[1:], want, strict=True):
        if method == "adaped":
            assert_same(state.server._asdict(), expected.server)
        else:
            assert_same(state.server, expected.server)
        for i in range(len(SIZES)):
            assert_same(client_row(state.clients[0], i), expected.clients[i])
        np.testing.assert_array_equal(state.participations, expected.participations)
        np.testing.assert_array_equal(state.diverged, 0)

    metrics = {k: np.array([r.metrics[k] for r in want]) for k in want[0].metrics}
    counts = {"participants": len(SIZES) if kind == "full" else 3, "diverged": 0}
    assert got.history.keys() == metrics.keys() | counts.keys()
    assert_same({k: got.history[k] for k in metrics}, metrics)
    for name, count in counts.items():
        np.testing.assert_array_equal(got.history[name], count)

    last = want[-1]
    after = personal_models(method, last, batch_size)
    expected = {"before": scores([last.server] * len(SIZES) if method == "fedavg-ft" else after)}
    expected["after"] = scores(after)
    if method != "local":
        mu = last.server["mu"] if method == "adaped" else last.server
        expected["global"] = scores([mu] * len(SIZES))
    measured = on_host(got.simulation.evaluate(got.state))
    assert not measured["after"].pop("diverged").any()
    assert_same(measured, expected)


def test_fine_tuned_parameters():
    """FedAvg+: ``w_i = mu - sum_t eta_last (grad CE + wd w)`` over the client's own batches."""
    got = engine("fedavg-ft", "uniform", 6)
    want = personal_models("fedavg-ft", reference("fedavg-ft", "uniform", 6, got.states[0])[-1], 6)
    made = got.simulation

    @jax.jit
    def personalize(client_id: jax.Array, splits: Splits):
        key = stream(jax.random.key(SEED), Purpose.PERSONALIZE_BATCHES, client_id)
        ctx = ClientContext(jnp.int32(ROUNDS), client_id, jnp.int32(0), TUNE, key)
        return made.algorithm.clients[0].personalize(key, made.hp, ctx, Message(got.states[-1].server), (), splits)

    for i, expected in enumerate(want):
        assert_same(personalize(jnp.int32(IDS[i]), made.federations[0].splits.client(i)), expected)


def test_adaped_starts_from_one_shared_initialisation():
    """``theta_i^0 = mu^0`` for every client, and psi^0 as given."""
    first = engine("adaped", "uniform", 6).states[0]
    for i in range(len(SIZES)):
        assert_same(client_row(first.clients[0], i), first.server.mu, rtol=0)
    assert first.server.psi == ADAPED["psi_init"]
