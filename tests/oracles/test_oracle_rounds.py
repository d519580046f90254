"""Local training, averaging and control variates against NumPy: all that a round leaves; and where they rest."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from numpy_reference import (
    average,
    backward,
    combine,
    cross_entropy,
    decay,
    forward,
    run_adaped,
    run_fedavg,
    run_local,
    run_rounds,
    sgd,
    step,
    subtract,
)
from oracle import ADAPED, ROUNDS, SETTINGS, SGD, SIZES, STEPS, M, Oracle, assert_same

import jaxpfl
from jaxpfl import ExecutionPlan
from jaxpfl.core import trees
from jaxpfl.core.participation import uniform
from jaxpfl.core.protocol import Reduced

TUNE = 5


def tuned_models(last):
    """FedAvg+: ``w_i = mu - sum_t eta_last (grad CE + wd w)`` over the client's own batches."""
    mu, rate = last.server, SGD["lr"] * decay(SGD, ROUNDS - 1, STEPS)
    batches = [oracle.tuning_batches(i, SETTINGS["uniform"].batch_size, TUNE) for i in range(M)]
    return {"after": [sgd(mu, one, rate, SGD["weight_decay"])[0] for one in batches], "mu": mu, "before": [mu] * M}


def scaffold(world, hp, server, own, defect=""):
    """Option II as printed, ``c_i+ = c_i - c + (x - y) / (steps eta)``."""

    def work(server, variate, turn):
        x, c, rate, y, losses = server["model"], server["variate"], hp["lr"] * turn.factor, server["model"], []
        for inputs, labels in turn.batches:
            loss, d_logits = cross_entropy(forward(y, inputs), labels)
            correction = subtract(c, variate)
            y = step(
                y,
                combine(backward(y, inputs, d_logits), correction, -1 if defect == "sign" else 1),
                rate,
                hp["weight_decay"],
            )
            losses.append(loss)
        steps = STEPS if defect == "tau for a straggler's steps" else len(turn.batches)
        new = {k: variate[k] - c[k] + (x[k] - y[k]) / (steps * rate) for k in x}
        return new, {"model": subtract(y, x), "variate": subtract(new, variate)}, {"train_loss": np.mean(losses)}

    def serve(server, changes, cohort, own):
        ones, share = [1.0] * len(cohort), 1.0 if defect == "c moves by the whole mean" else len(cohort) / M
        mean = subtract(average(server, changes, ones), server)
        model = combine(server["model"], mean["model"], hp["server_lr"])
        return {"model": model, "variate": combine(server["variate"], mean["variate"], share)}

    return run_rounds(world, hp, server, own, work, serve)


def feddyn(world, hp, server, own, defect=""):
    """Dynamic regularisation, h as the mean of all clients' vectors."""
    alpha = hp["alpha"]

    def work(server, vector, turn):
        theta, w, losses = server["model"], server["model"], []
        for x, y in turn.batches:
            loss, d_logits = cross_entropy(forward(w, x), y)
            gradient = combine(backward(w, x, d_logits), vector, 1 if defect == "sign" else -1)
            gradient = combine(gradient, subtract(w, theta), alpha)
            w = step(w, gradient, hp["lr"] * turn.factor, hp["weight_decay"])
            losses.append(loss)
        move = subtract(w, theta)
        return combine(vector, move, -alpha), move, {"train_loss": np.mean(losses)}

    def serve(server, moves, cohort, own):
        weights = [SIZES[i] if defect == "mean by n_i" else 1.0 for i in cohort]
        mean = subtract(average(server["model"], moves, weights), server["model"])
        share = 1 if defect == "h moves by the whole mean" else len(cohort) / M
        h = combine(server["h"], mean, -alpha * share)
        pull = 0 if defect == "h left out" else -1 / alpha
        return {"model": combine(combine(server["model"], mean), h, pull), "h": h}

    return run_rounds(world, hp, server, own, work, serve)


def server_model(last):
    return {"after": [last.server["model"]] * M, "mu": last.server["model"]}


BOTH = ("uniform", "full")
ORACLES = {
    "local": Oracle("local", SGD, run_local, models=lambda last: {"after": last.clients}),
    "fedavg": Oracle("fedavg", SGD, run_fedavg, models=oracle.global_alone, kinds=BOTH),
    "fedavg-ft": Oracle(
        "fedavg-ft", SGD, run_fedavg, options={"fine_tune_steps": TUNE}, models=tuned_models, quick=True
    ),
    "fedprox": Oracle("fedprox", SGD | {"prox": 0.8}, run_fedavg, models=oracle.global_alone),
    "adaped": Oracle(
        "adaped", ADAPED, run_adaped, models=lambda last: {"after": last.clients, "mu": last.server["mu"]}, quick=True
    ),
    "scaffold": Oracle(
        "scaffold",
        SGD | {"server_lr": 0.7},
        scaffold,
        ("sign", "tau for a straggler's steps", "c moves by the whole mean"),
        models=server_model,
        kinds=BOTH,
    ),
    "feddyn": Oracle(
        "feddyn",
        SGD | {"alpha": 0.8},
        feddyn,
        ("sign", "mean by n_i", "h moves by the whole mean", "h left out"),
        models=server_model,
    ),
}
test_rounds = oracle.check_rounds(ORACLES)


def test_a_round_has_these_metrics():
    for name in ("fedavg-ft", "adaped"):
        one = ORACLES[name]
        assert one.got().history.keys() == one.want()[0].metrics.keys() | {"participants", "diverged"}


