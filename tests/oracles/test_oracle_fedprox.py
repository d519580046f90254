"""FedProx's client solves ``min_w f(w) + (prox/2) |w - mu|^2`` about the broadcast mu, fixed in the round.

On ``f(w) = (w - b)'A(w - b)/2`` enough steps reach ``w = (A + prox I)^-1 (A b + prox mu)``.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle_setup import least_squares, simulation, stack

D, N, STEPS = 3, 20, 400


@cache
def example() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(N, D))
    return x, x @ rng.normal(size=D) + rng.normal(size=N)


def solved(prox: float, method: str = "fedprox") -> tuple[np.ndarray, np.ndarray]:
    """The broadcast mu, and the model after one round of one client at the rate 1 / (largest curvature)."""
    x, _ = example()
    rate = 1 / (np.linalg.eigvalsh(x.T @ x / N).max() + prox)
    hp = {"lr": rate, "weight_decay": 0.0} | ({"prox": prox} if method == "fedprox" else {})
    with jax.enable_x64(True):
        problem = stack([example()], [example()], [0])
        made = simulation(method, problem, hp, task=least_squares(D), steps=STEPS)
        mu = np.array([2.0, -1.0, 0.5])
        state = made.init([0])._replace(server=jnp.asarray(mu)[None])
        return mu, np.asarray(made.advance(state, 1)[0].server)[0]


@pytest.mark.parametrize("prox", [0.5, 3.0, 1e3])
def test_proximal_point(prox):
    mu, w = solved(prox)
    x, y = example()
    a, b = x.T @ x / N, np.linalg.lstsq(x, y, rcond=None)[0]
    want = np.linalg.solve(a + prox * np.eye(D), a @ b + prox * mu)
    np.testing.assert_allclose(w, want, rtol=1e-9)
    # Were the anchor an alias of the live parameters, the term's gradient prox (w - w) would be zero: w = b.
    assert np.abs(b - want).max() > 0.05


def test_a_strong_term_holds_the_client():
    """``prox (w - mu) -> -grad f(mu)``: the client stays within O(1 / prox) of its anchor."""
    x, y = example()
    for prox in (1e4, 1e6):
        mu, w = solved(prox)
        gradient = x.T @ (x @ mu - y) / N
        np.testing.assert_allclose(prox * (w - mu), -gradient, rtol=10 / prox, atol=10 / prox)


def test_no_term_is_fedavg():
    """``prox = 0``: the same steps as FedAvg's (of one client, whose weight does not matter)."""
    np.testing.assert_allclose(solved(0.0)[1], solved(0.0, "fedavg")[1], rtol=1e-12)
