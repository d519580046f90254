"""Fits to more clients than are climbed to at once, beside SciPy's optimisers, and the tails that they are made of."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special, stats

from jaxpfl.estimators import ebnm
from jaxpfl.estimators.normal_means import simplex, tails
from jaxpfl.estimators.normal_means.bins import MANY, binned


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def data(rare: float = 0.2, far: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    m = MANY + 100
    s = rng.uniform(0.5, 1.5, m)
    return np.where(rng.random(m) < rare, far * rng.normal(size=m), 0.0) + s * rng.normal(size=m), s


def laplace(x: np.ndarray, s: np.ndarray, scale: float) -> np.ndarray:
    """Density of a Laplace variable with normal noise, by the scaled complementary error function."""
    halves = (special.erfcx((s / scale - sign * x / s) / 2**0.5) for sign in (1, -1))
    return sum(halves) * np.exp(-((x / s) ** 2) / 2) / (4 * scale)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prior", "rare", "far"),
    [
        ("point-normal", 0.002, 30.0),  # a slab of some thirty clients
        pytest.param("point-normal", 0.2, 2.0, marks=pytest.mark.slow),
        pytest.param("point-laplace", 0.2, 2.0, marks=pytest.mark.slow),
    ],
)
def test_fits_from_bins_are_those_of_nelder_and_mead(prior, rare, far):
    x, s = data(rare, far)

    def minus(at: np.ndarray) -> float:
        null, scale = special.expit(at[0]), np.exp(at[1])
        slab = stats.norm.pdf(x, 0, np.hypot(s, scale)) if prior == "point-normal" else laplace(x, s, scale)
        return -np.log(null * stats.norm.pdf(x, 0, s) + (1 - null) * slab).sum()

    start = [special.logit(1 - rare), np.log(far)]
    best: Any = optimize.minimize(minus, start, method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-8})
    found: Any = ebnm(x, s, prior=prior)
    np.testing.assert_allclose(found.log_marginal, -best.fun, rtol=1e-12)
    null = found.prior.weights[0] if prior == "point-normal" else found.prior.null
    np.testing.assert_allclose(special.logit(float(null)), best.x[0], atol=1e-4)


@pytest.mark.slow
def test_the_normal_fit_from_bins_is_that_of_a_scalar_optimiser():
    x, s = data()

    def minus(log_t: float) -> float:
        w = 1 / (s**2 + np.exp(2 * log_t))
        return -stats.norm.logpdf(x, w @ x / w.sum(), w**-0.5).sum()

    best: Any = optimize.minimize_scalar(minus, bounds=(-6, 4), method="bounded", options={"xatol": 1e-10})
    found: Any = ebnm(x, s)
    np.testing.assert_allclose(found.log_marginal, -best.fun, rtol=1e-13)
    np.testing.assert_allclose(found.prior.sds[0], np.exp(best.x), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("prior", ["scale-mixture", "npmle"])
def test_weights_from_bins_are_the_likeliest_of_all_clients(prior):
    """Kiefer and Wolfowitz's condition on all clients in NumPy, and the weights that are found without bins."""
    x, s = data()
    found: Any = ebnm(x, s, prior=prior, components=40)
    L = stats.norm.pdf(x[:, None], found.prior.means, np.hypot(s[:, None], found.prior.sds))
    slack = (L / (L @ np.asarray(found.prior.weights))[:, None]).mean(axis=0).max() - 1
    assert slack < 1e-8
    np.testing.assert_allclose(found.slack, slack, atol=1e-10)
    alone, _ = simplex.weights(jnp.log(jnp.asarray(L)))
    np.testing.assert_allclose(found.log_marginal, np.log(L @ np.asarray(alone)).sum(), rtol=1e-9)


def test_similar_clients_change_the_way_and_not_the_weights():
    x = np.random.default_rng(0).normal(size=(300, 1))
    grid = np.linspace(-3, 3, 8)
    L = jnp.asarray(stats.norm.pdf(x, grid))
    similar = jnp.asarray(stats.norm.logpdf(x.round(1), grid))
    pi, slack = simplex.weights(similar, ratios=lambda pi: (L / (L @ pi)[:, None]).mean(axis=0))
    assert slack < 1e-8
    np.testing.assert_allclose((L / (L @ pi)[:, None]).mean(axis=0).max() - 1, slack, atol=1e-12)
    rounded = jnp.exp(similar)
    assert (rounded / (rounded @ pi)[:, None]).mean(axis=0).max() - 1 > 1e-6  # of the others they are not the likeliest


def test_bins_keep_weights_and_means():
    x, s = (jnp.asarray(of) for of in data())
    w = jnp.arange(len(x)) / jnp.arange(len(x)).sum()
    own, errors, weights = binned(x, s, w)
    np.testing.assert_allclose(weights.sum(), 1.0)
    np.testing.assert_allclose(weights @ own, w @ x, rtol=1e-9)
    np.testing.assert_allclose(weights @ errors, w @ s, rtol=1e-9)
    alike = binned(jnp.ones(5), jnp.ones(5), jnp.full(5, 0.2))
    np.testing.assert_allclose(alike[2].max(), 1.0)


@pytest.mark.slow
def test_tails_are_those_of_continued_fractions():
    t = np.array([0.0, 1e-9, 0.3, 1, 2.5, 4, 7, 30, 1e4, 1e12])
    found = tails.truncated(jnp.asarray(t))
    above = t >= 1
    e = np.zeros(above.sum())
    for level in range(2000, 1, -1):
        e = level / (t[above] + e)
    d = 1 / (t[above] + e)
    np.testing.assert_allclose(found.excess[above], d, rtol=1e-14)
    np.testing.assert_allclose(found.variance[above], d * (e - d), rtol=1e-13)
    both = np.concatenate([-t[:-2], t])  # the square of the others leaves no digits
    mills = np.where(
        both < 0, stats.norm.logsf(both) + both**2 / 2, np.log(special.erfcx(np.maximum(both, 0) / 2**0.5) / 2)
    )
    np.testing.assert_allclose(tails.log_mills(jnp.asarray(both)), mills, rtol=1e-14)
    slope = jax.vmap(jax.grad(tails.log_mills))(jnp.asarray(both))
    np.testing.assert_allclose(slope, -tails.truncated(jnp.asarray(both)).excess)
    curve = jax.vmap(jax.grad(jax.grad(tails.log_mills)))(jnp.asarray(both))
    np.testing.assert_allclose(curve, tails.truncated(jnp.asarray(both)).variance)
    short = np.linspace(-3, 6, 19)
    steps = (tails.log_mills(jnp.asarray(short + 1e-5)) - tails.log_mills(jnp.asarray(short - 1e-5))) / 2e-5
    np.testing.assert_allclose(-tails.truncated(jnp.asarray(short)).excess, steps, rtol=1e-7)
