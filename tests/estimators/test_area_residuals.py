"""Standardised residuals about a regression and in groups: values beside NumPy's, and the level of the outlier test."""

import area_reference
import jax
import numpy as np
import pytest

from jaxpfl.estimators.empirical_bayes import ebnm_groups, fay_herriot


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


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


def test_residuals_have_the_leverage_of_the_regression():
    x, s, z = regressed()
    found, true = fay_herriot(x, s, z[:, 1]), area_reference.area(x, s, z, "reml")
    expected = about_others(x, s, z, true.variance)
    np.testing.assert_allclose(found.residual, expected, rtol=1e-5)
    without = (x - z @ true.beta) / np.sqrt(true.variance + s**2)
    assert abs(without[0]) < 0.5 * abs(expected[0])  # the client far out in z draws the line to itself


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
def test_residuals_in_groups_equal_those_of_dense_matrices():
    rng = np.random.default_rng(0)
    x = 3 * rng.normal(size=(8, 1)) + 1.5 * rng.normal(size=(8, 5))
    clients, groups = of_variance(x, 0.5, *analysis(x, 0.5))
    found = ebnm_groups(x.ravel(), 0.5, np.repeat(np.arange(8), 5))
    np.testing.assert_allclose(found.residual, clients, rtol=1e-5)
    np.testing.assert_allclose(found.group_residual, groups, rtol=1e-5)
