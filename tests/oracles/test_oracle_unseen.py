"""Clients that were never trained: A rounds of the method's own local work with the message fixed. NumPy, float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy_reference import adaped_step, cross_entropy, decay, forward, sgd
from oracle_setup import (
    SEED,
    STEPS,
    assert_same,
    classification_problem,
    clients,
    draws,
    on_host,
    perceptron,
    run,
    simulation,
)

from jaxpfl import JaxpflError, Message, Simulation
from jaxpfl.algorithms.parts.servers import with_server_optimizer
from jaxpfl.core.participation import full
from jaxpfl.core.randomness import Purpose, stream

ROUNDS, ADAPT, TUNE, BATCH = 3, 4, 5, 6
SGD = {"lr": 0.4, "lr_decay": 0.7, "decay_every": 4.0, "weight_decay": 0.02}
ADAPED = {"lr_global": 0.3, "lr_psi": 0.1, "psi_init": 0.6, "psi_floor": 0.5, "c": 5.0}
NEWCOMERS = ((8, 13, 3), (100, 101, 55))


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def newcomers():
    return classification_problem(*NEWCOMERS)


def arrived(method: str, hp: dict, **options):
    made = simulation(
        method,
        classification_problem(),
        hp,
        batch_size=BATCH,
        engine={"unseen": newcomers(), "adapt_rounds": ADAPT},
        **options,
    )
    got = run(made, ROUNDS)
    scores = on_host(made.evaluate_unseen(got.state))
    assert not scores["after"].pop("diverged").any()
    in_rounds = scores["after"].pop("gradients") - options.get("fine_tune_steps", 0)
    assert (in_rounds % (ADAPT * STEPS) == 0).all()
    return got.states[-1], scores


def scores_of(models: list) -> dict[str, np.ndarray]:
    logits = [(forward(model, x), y) for model, (x, y) in zip(models, clients(newcomers().test), strict=True)]
    return {
        "accuracy": np.array([np.mean(a.argmax(1) == y) for a, y in logits]),
        "loss": np.array([cross_entropy(a, y)[0] for a, y in logits]),
    }


def batches(i: int, nth: int) -> list:
    return draws(newcomers(), i, Purpose.BATCHES, BATCH, STEPS, nth)


def last_rate() -> float:
    return SGD["lr"] * decay(SGD, ROUNDS - 1, STEPS)


def first_model(i: int):
    """Initial model of a client in ``local``."""
    key = stream(jax.random.key(SEED), Purpose.CLIENT_INIT, NEWCOMERS[1][i])
    return jax.tree.map(np.asarray, perceptron().init(key))


@pytest.mark.slow
def test_fedavg_has_nothing_to_adapt():
    last, scores = arrived("fedavg", SGD)
    want = scores_of([last.server] * 3)
    assert_same(scores, {"after": want, "before": want, "global": want})


@pytest.mark.slow
def test_fedavg_with_fine_tuning():
    last, scores = arrived("fedavg-ft", SGD, fine_tune_steps=TUNE)
    tuned = [
        sgd(last.server, draws(newcomers(), i, Purpose.PERSONALIZE_BATCHES, BATCH, TUNE, 0), last_rate(), 0.02)[0]
        for i in range(3)
    ]
    assert_same(scores["after"], scores_of(tuned))
    assert_same(scores["before"], scores_of([last.server] * 3))


@pytest.mark.slow
def test_local_trains_alone_from_its_start():
    _, scores = arrived("local", SGD)
    models = [first_model(i) for i in range(3)]
    assert_same(scores["before"], scores_of(models))
    for i in range(3):
        for nth in range(ADAPT):
            models[i], _ = sgd(models[i], batches(i, nth), last_rate(), 0.02)
    assert_same(scores["after"], scores_of(models))


@pytest.mark.slow
def test_adaped_with_the_message_fixed():
    """Each round starts from today's (mu, psi) again; theta goes on."""
    last, scores = arrived("adaped", SGD | ADAPED)
    models = [last.server.mu] * 3
    assert_same(scores["before"], scores_of(models))
    for i in range(3):
        for nth in range(ADAPT):
            theta, mu, psi = models[i], last.server.mu, float(last.server.psi)
            for batch in batches(i, nth):
                factor = decay(SGD, ROUNDS - 1, STEPS)
                theta, mu, psi, _, _ = adaped_step(theta, mu, psi, batch, SGD | ADAPED, factor)
            models[i] = theta
    assert_same(scores["after"], scores_of(models))


