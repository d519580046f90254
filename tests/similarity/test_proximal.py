"""Proximal operators against scipy's general solver, and the projection onto the dual ball that they leave over."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from jaxpfl.similarity import admm
from jaxpfl.support.errors import JaxpflError

NORMS = [1, 2, math.inf]
DUAL = {1: math.inf, 2: 2, math.inf: 1}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def by_solver(v: np.ndarray, kappa: float, p: float) -> np.ndarray:
    """The minimum over (w, t) of kappa sum t + |w - v|^2 / 2 under the constraints that make sum t the norm of w."""
    d = len(v)
    number = d if p == 1 else 1

    def objective(a):
        return kappa * a[d:].sum() + ((a[:d] - v) ** 2).sum() / 2

    def slope(a):
        return np.concatenate([a[:d] - v, np.full(number, kappa)])

    if p == 2:
        bounds = [
            {"type": "ineq", "fun": lambda a: a[d] ** 2 - (a[:d] ** 2).sum()},
            {"type": "ineq", "fun": lambda a: a[d]},
        ]
    else:
        bounds = [{"type": "ineq", "fun": lambda a, sign=sign: a[d:] + sign * a[:d]} for sign in (1, -1)]
    size = np.abs(v) if p == 1 else np.atleast_1d(np.linalg.norm(v, p))
    options = {"ftol": 1e-15, "maxiter": 500}
    start = np.concatenate([v, 1.1 * size + 0.1])
    return optimize.minimize(objective, start, jac=slope, constraints=bounds, method="SLSQP", options=options).x[:d]


@pytest.mark.parametrize("p", NORMS)
def test_it_is_the_solvers_minimum(p):
    rng = np.random.default_rng(0)
    zero = 0
    for _ in range(30):
        v, kappa = rng.normal(size=5), rng.uniform(0.1, 1.5)
        got = np.asarray(admm.prox(jnp.asarray(v), kappa, p))
        np.testing.assert_allclose(got, by_solver(v, kappa, p), atol=2e-6)
        zero += not got.any()
    assert zero < 30


@pytest.mark.parametrize("p", NORMS)
def test_what_is_left_over_is_the_projection_onto_the_dual_ball(p):
    """v - w is within it; on its border, and of full effect on w, wherever w is not zero: <v - w, w> = kappa |w|."""
    v = jnp.asarray(np.random.default_rng(1).normal(size=(500, 7)))
    kappa = jnp.asarray(np.random.default_rng(2).uniform(0.01, 4, 500))
    w = jax.vmap(lambda v, k: admm.prox(v, k, p))(v, kappa)
    left = v - w
    assert (np.linalg.norm(left, DUAL[p], axis=1) <= np.asarray(kappa) * (1 + 1e-12)).all()
    np.testing.assert_allclose((left * w).sum(axis=1), kappa * admm.norm(w, p), atol=1e-12)
    assert 0 < int((w == 0).all(axis=1).sum()) < 500


@pytest.mark.parametrize("p", NORMS)
def test_the_ends(p):
    v = jnp.array([[1.0, -2.0, 3.0], [0.0, 0.0, 0.0], [2.0, 2.0, -2.0]])
    np.testing.assert_array_equal(admm.prox(v, 0.0, p), v)
    np.testing.assert_array_equal(admm.prox(v, jnp.inf, p), 0 * v)
    # Exactly zero from the dual norm on.
    for row in v:
        radius = float(np.linalg.norm(row, DUAL[p]))
        np.testing.assert_array_equal(admm.prox(row, radius * 1.0001, p), 0 * row)
        assert radius == 0 or np.asarray(admm.prox(row, radius * 0.999, p)).any()


def test_the_printed_formula_is_right_for_two_alone():
    v, kappa = np.array([3.0, -1.0, 0.5]), 0.8
    for p in NORMS:
        printed = max(0, 1 - kappa / np.linalg.norm(v, DUAL[p])) * v
        assert np.allclose(printed, admm.prox(jnp.asarray(v), kappa, p)) == (p == 2)


def test_other_norms_are_refused():
    with pytest.raises(JaxpflError, match=r"^p must be 1, 2 or inf, got 3$"):
        admm.prox(jnp.ones(3), 1.0, 3)
