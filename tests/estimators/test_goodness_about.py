"""Tests of the fit about a regression and in groups: residuals and p-values beside NumPy's, their level and power."""

from collections.abc import Callable
from typing import Any

import area_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, stats

from jaxpfl.errors import JaxpflError
from jaxpfl.estimators import ebnm_groups, fay_herriot, pictures
from jaxpfl.estimators.normal_means import goodness_about, goodness_in_groups


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def statistic(z: np.ndarray) -> float:
    """Anderson and Darling's, of the textbook."""
    u, i, m = stats.norm.cdf(np.sort(z)), np.arange(1, len(z) + 1), len(z)
    return -m - ((2 * i - 1) * (np.log(u) + np.log1p(-u[::-1]))).sum() / m


def regressed(m: int = 30, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, s and z with its column of ones, one client of which is far from the others in z."""
    rng = np.random.default_rng(seed)
    z = np.column_stack([np.ones(m), rng.normal(size=m)])
    z[0, 1] = 12
    s = rng.uniform(0.4, 1.5, m)
    return z @ [1.0, 2.0] + 0.8 * rng.standard_t(4, m) + s * rng.normal(size=m), s, z


def about_others(x: np.ndarray, s: np.ndarray, z: np.ndarray, A: float) -> np.ndarray:
    """Each client's distance to its prediction from all others, over the root of that distance's variance."""
    found = []
    for i in range(len(x)):
        rest = np.arange(len(x)) != i
        covariance = np.linalg.inv((z[rest].T / (A + s[rest] ** 2)) @ z[rest])
        beta = covariance @ (z[rest].T @ (x[rest] / (A + s[rest] ** 2)))
        found.append((x[i] - z[i] @ beta) / np.sqrt(A + s[i] ** 2 + z[i] @ covariance @ z[i]))
    return np.array(found)


def restricted(x: np.ndarray, s: np.ndarray, z: np.ndarray) -> float:
    """The likeliest A by REML, from the textbook's determinant, on a grid and then by Brent's method."""

    def minus(root: float) -> float:
        w = 1 / (root**2 + s**2)
        C = (z.T * w) @ z
        r = x - z @ np.linalg.solve(C, z.T @ (w * x))
        return -np.log(w).sum() + np.linalg.slogdet(C)[1] + w @ r**2

    grid = np.linspace(0, 6, 61)
    at = grid[np.argmin([minus(root) for root in grid])]
    best: Any = optimize.minimize_scalar(minus, bounds=(max(at - 0.1, 0), at + 0.1), method="bounded")
    return 0.0 if minus(0) <= best.fun else float(best.x**2)


def test_residuals_have_the_leverage_of_the_regression():
    x, s, z = regressed()
    found, true = fay_herriot(x, s, z[:, 1]), area_reference.area(x, s, z, "reml")
    expected = about_others(x, s, z, true.variance)
    np.testing.assert_allclose(found.residual, expected, rtol=1e-5)
    without = (x - z @ true.beta) / np.sqrt(true.variance + s**2)
    assert abs(without[0]) < 0.5 * abs(expected[0])  # the client far out in z draws the line to itself
    test = goodness_about(jax.random.key(0), x, s, z[:, 1], draws=1)
    np.testing.assert_allclose(test.statistic, statistic(expected), rtol=1e-5)


@pytest.mark.slow
def test_a_p_value_about_a_regression_is_that_of_numpy():
    """300 files refitted in NumPy beside 999: four standard errors, a false alarm in 6e-5 of the seeds."""
    x, s, z = regressed()
    rng = np.random.default_rng(1)
    A = restricted(x, s, z)
    own = statistic(about_others(x, s, z, A))
    drawn = [np.sqrt(A + s**2) * rng.normal(size=len(x)) for _ in range(300)]
    by_hand = np.mean([statistic(about_others(of, s, z, restricted(of, s, z))) >= own for of in drawn])
    test = goodness_about(jax.random.key(0), x, s, z[:, 1], draws=999)
    assert 0.02 < by_hand < 0.98  # neither end, where all would agree
    assert abs(test.p_value - by_hand) < 4 * np.sqrt(by_hand * (1 - by_hand) * (1 / 300 + 1 / 1000))


def of_variance(x: np.ndarray, s: float, within: float, between: float) -> tuple[np.ndarray, np.ndarray]:
    """Residuals of the clients and groups of a balanced file x [G, k], by dense matrices."""
    G, k = x.shape
    V = (within + s**2) * np.eye(G * k) + between * np.kron(np.eye(G), np.ones((k, k)))
    inverse = np.linalg.inv(V)
    ones = np.ones(G * k)
    P = inverse - np.outer(inverse @ ones, inverse @ ones) / (ones @ inverse @ ones)
    own = between + (within + s**2) / k
    of_groups = (x.mean(axis=1) - x.mean()) / np.sqrt(own * (1 - 1 / G))
    return (P @ x.ravel()) / np.sqrt(np.diag(P)), of_groups


def analysis(x: np.ndarray, s: float) -> tuple[float, float]:
    """Spreads within and between groups of a balanced file by the analysis of variance: REML where both are above 0."""
    G, k = x.shape
    within = ((x - x.mean(axis=1, keepdims=True)) ** 2).sum() / (G * (k - 1))
    between = k * x.mean(axis=1).var(ddof=1)
    assert within > s**2
    assert between > within
    return within - s**2, (between - within) / k


@pytest.mark.slow
def test_statistics_in_groups_are_those_of_dense_matrices():
    rng = np.random.default_rng(0)
    x = 3 * rng.normal(size=(8, 1)) + 1.5 * rng.normal(size=(8, 5))
    expected = of_variance(x, 0.5, *analysis(x, 0.5))
    group = np.repeat(np.arange(8), 5)
    test = goodness_in_groups(jax.random.key(0), x.ravel(), 0.5, group, draws=1)
    np.testing.assert_allclose(test.clients.statistic, statistic(expected[0]), rtol=1e-5)
    np.testing.assert_allclose(test.groups.statistic, statistic(expected[1]), rtol=1e-5)


@pytest.mark.slow
def test_p_values_in_groups_are_those_of_numpy():
    """1000 balanced files by the analysis of variance beside 499: four standard errors, a false alarm in 2e-4."""
    rng = np.random.default_rng(3)
    G, k, s = 12, 5, 0.5
    x = 4 * rng.standard_t(6, (G, 1)) + 1.5 * rng.standard_t(6, (G, k))
    spreads = analysis(x, s)
    own = [statistic(of) for of in of_variance(x, s, *spreads)]
    sd = [np.sqrt(spreads[1]), np.sqrt(spreads[0] + s**2)]
    drawn = [sd[0] * rng.normal(size=(G, 1)) + sd[1] * rng.normal(size=(G, k)) for _ in range(1000)]
    others = np.array([[statistic(of) for of in of_variance(x, s, *analysis(x, s))] for x in drawn])
    found = goodness_in_groups(jax.random.key(0), x.ravel(), s, np.repeat(np.arange(G), k), draws=499)
    for test, by_hand in zip(found, (others >= own).mean(axis=0), strict=True):
        assert 0.02 < by_hand < 0.98
        assert abs(test.p_value - by_hand) < 4 * np.sqrt(by_hand * (1 - by_hand) * (1 / 1000 + 1 / 500))


@pytest.mark.slow
def test_a_wrong_family_about_a_regression_is_found_and_a_right_one_is_not():
    """Two kinds of clients about one line; of normal ones a p-value of 1/20 comes once in 20 seeds."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=80)
    call = jax.jit(lambda key, x: goodness_about(key, x, 0.5, jnp.asarray(z), draws=19))
    right = 2 * z + rng.normal(size=80) + 0.5 * rng.normal(size=80)
    assert call(jax.random.key(0), jnp.asarray(right)).p_value > 1 / 20
    wrong = 2 * z + rng.choice([-3.0, 3.0], 80) + 0.5 * rng.normal(size=80)
    np.testing.assert_allclose(call(jax.random.key(1), jnp.asarray(wrong)).p_value, 1 / 20)
    gross = right.copy()
    gross[7] += 15
    np.testing.assert_allclose(call(jax.random.key(2), jnp.asarray(gross)).p_value, 1 / 20)
    assert pictures.far_out(np.asarray(fay_herriot(gross, 0.5, z).residual)).nonzero()[0].tolist() == [7]
    assert np.isnan(call(jax.random.key(3), jnp.asarray(right).at[0].set(jnp.nan)).p_value)


@pytest.mark.slow
def test_wrong_groups_are_found_apart_from_wrong_clients():
    """Groups of two kinds with normal clients, and normal groups with a gross client; 1/20 in 5 % of seeds if right."""
    rng = np.random.default_rng(1)
    group = np.repeat(np.arange(40), 4)
    errors = rng.normal(size=160)
    call = jax.jit(lambda key, x: goodness_in_groups(key, x, 0.5, jnp.asarray(group), groups=40, draws=19))
    kinds = call(jax.random.key(0), jnp.asarray(rng.choice([-4.0, 4.0], 40)[group] + errors))
    np.testing.assert_allclose(kinds.groups.p_value, 1 / 20)
    assert kinds.clients.p_value > 1 / 20
    normal = rng.normal(size=40)[group] + errors
    right = call(jax.random.key(1), jnp.asarray(normal))
    assert min(right.clients.p_value, right.groups.p_value) > 1 / 20
    normal[9] += 12
    gross = call(jax.random.key(2), jnp.asarray(normal))
    np.testing.assert_allclose(gross.clients.p_value, 1 / 20)
    far = pictures.far_out(np.asarray(ebnm_groups(normal, 0.5, group).residual))
    assert far.nonzero()[0].tolist() == [9]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["regression", "groups"])
