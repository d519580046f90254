"""Where psi comes to rest. With theta and mu held, ``psi+ = max(psi - eta3 [1/(2 psi) - c f/(2 psi^2)], floor)``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_reference import distillation, forward
from oracle_setup import classification_problem, client_row, clients, on_host, perceptron, simulation

from jaxpfl import ExecutionPlan

SIZES, IDS, C = (10, 5), (1, 6), 5.0


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def settled(sizes: tuple[int, ...], psi: float, floor: float) -> tuple[float, list[float]]:
    """psi after many rounds in which nothing else moves, and each client's f_KD(theta_i, mu)."""
    problem = classification_problem(sizes, IDS[: len(sizes)])
    hp = {"lr": 0.0, "lr_global": 0.0, "weight_decay": 0.0, "lr_psi": 0.2}
    hp |= {"psi_init": psi, "psi_floor": floor, "c": C}
    made = simulation("adaped", problem, hp, steps=1, plan=ExecutionPlan(rounds_per_call=4000))
    state = made.init([0])
    apart = [perceptron().init(jax.random.key(s)) for s in range(30, 30 + len(sizes))]
    state = state._replace(clients=jax.tree.map(lambda *a: jnp.stack(a)[None], *apart))
    end = on_host(made.advance(state, 4000)[0])
    f = [
        distillation(forward(end.server.mu, x), forward(client_row(end.clients, i), x))[0]
        for i, (x, _) in enumerate(clients(problem.train))
    ]
    return end.server.psi, f


@pytest.mark.parametrize("start", [0.3, 6.0], ids=["from below", "from above"])
def test_fixed_point(start):
    """``1/(2 psi) = c f/(2 psi^2)`` at ``psi* = c f_KD``."""
    psi, (f,) = settled(SIZES[:1], start, floor=0.05)
    np.testing.assert_allclose(psi, C * f, rtol=1e-9)


def test_floor():
    """psi* is the floor where ``c f_KD`` lies below it."""
    psi, (f,) = settled(SIZES[:1], 3.5, floor=3.0)
    assert C * f < 3.0
    assert psi == 3.0


def test_uniform_average():
    """One step a round: the clients' mean of ``1/(2 psi) - c f_i/(2 psi^2)`` vanishes at ``psi* = c mean_i f_i``,

    each client counted once whatever its size.
    """
    psi, f = settled(SIZES, 2.0, floor=0.05)
    np.testing.assert_allclose(psi, C * np.mean(f), rtol=1e-9)
    assert abs(psi / (C * np.average(f, weights=SIZES)) - 1) > 0.01
