"""Gradients that are clipped in every local step, as DP-AdaPeD is printed, by hand. The noise is zero here."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy_reference import Batch, Params, backward, cross_entropy, decay, distillation, forward, step, subtract
from oracle_setup import SIZES, STEPS, assert_same, classification_problem, client_row, clients, run, simulation

from jaxpfl import JaxpflError, fit
from jaxpfl.algorithms import METHODS
from jaxpfl.engine.build import releases_of
from jaxpfl.engine.spec import RunSpec
from jaxpfl.privacy import Mechanism

pytestmark = pytest.mark.usefixtures("float64")

SGD = {"lr": 0.4, "lr_decay": 0.7, "decay_every": 4.0, "weight_decay": 0.02}
ADAPED = SGD | {"lr_global": 0.3, "lr_psi": 0.4, "psi_init": 1.5, "psi_floor": 0.2, "c": 2.0}
M, ROUNDS, C1, C2 = len(SIZES), 3, 0.28, 0.28


def shortened(tree: dict[str, Any], limit: float) -> tuple[dict[str, Any], bool]:
    """``tree / max(|tree| / limit, 1)``, and whether that shortened it."""
    norm = np.sqrt(sum(np.sum(np.square(v)) for v in tree.values()))
    return {k: v / max(norm / limit, 1.0) for k, v in tree.items()}, bool(norm > limit)


def mean(server: dict[str, Any], ends: list[dict[str, Any]]) -> dict[str, Any]:
    return {k: server[k] + sum(end[k] - server[k] for end in ends) / M for k in server}


def made(method: str, hp: dict[str, float], mechanism: Mechanism) -> Any:
    choices = {"privacy": mechanism, "weighting": "uniform"}
    return simulation(method, classification_problem(), hp, choices=choices, privacy=mechanism)


@pytest.mark.slow
def test_fedavg():
    """The gradient is clipped, weight decay is not: it is no function of the data."""
    got = run(made("fedavg", SGD, Mechanism(0.0, C1, "per_step")), ROUNDS)
    mu, short = got.states[0].server.state, []
    for r in range(ROUNDS):
        ends = []
        for x, y in clients(classification_problem().train):
            w = mu
            for _ in range(STEPS):
                gradient, was = shortened(backward(w, x, cross_entropy(forward(w, x), y)[1]), C1)
                w = step(w, gradient, SGD["lr"] * decay(SGD, r, STEPS), SGD["weight_decay"])
                short.append(was)
            ends.append(w)
        mu = mean(mu, ends)
        assert_same(got.states[r + 1].server.state, mu)
    assert any(short)


def adaped_step(
    theta: Params, mu: Params, psi: float, batch: Batch, factor: float, joint: bool
) -> tuple[Params, Params, float, bool]:
    hp, (x, y) = ADAPED, batch
    d_student = cross_entropy(forward(theta, x), y)[1] + distillation(forward(mu, x), forward(theta, x))[2] / (2 * psi)
    theta = step(theta, backward(theta, x, d_student), hp["lr"] * factor, hp["weight_decay"])

    def scale_gradient(mu: Params) -> float:
        return 1 / (2 * psi) - hp["c"] * distillation(forward(mu, x), forward(theta, x))[0] / (2 * psi**2)

    h = backward(mu, x, distillation(forward(mu, x), forward(theta, x))[1] / (2 * psi))
    if joint:
        both, short = shortened(h | {"psi": scale_gradient(mu)}, C1)
        k = both.pop("psi")
        mu = step(mu, both, hp["lr_global"] * factor, hp["weight_decay"])
    else:
        h, of_mu = shortened(h, C1)
        mu = step(mu, h, hp["lr_global"] * factor, hp["weight_decay"])
        k, of_psi = shortened({"psi": scale_gradient(mu)}, C2)
        k, short = k["psi"], of_mu or of_psi
    return theta, mu, max(psi - hp["lr_psi"] * k, hp["psi_floor"]), short


@pytest.mark.slow
@pytest.mark.parametrize("joint", [False, True], ids=["one after the other", "joint"])
def test_adaped(joint):
    mechanism = Mechanism(0.0, C1, "per_step", joint=joint, scale_clipping_norm=None if joint else C2)
    got = run(made("adaped", ADAPED, mechanism), ROUNDS)
    (mu, psi), short = got.states[0].server.state, []
    thetas = [client_row(got.states[0].clients[0], i) for i in range(M)]
    for r in range(ROUNDS):
        ends = []
        for i, batch in enumerate(clients(classification_problem().train)):
            theta, own_mu, own_psi = thetas[i], mu, psi
            for _ in range(STEPS):
                theta, own_mu, own_psi, was = adaped_step(theta, own_mu, own_psi, batch, decay(ADAPED, r, STEPS), joint)
                short.append(was)
            thetas[i] = theta
            ends.append(own_mu | {"psi": own_psi})
        mu = mean(mu | {"psi": psi}, ends)
        psi = mu.pop("psi")
        assert_same(got.states[r + 1].server.state.mu, mu)
        np.testing.assert_allclose(got.states[r + 1].server.state.psi, psi, rtol=1e-9)
        for i in range(M):
            assert_same(client_row(got.states[r + 1].clients[0], i), thetas[i])
    assert any(short)
    assert joint or not all(short)
    assert any(np.abs(v).max() > 1e-6 for v in subtract(mu, got.states[0].server.state.mu).values())


def test_a_method_without_such_steps_is_refused():
    with pytest.raises(JaxpflError, match=r"ditto; methods that can: .*adaped.*: such a method"):
        fit("ditto", classification_problem(), rounds=1, privacy=Mechanism(1.0, 1.0, "per_step"))


def test_a_method_of_ones_own_that_takes_other_steps_than_are_accounted_is_refused():
    fedavg = METHODS["fedavg"]
    twice = fedavg._replace(build=lambda task, work: fedavg.build(task, replace(work, steps=2 * work.steps)))
    with pytest.raises(JaxpflError, match=r"fedavg: Algorithm\.local_steps is 8, .*local_steps = 4"):
        fit(twice, classification_problem(), rounds=1, local_steps=4, privacy=Mechanism(1.0, 1.0, "per_step"))


def test_only_our_own_methods_are_accounted_by_the_noise_of_all_clients():
    fedavg = METHODS["fedavg"]
    for method, linear in ((fedavg, True), (fedavg._replace(build=lambda task, work: fedavg.build(task, work)), False)):
        assert releases_of(RunSpec(method=method), fedavg.hyper, STEPS)["linear"] is linear