@pytest.mark.parametrize("spread", [0.0, 0.7])
def test_the_level_is_as_stated(model: str, spread: float):
    """200 files from the model: p-values of at most .2 are 40 on average, 21 to 61 in all but 5e-4 of the seeds, and
    with an outlying client at most 10 on average, 22 in all but 2e-4. Without spread A is zero in half of the fits."""
    rng = np.random.default_rng(0)
    s, z, group = rng.uniform(0.5, 1.5, 30), jnp.asarray(rng.normal(size=(30, 2))), jnp.asarray(np.arange(30) % 10)
    x = spread * rng.normal(size=(200, 30)) + s * rng.normal(size=(200, 30))
    s = jnp.asarray(s)

    def about(key: Any, x: Any) -> tuple[Any, ...]:
        return (goodness_about(key, x, s, z, draws=19).p_value,), fay_herriot(x, s, z).residual

    def in_groups(key: Any, x: Any) -> tuple[Any, ...]:
        found = goodness_in_groups(key, x, s, group, groups=10, draws=19)
        return (found.clients.p_value, found.groups.p_value), ebnm_groups(x, s, group, groups=10).residual

    call: Callable[..., Any] = about
    if model == "groups":
        call, x = in_groups, x + rng.normal(size=(200, 10))[:, np.asarray(group)]
    tests, residuals = jax.jit(jax.vmap(call))(jax.random.split(jax.random.key(0), 200), jnp.asarray(x))
    for p_values in tests:
        assert 21 <= (np.asarray(p_values) <= 0.2 + 1e-9).sum() <= 61
    assert sum(pictures.far_out(own).any() for own in np.asarray(residuals)) <= 22


def test_bad_arguments_are_refused_in_a_line():
    key = jax.random.key(0)
    with pytest.raises(JaxpflError, match="draws must be a whole number of at least 1, got 0"):
        goodness_about(key, np.arange(6.0), 1.0, np.arange(6.0) ** 2, draws=0)
    with pytest.raises(JaxpflError, match=r"draws must be a whole number of at least 1, got 1\.5"):
        goodness_in_groups(key, np.arange(6.0), 1.0, [0, 0, 1, 1, 2, 2], draws=1.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(JaxpflError, match="unknown fit 'mle'"):
        goodness_about(key, np.arange(6.0), 1.0, np.arange(6.0) ** 2, fit="mle")  # pyright: ignore[reportArgumentType]
