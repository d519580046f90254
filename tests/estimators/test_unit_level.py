"""The nested-error regression beside dense generalised least squares, statsmodels, and its stated errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from scipy import optimize

from jaxpfl.estimators.empirical_bayes import unit_level
from jaxpfl.support.errors import JaxpflError

pytestmark = pytest.mark.usefixtures("x64")


def samples(m: int = 12, seed: int = 0, between: float = 1.0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 7, m)
    client = np.repeat(np.arange(m), sizes)
    rng.shuffle(client)
    x = np.stack([rng.normal(5, 2, len(client)), rng.uniform(size=m)[client]], axis=1)  # of samples, and of clients
    v = between**0.5 * rng.normal(size=m)
    return 100 + x @ [3.0, -2.0] + v[client] + 0.8 * rng.normal(size=len(client)), x, client, v


class Dense:
    """Everything by matrices of all samples, and derivatives by differences."""

    def __init__(self, y: np.ndarray, x: np.ndarray, client: np.ndarray, restricted: bool):
        self.y, self.X = y, np.column_stack([np.ones(len(y)), x])
        self.Z = np.eye(client.max() + 1)[client]
        self.restricted = restricted

    def gls(self, v2: float, e2: float) -> tuple[np.ndarray, ...]:
        inverse = np.linalg.inv(v2 * self.Z @ self.Z.T + e2 * np.eye(len(self.y)))
        phi = np.linalg.inv(self.X.T @ inverse @ self.X)
        beta = phi @ self.X.T @ inverse @ self.y
        return inverse, phi, beta, self.y - self.X @ beta

    def log_likelihood(self, v2: float, e2: float) -> float:
        inverse, phi, _, r = self.gls(v2, e2)
        n, p = self.X.shape
        value = np.linalg.slogdet(inverse)[1] - r @ inverse @ r
        if self.restricted:  # of contrasts in an orthonormal basis of the complement of X
            value += np.linalg.slogdet(phi)[1] + np.linalg.slogdet(self.X.T @ self.X)[1]
        return (value - (n - p * self.restricted) * np.log(2 * np.pi)) / 2

    def information(self, v2: float, e2: float) -> np.ndarray:
        inverse = self.gls(v2, e2)[0]
        parts = [inverse @ self.Z @ self.Z.T, inverse]
        return np.array([[np.trace(a @ b) for b in parts] for a in parts]) / 2

    def predictor(self, v2: float, e2: float, of: np.ndarray) -> tuple[np.ndarray, ...]:
        """Predictions, gamma-like weights [m, N], g1 and g2."""
        inverse, phi, beta, r = self.gls(v2, e2)
        weights = v2 * self.Z.T @ inverse
        d = of - weights @ self.X
        m = self.Z.shape[1]
        g1 = np.diag(v2 * np.eye(m) - v2 * weights @ self.Z)
        return of @ beta + weights @ r, weights, g1, np.einsum("ip,pq,iq->i", d, phi, d)


def by_differences(function: Any, at: np.ndarray) -> np.ndarray:
    found = []
    for k in range(len(at)):
        step = np.eye(len(at))[k] * 1e-5 * at[k]
        found.append((function(*(at + step)) - function(*(at - step))) / (2 * step[k]))
    return np.stack(found)


def test_all_of_it_by_dense_matrices():
    y, x, client, _ = samples()
    of = np.column_stack([np.full(12, 4.0), np.linspace(0, 1, 12)])
    found = unit_level(y, x, client, population=of)
    dense = Dense(y, x, client, restricted=True)
    best = optimize.minimize(
        lambda log: -dense.log_likelihood(*np.exp(log)), [0.0, 0.0], method="Nelder-Mead",
        options={"xatol": 1e-9, "fatol": 1e-12},
    )  # fmt: skip
    np.testing.assert_allclose([found.between, found.within], np.exp(best.x), rtol=1e-6)
    np.testing.assert_allclose(found.log_likelihood, -best.fun, rtol=1e-10)
    at = np.array([float(found.between), float(found.within)])
    inverse, phi, beta, _ = dense.gls(*at)
    np.testing.assert_allclose(found.beta, beta, rtol=1e-8)
    np.testing.assert_allclose(found.beta_covariance, phi, rtol=1e-7)
    mean, _, g1, g2 = dense.predictor(*at, np.column_stack([np.ones(12), of]))
    np.testing.assert_allclose(found.mean, mean, rtol=1e-9)
    np.testing.assert_allclose(found.g1, g1, rtol=1e-7)
    np.testing.assert_allclose(found.g2, g2, rtol=1e-7)
    # g3 is the trace of the weights' slopes, V, and the inverse information.
    slopes = by_differences(lambda *at: dense.predictor(*at, np.zeros((12, 3)))[1], at)  # [2, m, N]
    V = np.linalg.inv(inverse)
    spread = np.linalg.inv(dense.information(*at))
    g3 = np.einsum("ain,nk,bik,ab->i", slopes, V, slopes, spread)
    np.testing.assert_allclose(found.g3, g3, rtol=1e-6)
    mse = g1 + g2 + 2 * g3
    np.testing.assert_allclose(found.mse, mse, rtol=1e-6)
    none = optimize.minimize_scalar(lambda log: -dense.log_likelihood(0.0, np.exp(log)), bounds=(-5, 5))
    np.testing.assert_allclose(found.ratio, 2 * (none.fun - best.fun), rtol=1e-6)


@pytest.mark.slow
def test_units_and_names():
    y, x, client, _ = samples()
    plain = unit_level(y, x, client)
    other = unit_level(1e3 * y + 7, x * [10, 1], client)
    np.testing.assert_allclose(other.mean, 1e3 * plain.mean + 7, rtol=1e-9)
    np.testing.assert_allclose(other.mse, 1e6 * plain.mse, rtol=1e-6)
    named = unit_level(y, x, [f"c{i:02}" for i in client])
    assert list(named.to_frame(0.9).index) == [f"c{i:02}" for i in range(12)]
    np.testing.assert_array_equal(named.mean, plain.mean)
    means = np.stack([x[client == i].mean(axis=0) for i in range(12)])
    np.testing.assert_allclose(unit_level(y, x, client, population=means).mean, plain.mean, rtol=1e-10)


@pytest.mark.slow
def test_clients_without_spread_and_coverage():
    # Intervals of 400 files of 30 clients: 95 % but for the error of a share of 12,000, 4 standard errors of it.
    rng = np.random.default_rng(3)
    client, x = np.repeat(np.arange(30), 4), rng.normal(size=120)
    theta = rng.normal(size=(400, 30))
    y = 1 + 2 * x + theta[:, client] + rng.normal(size=(400, 120))
    nothing = np.full((1, 120), np.nan)
    every = jnp.asarray(np.concatenate([y, nothing]))
    found = jax.vmap(lambda y: unit_level(y, x, client, population=jnp.zeros(30), clients=30))(every)
    alone = unit_level(y[0], x, client, population=np.zeros(30))
    np.testing.assert_allclose(found.mean[0], alone.mean, rtol=1e-9)
    assert np.isnan(found.mean[-1]).all()
    found = jax.tree.map(lambda of: of[:-1], found)
    low, high = (np.asarray(of) for of in found.interval())
    inside = ((low < 1 + theta) & (1 + theta < high)).mean()
    assert abs(inside - 0.95) < 4 * (0.95 * 0.05 / 12_000) ** 0.5 + 0.005  # .005 of the approximation to order 1/m
    error = ((np.asarray(found.mean) - 1 - theta) ** 2).mean()
    np.testing.assert_allclose(error, np.asarray(found.mse).mean(), rtol=0.05)
    alike = unit_level(np.tile([1.0, -1.0], 20), np.tile([1.0, 1.0, -1.0, -1.0], 10), np.arange(40) // 4)
    assert alike.between == 0
    assert alike.p_value == 1
    assert (alike.mse > 0).all()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (([1, 2, 3], [1, 2, 3], [0, 1, 2]), "at least one client must have two samples"),
        (([1, 2, 3, 4], [1, 2, 3, 5], [0, 0, 1, 1]), "at least 3 clients are required to estimate their spread, got 2"),
        (([1, 2, np.nan], [1, 2, 3], [0, 1, 2]), "y must be finite, got nan for sample 2"),
        (([1, 2, 3], [1, 2], [0, 1, 2]), "x must have a row for each of the 3 samples"),
        (([1, 2, 3, 4], [5, 5, 5, 5], [0, 0, 1, 2]), "x's column 0 is a linear combination of the columns before it"),
        (([1, 2, 3, 4], [1, 2, 3, 4], [0, 0, 1]), r"client must have one entry for each of the 4 samples"),
        (([1, 2, 3, 5, 4, 9], np.eye(3)[[0, 0, 1, 1, 2, 2], :2], [0, 0, 1, 1, 2, 2]), "x has too many columns that"),
        (([2, 4, 6, 10, 8, 4], [1, 2, 3, 5, 4, 2], [0, 0, 1, 1, 2, 2]), "y must vary about the regression"),
    ],
)
def test_samples_that_tell_too_little_are_refused(args: Any, said: str):
    with pytest.raises(JaxpflError, match=said):
        unit_level(*args)
    with pytest.raises(JaxpflError, match="population must be an array"):
        unit_level(*samples()[:3], population=pd.DataFrame(np.zeros((12, 2))))