def test_adaped_starts_from_one_shared_initialisation():
    """``theta_i^0 = mu^0`` for every client, and psi^0 as given."""
    first = ORACLES["adaped"].got().states[0]
    assert_same(oracle.plain_clients(first), [first.server.mu] * M, rtol=0)
    assert first.server.psi == ADAPED["psi_init"]


@pytest.mark.slow
def test_the_servers_vector_is_the_mean_of_all():
    """SCAFFOLD's c and FedDyn's h are the means of all clients' after every round in which only some took part."""
    for name, part in (("scaffold", "variate"), ("feddyn", "h")):
        for state in ORACLES[name].got().states:
            for k, c in getattr(state.server, part).items():
                np.testing.assert_allclose(c, state.clients[0][k].mean(axis=0), atol=1e-14)


# --- where they rest ------------------------------------------------------------------------------

STILL = {"lr_decay": 1.0, "weight_decay": 0.0}


def rests(method, hp, rounds, parts, **given):
    """The server's model after many rounds of least squares."""
    problem, task = oracle.stack(parts, parts, (5, 1, 2)), oracle.least_squares(3)
    plan = ExecutionPlan(rounds_per_call=rounds)
    made = oracle.simulation(method, STILL | hp, problem=problem, task=task, plan=plan, **given)
    server = oracle.on_host(made.advance(made.init([0]), rounds)[0]).server
    return getattr(server, "model", server)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "hp", "steps", "rounds", "optimizer"),
    [
        ("scaffold", {"lr": 0.1}, 4, 600, "sgd"),
        ("scaffold", {"lr": 0.02}, 4, 600, "momentum"),
        ("feddyn", {"lr": 0.1, "alpha": 1.0}, 20, 400, "sgd"),
    ],
)
def test_rests_at_the_minimiser(method, hp, steps, rounds, optimizer):
    """On quadratics, cohorts of 2 of 3: the minimiser of the mean loss; plain averaging rests elsewhere."""
    parts, want = oracle.three_quadratics()
    given = {"steps": steps, "choices": {"optimizer": optimizer}}
    np.testing.assert_allclose(rests(method, hp, rounds, parts, cohort=uniform(3, 2), **given), want, rtol=1e-7)
    if optimizer == "sgd":
        plain = rests("fedprox", {"lr": hp["lr"]}, rounds, parts, **given)
        assert np.abs(plain - want).max() > 1e-3


# --- FedNova --------------------------------------------------------------------------------------


def nova(**more):
    hyper = {"lr": 0.3, "lr_decay": 1.0, "weight_decay": 0.02, "server_lr": 0.7}
    given = {"model": oracle.perceptron().model, "rounds": 1, "local_steps": 6, "batch_size": 100, "hyper": hyper}
    return jaxpfl.fit("fedavg", oracle.classification_problem(), **given | {"options": {"fednova": True}} | more)


@pytest.mark.slow
def test_in_fednova_a_straggler_counts_by_its_slope():
    """``(sum p tau) sum p Delta / tau`` is what the server adds."""
    simulation = nova(stragglers=0.7, dropout=0.2).simulation
    state = simulation.init([0])
    mu, before, unequal = oracle.on_host(state).server, simulation.counts(state), 0
    for _ in range(4):
        state, _ = simulation.advance(state, 1)
        now = simulation.counts(state)
        taken, arrived = (np.asarray(getattr(now, n) - getattr(before, n))[0] for n in ("steps", "uploads"))
        p, slopes = arrived * np.array(SIZES) / (arrived * np.array(SIZES)).sum(), []
        for batch, tau in zip(oracle.train_data(), taken, strict=True):
            w, _ = sgd(mu, [batch] * tau, 0.3, 0.02)
            slopes.append({k: (w[k] - mu[k]) / tau for k in mu})
        effective = p @ taken
        mu = {k: mu[k] + 0.7 * effective * sum(a * d[k] for a, d in zip(p, slopes, strict=True)) for k in mu}
        before, unequal = now, unequal + (len(set(taken[arrived > 0])) > 1)
    assert unequal > 1
    assert_same(oracle.on_host(state).server, mu)


# --- means ----------------------------------------------------------------------------------------


def test_no_weight_leaves_the_server_unchanged():
    """``mean = sum_i w_i d_i / sum_i w_i``, and 0 where nobody has weight: adding it changes no server."""
    server = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(2)}
    mean = Reduced(jax.tree.map(jnp.zeros_like, server), jnp.zeros(()), jnp.int32(3)).mean()
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(jnp.add, server, mean), server)
    assert Reduced((), (), jnp.int32(2)).mean() == ()
    # Not NaN: the division is guarded in front, not behind.
    assert jax.jit(jax.grad(lambda w: trees.prefix_divide(jnp.zeros(2), w).sum()))(0.0) == 0


def test_prefix_weights():
    """A weight [k] divides the leading axis of every leaf below it (IFCA: an empty cluster stays)."""
    total = {"centers": {"w": jnp.ones((3, 2, 2)), "b": 6 * jnp.ones(3)}, "psi": jnp.array(5.0)}
    weight = {"centers": jnp.array([2.0, 0, 4]), "psi": jnp.array(0.0)}
    got, expected = jax.jit(trees.prefix_divide)(total, weight), np.array([0.5, 0, 0.25])
    np.testing.assert_array_equal(got["centers"]["w"], np.broadcast_to(expected[:, None, None], (3, 2, 2)))
    np.testing.assert_array_equal(got["centers"]["b"], 6 * expected)
    assert got["psi"] == 0
    assert trees.prefix_divide({"w": jnp.ones((2, 3), jnp.float32)}, jnp.float64(3.0))["w"].dtype == jnp.float32
