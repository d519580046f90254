"""Clients of different architectures in one run and one program: groups, against NumPy and against one group."""

import jax
import numpy as np
import pytest
from numpy_reference import (
    average,
    backward,
    cross_entropy,
    distillation,
    forward,
    log_softmax,
    step,
    subtract,
)
from oracle_setup import (
    IDS,
    SIZES,
    assert_same,
    classification_problem,
    client_row,
    clients,
    on_host,
    participation,
    run,
    simulation,
)

from jaxpfl import ExecutionPlan, JaxpflError

HYPER = {"lr": 0.4, "lr_decay": 0.7, "decay_every": 4.0, "weight_decay": 0.02}
HYPER |= {"lr_global": 0.3, "lr_psi": 0.1, "psi_init": 0.6, "psi_floor": 0.5, "c": 5.0}
ROUNDS = 5


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def adaped(architectures: str, kind: str = "full", batch_size: int = 100, **options):
    return simulation(
        "adaped",
        classification_problem(),
        HYPER,
        cohort=participation(kind),
        batch_size=batch_size,
        architectures=architectures,
        **options,
    )


def of_all_clients(state, field=lambda own: own):
    """The clients' states in the order of the stack: ids are dealt to the groups in turn."""
    rows = [iter(range(len(SIZES))) for _ in state.clients]
    numbers = [client_id % len(state.clients) for client_id in IDS]
    return [client_row(field(state.clients[g]), next(rows[g])) for g in numbers]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "batch_size", "options", "devices"),
    [
        pytest.param("full", 100, {}, 1, id="everyone"),
        pytest.param("uniform", 6, {"idle_rounds": 2}, 2, id="cohort, idle clients, two devices"),
    ],
)
def test_groups_of_one_architecture_are_one_group(kind, batch_size, options, devices):
    plan = ExecutionPlan(rounds_per_call=1, devices=devices)
    one, two, three = (
        run(adaped(names, kind, batch_size, plan=plan, **options), ROUNDS)
        for names in ("", "same+same", "same+same+same")
    )
    for other in (two, three):
        for want, got in zip(one.states, other.states, strict=True):
            assert_same(got.server, want.server)
            for own, expected in zip(of_all_clients(got), of_all_clients(want), strict=True):
                assert_same(own, expected)
            np.testing.assert_array_equal(got.counts.table, want.counts.table)
        want, got = (on_host(r.simulation.evaluate(r.state)) for r in (one, other))
        np.testing.assert_array_equal(got["after"].pop("diverged"), want["after"].pop("diverged"))
        assert_same(got, want)
        for name in one.history:
            np.testing.assert_allclose(other.history[name], one.history[name], rtol=1e-9)


def linear_forward(theta, x):
    return x @ theta["head"]["kernel"] + theta["head"]["bias"]


@pytest.mark.slow
def test_one_step_of_two_architectures():
    """theta a perceptron for even ids, linear for odd ones; one full-batch step; uploads (mu, psi) for all."""
    made = adaped("same+linear", steps=1)
    got = run(made, 1)
    start, end = got.states
    mu, psi, wd = start.server.mu, HYPER["psi_init"], HYPER["weight_decay"]
    changes, scales = [], []
    data = clients(classification_problem().train)
    for (x, y), old, new, client_id in zip(data, of_all_clients(start), of_all_clients(end), IDS, strict=True):
        is_linear = client_id % 2 == 1
        logits = linear_forward(old, x) if is_linear else forward(old, x)
        d = cross_entropy(logits, y)[1] + distillation(forward(mu, x), logits)[2] / (2 * psi)
        if is_linear:
            gradient = {"kernel": x.T @ d, "bias": d.sum(0)}
            theta = {"head": step(old["head"], gradient, HYPER["lr"], wd)}
            student = linear_forward(theta, x)
        else:
            theta = step(old, backward(old, x, d), HYPER["lr"], wd)
            student = forward(theta, x)
        assert_same(new, theta)
        d_mu = backward(mu, x, distillation(forward(mu, x), student)[1] / (2 * psi))
        new_mu = step(mu, d_mu, HYPER["lr_global"], wd)
        f = distillation(forward(new_mu, x), student)[0]
        changes.append(subtract(new_mu, mu))
        scales.append(max(psi - HYPER["lr_psi"] * (1 / (2 * psi) - HYPER["c"] * f / (2 * psi**2)), 0.5) - psi)
    assert_same(end.server.mu, average(mu, changes, [1.0] * len(SIZES)))
    np.testing.assert_allclose(end.server.psi, psi + np.mean(scales), rtol=1e-12)

    accuracy = []
    for (x, y), own, client_id in zip(clients(classification_problem().test), of_all_clients(end), IDS, strict=True):
        logits = linear_forward(own, x) if client_id % 2 else forward(own, x)
        accuracy.append(-log_softmax(logits)[np.arange(len(y)), y].mean())
    assert_same(on_host(made.evaluate(got.state))["after"]["loss"], np.array(accuracy))


@pytest.mark.slow
def test_it_is_one_program():
    made = adaped("same+linear")
    state = made.init([0])
    state, _ = made.advance(state, 1)
    assert len(state.clients) == 2
    assert [name for name in made._programs.made if name[0] != "start"] == [("advance", 1)]


@pytest.mark.slow
def test_personal_models_of_each_group():
    made = adaped("same+linear", "uniform")
    state, _ = made.advance(made.init([0]), 2)
    models = made.personal_models(state)
    assert_same(jax.tree.map(np.asarray, models), jax.tree.map(np.asarray, made.trim(state).clients))


@pytest.mark.slow
@pytest.mark.parametrize("ids", [[100], [55, 101, 103]])
def test_unseen_clients_may_all_be_of_one_architecture(ids):
    """They have the scores that they have beside one of the other architecture."""
    both = classification_problem((8,) * (len(ids) + 1), [*ids, ids[0] + 201])
    some = jax.tree.map(lambda a: a[:-1], both)
    alone, beside = (adaped("same+linear", engine={"unseen": given}) for given in (some, both))
    found, want = (made.evaluate_unseen(made.init([0]))["after"]["loss"] for made in (alone, beside))
    assert found.shape == (1, len(ids))
    np.testing.assert_allclose(found, want[:, :-1], rtol=1e-12)


@pytest.mark.parametrize(
    ("names", "message"),
    [("same+lineer", "linear"), ("+".join(["same"] * 7), "has no client"), ("same+", "unknown model")],
)
def test_architectures_that_cannot_be(names, message):
    with pytest.raises(JaxpflError, match=message):
        adaped(names)
