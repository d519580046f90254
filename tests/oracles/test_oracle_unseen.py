"""Clients that were never trained, and clients of different architectures in one run, against NumPy.

New clients take A rounds of the method's own local work with the message fixed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from numpy_reference import (
    adaped_step,
    average,
    backward,
    cross_entropy,
    decay,
    distillation,
    forward,
    sgd,
    step,
    subtract,
)
from oracle import ADAPED, IDS, NEWCOMERS, SEED, SETTINGS, SGD, STEPS, M, assert_same, classification_problem, clients

from jaxpfl import ExecutionPlan, JaxpflError, Message, Simulation
from jaxpfl.algorithms.parts.servers import with_server_optimizer
from jaxpfl.core.participation import full
from jaxpfl.core.randomness import Purpose, stream

ROUNDS, ADAPT, TUNE, BATCH = 3, 4, 5, 6
FACTOR = decay(SGD, ROUNDS - 1, STEPS)
RATE = SGD["lr"] * FACTOR


def newcomers():
    return classification_problem(*NEWCOMERS)


def new_scores(models):
    return oracle.scores(models, clients(newcomers().test))


def arrived(method, hp, **options):
    """The last state of a run, and the scores of new clients."""
    engine = {"unseen": newcomers(), "adapt_rounds": ADAPT}
    got = oracle.run_method(method, hp, rounds=ROUNDS, batch_size=BATCH, engine=engine, **options)
    found = oracle.on_host(got.simulation.evaluate_unseen(got.state))
    assert not found["after"].pop("diverged").any()
    in_rounds = found["after"].pop("gradients") - options.get("fine_tune_steps", 0)
    assert (in_rounds % (ADAPT * STEPS) == 0).all()
    return got.states[-1], found


def adapted(models, step):
    """Models after all rounds of adaptation, by ``step(model, batches)``."""
    models = list(models)
    for i in range(3):
        for nth in range(ADAPT):
            models[i] = step(models[i], oracle.draws(newcomers(), i, Purpose.BATCHES, BATCH, STEPS, nth))
    return models


def descent(rate):
    return lambda model, batches: sgd(model, batches, rate, SGD["weight_decay"])[0]


@pytest.mark.slow
def test_fedavg_has_nothing_to_adapt_but_fine_tunes():
    last, found = arrived("fedavg-ft", SGD, fine_tune_steps=TUNE)
    mu = [last.server] * 3
    tuned = [descent(RATE)(last.server, oracle.tuning_batches(i, BATCH, TUNE, newcomers())) for i in range(3)]
    assert_same(found, {"after": new_scores(tuned), "before": new_scores(mu), "global": new_scores(mu)})


@pytest.mark.slow
def test_local_trains_alone_from_its_start():
    _, found = arrived("local", SGD)
    keys = [stream(jax.random.key(SEED), Purpose.CLIENT_INIT, i) for i in NEWCOMERS[1]]
    models = [jax.tree.map(np.asarray, oracle.perceptron().init(key)) for key in keys]
    assert_same(found["before"], new_scores(models))
    assert_same(found["after"], new_scores(adapted(models, descent(RATE))))


@pytest.mark.slow
def test_adaped_with_the_message_fixed():
    """Each round starts from today's (mu, psi) again; theta goes on. Training is left alone."""
    last, found = arrived("adaped", ADAPED)

    def work(theta, batches):
        mu, psi = last.server.mu, float(last.server.psi)
        for batch in batches:
            theta, mu, psi, _, _ = adaped_step(theta, mu, psi, batch, ADAPED, FACTOR)
        return theta

    models = [last.server.mu] * 3
    assert_same(found["before"], new_scores(models))
    assert_same(found["after"], new_scores(adapted(models, work)))
    plain = oracle.run_method("adaped", ADAPED, rounds=ROUNDS, batch_size=BATCH).states[-1]
    assert_same((last.server, last.clients), (plain.server, plain.clients), rtol=1e-12)


@pytest.mark.slow
def test_l2gd_takes_local_steps_whatever_the_servers_last_toss_was():
    hp = SGD | {"p": 0.5, "lam": 0.3}
    last, found = arrived("l2gd", hp)
    assert_same(found["after"], new_scores(adapted([last.server] * 3, descent(RATE / (1 - hp["p"])))))


@pytest.mark.slow
def test_no_round_of_adaptation_is_the_model_on_arrival():
    made = oracle.simulation("local", SGD, engine={"unseen": newcomers(), "adapt_rounds": 0})
    found = oracle.on_host(made.evaluate_unseen(made.init([SEED])))
    assert_same(found["after"]["loss"], found["before"]["loss"])


def test_without_unseen_clients():
    made = oracle.simulation("local", SGD)
    with pytest.raises(JaxpflError, match="made without unseen clients"):
        made.evaluate_unseen(made.init([0]))


def test_a_server_that_sends_each_client_its_own_cannot_serve_them():
    base = oracle.simulation("fedavg", SGD).algorithm
    rows = np.zeros((5, 2))
    server = base.server._replace(broadcast=lambda key, hp, ctx, mu: Message(mu, rows))
    made = simulated(base._replace(server=server))
    with pytest.raises(JaxpflError, match="sends each client its own message"):
        made.evaluate_unseen(made.init([0]))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_newcomers_are_welcomed_with_a_message_of_their_own(optimizer):
    """A server that sends each trained client its own number, and newcomers a factor of mu."""
    base = oracle.simulation("fedavg", SGD).algorithm
    rows, halved = np.zeros(5), jnp.full((), 0.5)
    server = base.server._replace(
        broadcast=lambda key, hp, ctx, mu: Message(mu, rows), welcome=lambda key, hp, ctx, mu: Message(mu, halved)
    )
    client = base.clients[0]._replace(
        personalize=lambda key, hp, ctx, message, state, splits: optax.tree.scale(message.per_client, message.shared)
    )
    base = base._replace(server=server, clients=(client,), has_server_optimizer=False)
    algorithm = with_server_optimizer(base, optimizer)
    made = simulated(algorithm)
    state = made.init([SEED])
    mu = oracle.on_host(state.server if optimizer == "sgd" else state.server.state)
    want = new_scores([jax.tree.map(lambda a: a / 2, mu)] * 3)
    assert_same(oracle.on_host(made.evaluate_unseen(state))["before"], want)


