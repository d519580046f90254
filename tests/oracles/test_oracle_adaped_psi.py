"""With theta and mu held, psi rests: ``psi+ = max(psi - eta3 [1/(2 psi) - c f/(2 psi^2)], floor) = psi``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_reference import distillation, forward
from oracle_setup import classification_problem, client_row, clients, perceptron, simulation

from jaxpfl import ExecutionPlan

SIZES, IDS, C, ROUNDS = (10, 5), (1, 6), 5.0, 500


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def settled(sizes: tuple[int, ...], psi: list[float], floor: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """psi after many rounds in which nothing else moves, one run for each start and floor, [runs];

    and f_KD(theta_i, mu), [runs, clients].
    """
    problem = classification_problem(sizes, IDS[: len(sizes)])
    hp = {"lr": 0.0, "lr_global": 0.0, "weight_decay": 0.0, "lr_psi": 0.5, "c": C}
    hp |= {"psi_init": np.array(psi), "psi_floor": np.array(floor)}
    made = simulation("adaped", problem, hp, steps=1, plan=ExecutionPlan(rounds_per_call=ROUNDS))
    state = made.init(range(len(psi)))
    apart = [perceptron().init(jax.random.key(s)) for s in range(30, 30 + len(sizes))]
    thetas = jax.tree.map(lambda *a: jnp.stack([jnp.stack(a)] * len(psi)), *apart)
    end, _ = made.advance(state._replace(clients=(thetas,)), ROUNDS)
    f = [
        [
            distillation(forward(mu, x), forward(client_row(own, i), x))[0]
            for i, (x, _) in enumerate(clients(problem.train))
        ]
        for mu, own in (client_row((end.server.mu, end.clients[0]), s) for s in range(len(psi)))
    ]
    return np.asarray(end.server.psi), np.array(f)


@pytest.mark.slow
def test_one_client():
    """``1/(2 psi) = c f/(2 psi^2)`` at ``psi* = c f_KD``, from below and above; or the floor, if higher."""
    psi, f = settled(SIZES[:1], [0.3, 6.0, 3.5], [0.05, 0.05, 3.0])
    np.testing.assert_allclose(psi[:2], C * f[:2, 0], rtol=1e-9)
    assert 0.05 < C * f[2, 0] < 3.0
    assert psi[2] == 3.0


@pytest.mark.slow
def test_uniform_average():
    """One step a round: the clients' mean of ``1/(2 psi) - c f_i/(2 psi^2)`` is 0 at ``psi* = c mean_i f_i``,

    each client counted once whatever its size.
    """
    (psi,), (f,) = settled(SIZES, [2.0], [0.05])
    np.testing.assert_allclose(psi, C * np.mean(f), rtol=1e-9)
    assert abs(psi / (C * np.average(f, weights=SIZES)) - 1) > 0.01
