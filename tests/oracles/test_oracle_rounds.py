"""Local training, averaging and control variates against NumPy: all that a round leaves; and where they rest."""

from functools import cache

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
from oracle import ADAPED, ROUNDS, SETTINGS, SGD, SIZES, STEPS, M, Oracle, assert_same, cases, client_row

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


@pytest.mark.parametrize(("name", "kind"), cases(ORACLES))
def test_rounds(name, kind):
    ORACLES[name].check(kind)


def test_a_round_has_these_metrics():
    for name in ("fedavg-ft", "adaped"):
        one = ORACLES[name]
        assert one.got().history.keys() == one.want()[0].metrics.keys() | {"participants", "diverged"}


def test_fine_tuned_parameters():
    one = ORACLES["fedavg-ft"]
    got = one.got()
    models = oracle.on_host(got.simulation.personal_models(got.state))
    for i, model in enumerate(tuned_models(one.want()[-1])["after"]):
        assert_same(client_row(models, i), model)


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


ETA = 0.3


def fixed_point(parts, tau, weights):
    """``mu* = (sum_i n_i P_i)^-1 sum_i n_i P_i b_i``, ``P_i = I - (I - eta A_i)^tau``: where FedAvg's server rests.

    tau full-batch steps on ``|X_i w - y_i|^2 / (2 n_i)``, ``A_i = X_i'X_i / n_i``, move a client by
    ``-P_i (w - b_i)``, b_i the minimiser. That is not the pooled minimiser unless tau = 1.
    """
    left, right = np.zeros((3, 3)), np.zeros(3)
    for (x, y), weight in zip(parts, weights, strict=True):
        a, b = x.T @ x / len(y), np.linalg.solve(x.T @ x, x.T @ y)
        p = np.eye(3) - np.linalg.matrix_power(np.eye(3) - ETA * a, tau)
        left, right = left + weight * p, right + weight * p @ b
    return np.linalg.solve(left, right)


@pytest.mark.slow
@pytest.mark.parametrize("tau", [1, 5])
def test_fedavg_rests_at_its_fixed_point(tau):
    parts = oracle.three_quadratics()[0]
    sizes = [len(y) for _, y in parts]
    mu = rests("fedavg", {"lr": ETA}, 600, parts, steps=tau)
    np.testing.assert_allclose(mu, fixed_point(parts, tau, sizes), rtol=1e-9)
    pooled = np.linalg.lstsq(*(np.concatenate(both) for both in zip(*parts, strict=True)), rcond=None)[0]
    if tau == 1:
        np.testing.assert_allclose(mu, pooled, rtol=1e-9)
    else:  # a uniform mean would come to rest elsewhere, and so does gradient descent on the pooled examples
        assert np.abs(mu - fixed_point(parts, tau, (1, 1, 1))).max() > 1e-3
        assert np.abs(mu - pooled).max() > 1e-3


@cache
def proximal(prox):
    """Curvature, minimiser, mu, and the model after one round of one client at the rate 1 / (largest curvature).

    FedProx's client solves ``min_w f(w) + (prox/2) |w - mu|^2`` about the broadcast mu, fixed in the round; on
    ``f(w) = (w - b)'A(w - b)/2`` enough steps reach ``w = (A + prox I)^-1 (A b + prox mu)``.
    """
    rng = np.random.default_rng(4)
    x = rng.normal(size=(20, 3))
    y = x @ rng.normal(size=3) + rng.normal(size=20)
    a, b, mu = x.T @ x / 20, np.linalg.lstsq(x, y, rcond=None)[0], np.array([2.0, -1.0, 0.5])
    rate = 1 / (np.linalg.eigvalsh(a).max() + prox)
    hp = {"lr": rate, "weight_decay": 0.0, "prox": prox}
    made = oracle.simulation(
        "fedprox", hp, problem=oracle.stack([(x, y)], [(x, y)], [0]), task=oracle.least_squares(3), steps=400
    )
    state = made.init([0])._replace(server=jnp.asarray(mu)[None])
    return a, b, mu, np.asarray(made.advance(state, 1)[0].server)[0]


@pytest.mark.parametrize("prox", [3.0, 1e4])
def test_proximal_point(prox):
    a, b, mu, w = proximal(prox)
    np.testing.assert_allclose(w, np.linalg.solve(a + prox * np.eye(3), a @ b + prox * mu), rtol=1e-9)
    if prox > 1e3:  # ``prox (w - mu) -> -grad f(mu)``: the client stays within O(1 / prox) of its anchor
        np.testing.assert_allclose(prox * (w - mu), -a @ (mu - b), rtol=10 / prox, atol=10 / prox)
    # Were the anchor an alias of the live parameters, the term's gradient prox (w - w) would be zero: w = b.
    assert np.abs(b - w).max() > 0.05


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


def test_the_mean_is_by_weight_not_by_count():
    """``(2 d_1 + 0 d_2 + 3 d_3) / (2 + 0 + 3)``: a client of weight zero counts for nothing."""
    d, w = np.random.default_rng(0).normal(size=(3, 2, 3)), np.array([2.0, 0, 3])
    total = jnp.asarray(np.einsum("i,ijk->jk", w, d))
    for count in (0, 3, 7):
        mean = Reduced({"w": total}, jnp.asarray(w.sum()), jnp.int32(count)).mean()
        np.testing.assert_allclose(mean["w"], (2 * d[0] + 3 * d[2]) / 5, rtol=1e-14)


def test_prefix_weights():
    """A weight [k] divides the leading axis of every leaf below it (IFCA: an empty cluster stays)."""
    total = {"centers": {"w": jnp.ones((3, 2, 2)), "b": 6 * jnp.ones(3)}, "psi": jnp.array(5.0)}
    weight = {"centers": jnp.array([2.0, 0, 4]), "psi": jnp.array(0.0)}
    got, expected = jax.jit(trees.prefix_divide)(total, weight), np.array([0.5, 0, 0.25])
    np.testing.assert_array_equal(got["centers"]["w"], np.broadcast_to(expected[:, None, None], (3, 2, 2)))
    np.testing.assert_array_equal(got["centers"]["b"], 6 * expected)
    assert got["psi"] == 0
    assert trees.prefix_divide({"w": jnp.ones((2, 3), jnp.float32)}, jnp.float64(3.0))["w"].dtype == jnp.float32