def simulated(algorithm) -> Simulation:
    hp = oracle.simulation("fedavg", SGD).hp
    return Simulation(algorithm, oracle.perceptron(), classification_problem(), full(M), hp, unseen=newcomers())


# --- architectures --------------------------------------------------------------------------------


def every_client(state):
    """The clients' states in the order of the stack: ids are dealt to the groups in turn."""
    rows = [iter(range(M)) for _ in state.clients]
    numbers = [client_id % len(state.clients) for client_id in IDS]
    return [oracle.client_row(state.clients[g], next(rows[g])) for g in numbers]


@pytest.mark.slow
def test_groups_of_one_architecture_are_one_group():
    """Cohorts, mini-batches, idle clients, two devices."""
    plan = ExecutionPlan(rounds_per_call=1, devices=2)
    one, other = (
        oracle.run_setting("adaped", ADAPED, SETTINGS["reliable"], 5, plan=plan, architectures=names, idle_rounds=2)
        for names in ("", "same+same")
    )
    for want, got in zip(one.states, other.states, strict=True):
        assert_same(got.server, want.server)
        assert_same(every_client(got), every_client(want))
        np.testing.assert_array_equal(got.counts.table, want.counts.table)
    want, got = (oracle.on_host(r.simulation.evaluate(r.state)) for r in (one, other))
    np.testing.assert_array_equal(got["after"].pop("diverged"), want["after"].pop("diverged"))
    assert_same(got, want)
    for name in one.history:
        np.testing.assert_allclose(other.history[name], one.history[name], rtol=1e-9)


def linear_forward(theta, x):
    return x @ theta["head"]["kernel"] + theta["head"]["bias"]


@pytest.mark.slow
def test_one_step_of_two_architectures():
    """theta a perceptron for even ids, linear for odd ones; one full-batch step; uploads (mu, psi) for all."""
    made = oracle.simulation("adaped", ADAPED, architectures="same+linear", steps=1)
    got = oracle.run(made, 1)
    start, end = got.states
    mu, psi, wd = start.server.mu, ADAPED["psi_init"], ADAPED["weight_decay"]
    changes, scales = [], []
    data = oracle.train_data()
    for (x, y), old, new, client_id in zip(data, every_client(start), every_client(end), IDS, strict=True):
        is_linear = client_id % 2 == 1
        logits = linear_forward(old, x) if is_linear else forward(old, x)
        d = cross_entropy(logits, y)[1] + distillation(forward(mu, x), logits)[2] / (2 * psi)
        if is_linear:
            gradient = {"kernel": x.T @ d, "bias": d.sum(0)}
            theta = {"head": step(old["head"], gradient, ADAPED["lr"], wd)}
            student = linear_forward(theta, x)
        else:
            theta = step(old, backward(old, x, d), ADAPED["lr"], wd)
            student = forward(theta, x)
        assert_same(new, theta)
        d_mu = backward(mu, x, distillation(forward(mu, x), student)[1] / (2 * psi))
        new_mu = step(mu, d_mu, ADAPED["lr_global"], wd)
        f = distillation(forward(new_mu, x), student)[0]
        changes.append(subtract(new_mu, mu))
        scales.append(max(psi - ADAPED["lr_psi"] * (1 / (2 * psi) - ADAPED["c"] * f / (2 * psi**2)), 0.5) - psi)
    assert_same(end.server.mu, average(mu, changes, [1.0] * M))
    np.testing.assert_allclose(end.server.psi, psi + np.mean(scales), rtol=1e-12)
    assert [name for name in made._programs.made if name[0] != "start"] == [("advance", 1)]

    def model(own, client_id):
        return lambda x: linear_forward(own, x) if client_id % 2 else forward(own, x)

    want = oracle.scores([model(*pair) for pair in zip(every_client(end), IDS, strict=True)])
    assert_same(oracle.on_host(made.evaluate(got.state))["after"]["loss"], want["loss"])
    models, states = made.personal_models(got.state), made.trim(got.state).clients
    assert_same(jax.tree.map(np.asarray, models), jax.tree.map(np.asarray, states))


@pytest.mark.slow
@pytest.mark.parametrize("ids", [[100], [55, 101, 103]])
def test_unseen_clients_may_all_be_of_one_architecture(ids):
    """They have the scores that they have beside one of the other architecture."""
    both = classification_problem((8,) * (len(ids) + 1), [*ids, ids[0] + 201])
    some = jax.tree.map(lambda a: a[:-1], both)
    given = ({"unseen": one} for one in (some, both))
    alone, beside = (
        oracle.simulation("adaped", ADAPED, architectures="same+linear", engine=engine) for engine in given
    )
    found, want = (made.evaluate_unseen(made.init([0]))["after"]["loss"] for made in (alone, beside))
    assert found.shape == (1, len(ids))
    np.testing.assert_allclose(found, want[:, :-1], rtol=1e-12)
