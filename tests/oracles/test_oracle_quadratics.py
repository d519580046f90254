"""FedAvg on quadratics ``f_i(w) = |X_i w - y_i|^2 / (2 n_i)``, ``A_i = X_i'X_i / n_i``, b_i the minimiser.

tau full-batch steps move a client by ``-P_i (w - b_i)``, ``P_i = I - (I - eta A_i)^tau``; the server rests
where ``sum_i n_i P_i (mu - b_i) = 0``, so ``mu* = (sum_i n_i P_i)^-1 sum_i n_i P_i b_i``. That is not the
pooled minimiser unless tau = 1, where ``n_i P_i = eta X_i'X_i``.
"""

from functools import cache

import jax
import numpy as np
import pytest
from oracle_setup import least_squares, on_host, simulation, stack

from jaxpfl import ExecutionPlan

D, SIZES, ETA, ROUNDS = 3, (8, 12, 25), 0.3, 600


@cache
def examples() -> list[tuple[np.ndarray, np.ndarray]]:
    """Clients whose curvatures and minimisers differ."""
    rng = np.random.default_rng(2)
    made = []
    for n in SIZES:
        x = rng.normal(size=(n, D)) * rng.uniform(0.6, 1.4, size=D)
        made.append((x, x @ rng.normal(size=D) + 0.3 * rng.normal(size=n)))
    return made


def reached(tau: int) -> np.ndarray:
    with jax.enable_x64(True):
        made = simulation(
            "fedavg",
            stack(examples(), examples(), (5, 1, 2)),
            {"lr": ETA, "lr_decay": 1.0, "weight_decay": 0.0},
            task=least_squares(D),
            steps=tau,
            plan=ExecutionPlan(rounds_per_call=ROUNDS),
        )
        return on_host(made.advance(made.init([0]), ROUNDS)[0]).server


def fixed_point(tau: int, weights: tuple[float, ...]) -> np.ndarray:
    left, right = np.zeros((D, D)), np.zeros(D)
    for (x, y), weight in zip(examples(), weights, strict=True):
        a, b = x.T @ x / len(y), np.linalg.solve(x.T @ x, x.T @ y)
        p = np.eye(D) - np.linalg.matrix_power(np.eye(D) - ETA * a, tau)
        left, right = left + weight * p, right + weight * p @ b
    return np.linalg.solve(left, right)


@pytest.mark.parametrize("tau", [2, 5])
def test_closed_form(tau):
    mu = reached(tau)
    np.testing.assert_allclose(mu, fixed_point(tau, SIZES), rtol=1e-9)
    # A uniform mean would come to rest elsewhere, and so does gradient descent on the pooled examples.
    assert np.abs(mu - fixed_point(tau, (1,) * len(SIZES))).max() > 1e-3
    assert np.abs(mu - fixed_point(1, SIZES)).max() > 1e-3


def test_one_step_reaches_the_pooled_minimiser():
    """tau = 1: ``argmin_w sum_i |X_i w - y_i|^2``."""
    x, y = (np.concatenate(parts) for parts in zip(*examples(), strict=True))
    np.testing.assert_allclose(reached(1), np.linalg.lstsq(x, y, rcond=None)[0], rtol=1e-9)
