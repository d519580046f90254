"""AdaPeD with a gate, by hand: theta's pull is multiplied by ``max(1 - CE(mu) / log K, 0)``; nothing else changes."""

import numpy as np
import pytest
from numpy_reference import Batch, Params, adaped_step, backward, cross_entropy, decay, distillation, forward, step
from oracle_setup import (
    CLASSES,
    SIZES,
    STEPS,
    assert_same,
    classification_problem,
    client_row,
    clients,
    run,
    simulation,
)

pytestmark = pytest.mark.usefixtures("float64")

HP = {"lr": 0.4, "lr_decay": 0.7, "decay_every": 4.0, "weight_decay": 0.02}
HP |= {"lr_global": 0.9, "lr_psi": 0.1, "psi_init": 0.8, "psi_floor": 0.5, "c": 2.0}


def gated_theta(theta: Params, mu: Params, psi: float, batch: Batch, factor: float) -> tuple[Params, float]:
    x, y = batch
    trust = max(1 - cross_entropy(forward(mu, x), y)[0] / np.log(CLASSES), 0)
    pull = distillation(forward(mu, x), forward(theta, x))[2] / (2 * psi)
    gradient = backward(theta, x, cross_entropy(forward(theta, x), y)[1] + trust * pull)
    return step(theta, gradient, HP["lr"] * factor, HP["weight_decay"]), trust


def test_the_gate():
    got = run(simulation("adaped", classification_problem(), HP, gate=True), 4)
    mu, psi = got.states[0].server
    thetas, trusts = [client_row(got.states[0].clients[0], i) for i in range(len(SIZES))], []
    for r in range(4):
        factor, ends = decay(HP, r, STEPS), []
        for i, batch in enumerate(clients(classification_problem().train)):
            theta, own_mu, own_psi = thetas[i], mu, psi
            for _ in range(STEPS):
                theta, trust = gated_theta(theta, own_mu, own_psi, batch, factor)
                # The rest of the step starts from theta+: a rate of zero leaves it where it is.
                _, own_mu, own_psi, _, _ = adaped_step(theta, own_mu, own_psi, batch, HP | {"lr": 0.0}, factor)
                trusts.append(trust)
            thetas[i] = theta
            ends.append((own_mu, own_psi))
        mu = {k: np.mean([m[k] for m, _ in ends], axis=0) for k in mu}
        psi = np.mean([p for _, p in ends])
        assert_same(got.states[r + 1].server.mu, mu)
        np.testing.assert_allclose(got.states[r + 1].server.psi, psi, rtol=1e-9)
        for i in range(len(SIZES)):
            assert_same(client_row(got.states[r + 1].clients[0], i), thetas[i])
    assert min(trusts) == 0 < max(trusts)