@pytest.mark.slow
def test_l2gd_takes_local_steps_whatever_the_servers_last_toss_was():
    hp = SGD | {"p": 0.5, "lam": 0.3}
    last, scores = arrived("l2gd", hp)
    models = [last.server] * 3
    for i in range(3):
        for nth in range(ADAPT):
            models[i], _ = sgd(models[i], batches(i, nth), last_rate() / (1 - hp["p"]), 0.02)
    assert_same(scores["after"], scores_of(models))


def test_no_round_of_adaptation_is_the_model_on_arrival():
    made = simulation("local", classification_problem(), SGD, engine={"unseen": newcomers(), "adapt_rounds": 0})
    scores = on_host(made.evaluate_unseen(made.init([SEED])))
    assert_same(scores["after"]["loss"], scores["before"]["loss"])


@pytest.mark.slow
def test_unseen_clients_leave_training_alone():
    """To the last bits: their sizes enter the work's static bounds in an experiment, their data nothing."""
    plain = run(simulation("adaped", classification_problem(), SGD | ADAPED, batch_size=BATCH), ROUNDS)
    last, _ = arrived("adaped", SGD | ADAPED)
    assert_same((last.server, last.clients), (plain.states[-1].server, plain.states[-1].clients), rtol=1e-12)


def test_a_trained_client_is_not_unseen():
    with pytest.raises(JaxpflError, match="client 7 cannot be unseen: it is trained"):
        simulation("local", classification_problem(), SGD, engine={"unseen": classification_problem((5,), (7,))})


def test_without_unseen_clients():
    made = simulation("local", classification_problem(), SGD)
    with pytest.raises(JaxpflError, match="made without unseen clients"):
        made.evaluate_unseen(made.init([0]))


def test_a_server_that_sends_each_client_its_own_cannot_serve_them():
    base = simulation("fedavg", classification_problem(), SGD).algorithm
    rows = np.zeros((5, 2))
    server = base.server._replace(broadcast=lambda key, hp, ctx, mu: Message(mu, rows))
    made = simulated(base._replace(server=server))
    with pytest.raises(JaxpflError, match="sends each client its own message"):
        made.evaluate_unseen(made.init([0]))


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adam", marks=pytest.mark.slow)])
def test_newcomers_are_welcomed_with_a_message_of_their_own(optimizer):
    """A server that sends each trained client its own number, and newcomers a factor of mu."""
    base = simulation("fedavg", classification_problem(), SGD).algorithm
    rows, halved = np.zeros(5), jnp.full((), 0.5)
    server = base.server._replace(
        broadcast=lambda key, hp, ctx, mu: Message(mu, rows),
        welcome=lambda key, hp, ctx, mu: Message(mu, halved),
    )
    client = base.clients[0]._replace(
        personalize=lambda key, hp, ctx, message, state, splits: optax.tree.scale(message.per_client, message.shared)
    )
    algorithm = with_server_optimizer(base._replace(server=server, clients=(client,)), optimizer)
    made = simulated(algorithm)
    state = made.init([SEED])
    mu = on_host(state.server if optimizer == "sgd" else state.server.state)
    want = scores_of([jax.tree.map(lambda a: a / 2, mu)] * 3)
    assert_same(on_host(made.evaluate_unseen(state))["before"], want)


def simulated(algorithm) -> Simulation:
    problem = classification_problem()
    hp = simulation("fedavg", problem, SGD).hp
    return Simulation(algorithm, perceptron(), problem, full(5), hp, unseen=newcomers())
