"""Intervals of the area model over its spread: beside quadrature in NumPy, and their coverage."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from jaxpfl.estimators.empirical_bayes import fay_herriot
from jaxpfl.support.errors import JaxpflError


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def data(m: int, spread: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    s, z = rng.uniform(0.5, 1.5, m), rng.normal(size=(m, 1))
    return 100 + z[:, 0] + spread * rng.normal(size=m) + s * rng.normal(size=m), s, z


@pytest.mark.parametrize("m", [5, 12])
def test_ends_are_quantiles_of_the_posterior_by_quadrature(m):
    """With the least number of clients the density of A falls as A^(-3/2)."""
    x, s, z = data(m, 0.4)
    design = np.hstack([np.ones((m, 1)), z])
    low, high = fay_herriot(x, s, z).interval(0.9)

    def at(A: float) -> tuple[float, np.ndarray, np.ndarray]:
        """Restricted likelihood, and means and deviations of all theta, by dense matrices."""
        weight = np.diag(1 / (A + s**2))
        precision = design.T @ weight @ design
        beta = np.linalg.solve(precision, design.T @ weight @ x)
        r = x - design @ beta
        likelihood = np.exp(-(r @ weight @ r) / 2) * (np.linalg.det(weight) / np.linalg.det(precision)) ** 0.5
        B = np.diag(s**2 / (A + s**2))
        covariance = A * B + B @ design @ np.linalg.inv(precision) @ design.T @ B
        return likelihood, x - B @ r, np.diag(covariance) ** 0.5

    def below(A: float, ends: np.ndarray) -> np.ndarray:
        likelihood, mean, sd = at(A)
        return likelihood * np.append(1.0, stats.norm.cdf((ends - mean) / sd))

    for ends, p in ((np.asarray(low), 0.05), (np.asarray(high), 0.95)):
        # A = e^u, of which the far tail counts with five clients.
        whole = integrate.quad_vec(lambda u, ends=ends: np.exp(u) * below(np.exp(u), ends), -25, 40, epsabs=1e-12)[0]
        np.testing.assert_allclose(whole[1:] / whole[0], p, atol=2e-4 if m == 5 else 1e-6)


def test_units_and_shifts_change_nothing():
    x, s, z = data(8, 1.0)
    first = np.stack(fay_herriot(x, s, z).interval(0.9))
    np.testing.assert_allclose(np.stack(fay_herriot(1e30 * x, 1e30 * s, z).interval(0.9)), 1e30 * first, rtol=1e-9)
    moved = fay_herriot(x + 1000 * z[:, 0], s, z).interval(0.9)
    np.testing.assert_allclose(np.stack(moved) - 1000 * z[:, 0], first, rtol=1e-8)


def test_an_unknown_kind_of_interval_is_refused():
    with pytest.raises(JaxpflError, match="unknown by 'mean': did you mean"):
        fay_herriot(*data(8, 1.0)).interval(by="mean")  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_intervals_cover_where_the_spread_is_small():
    """1000 files of 15 clients with A = .3, s from .5 to 1.5. The bounds of 4.9 standard errors between files are
    passed by chance once in 1e6: the integrated ones cover at least nominally, those by the mean squared error do not.
    """
    m, files = 15, 1000
    _, s, z = data(m, 0.0)
    rng = np.random.default_rng(1)
    theta = z[:, 0] + 0.3**0.5 * rng.normal(size=(files, m))
    x = jnp.asarray(theta + s * rng.normal(size=(files, m)))
    found = jax.jit(jax.vmap(lambda x: fay_herriot(x, jnp.asarray(s), jnp.asarray(z))))(x)

    def coverage(by) -> tuple[float, float]:
        low, high = jax.jit(jax.vmap(lambda of: of.interval(0.95, by)))(found)
        each = np.asarray((low <= theta) & (theta <= high)).mean(axis=1)
        return each.mean(), 4.9 * each.std() / files**0.5

    covered, margin = coverage("integrated")
    assert covered > 0.95 - margin
    covered, margin = coverage("mse")
    assert covered < 0.95 - margin
