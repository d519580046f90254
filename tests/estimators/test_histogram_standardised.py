"""Noise of the mean's shape, and a mean that is denoised: against NumPy, and what they gain."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from histogram_reference import FLOOR, algorithm_2, apart, floored, kl, small, users_of
from scipy.stats import norm

from jaxpfl.estimators.histograms import private as histogram_private
from jaxpfl.estimators.histograms.private import GRID, STEPS

COUNTS, _, _, POPULATION = small(seed=5, n=48, d=20)
Q = COUNTS / COUNTS.sum(1, keepdims=True)
MEAN = floored(Q.mean(0))
CENTERS = floored(POPULATION.centers)
USERS = users_of(COUNTS, 16)
denoised = jax.jit(histogram_private.denoised)


def test_denoising_is_em_for_the_prior_and_the_posterior_mean():
    rng = np.random.default_rng(0)
    stddev = rng.uniform(0.001, 0.02, 20)
    noisy = MEAN + stddev * rng.standard_normal(20)
    values = np.exp(np.linspace(math.log(FLOOR), math.log(noisy.max()), GRID))
    own = values * math.log(values[1] / values[0])
    whole = np.sqrt(stddev[:, None] ** 2 + own**2)
    likelihood = norm.pdf(noisy[:, None], values, whole)
    prior = np.full(GRID, 1 / GRID)
    for _ in range(STEPS):
        r = likelihood * prior
        prior = (r / r.sum(1, keepdims=True)).mean(0)
    r = likelihood * prior
    within = (values * stddev[:, None] ** 2 + noisy[:, None] * own**2) / whole**2
    expected = floored((r / r.sum(1, keepdims=True) * within).sum(1))
    made = denoised(jnp.asarray(noisy, jnp.float32), jnp.asarray(stddev, jnp.float32), FLOOR)
    np.testing.assert_allclose(made, expected, rtol=5e-3)


def test_denoising_where_there_is_no_noise_or_nothing_else():
    """Without noise the release is left as it is; one of noise alone gives a distribution."""
    for stddev in (1e-12, 1e-7):
        exact = denoised(jnp.asarray(MEAN, jnp.float32), stddev, FLOOR)
        np.testing.assert_allclose(exact, MEAN, rtol=1e-3)
    noise = 1e6 * np.random.default_rng(0).standard_normal(20)
    for noisy in (noise, -np.abs(noise), np.zeros(20)):
        made = np.asarray(denoised(jnp.asarray(noisy, jnp.float32), 1e6, FLOOR))
        assert np.isfinite(made).all()
        assert made.min() > 0
        assert made.sum() == pytest.approx(1, rel=1e-5)


def test_denoising_saves_most_of_what_noise_costs():
    """Zipf's law under noise of the median token's size, 20 draws: less than a quarter of the floored release's KL in
    each (the draws give 5 to 9 %)."""
    p, rng = floored(1 / np.arange(1, 501)), np.random.default_rng(1)
    stddev = float(np.median(p))
    noisy = p + stddev * rng.standard_normal((20, 500))
    made = np.asarray(jax.vmap(lambda y: denoised(y, stddev, 1e-6))(jnp.asarray(noisy, jnp.float32)), float)
    assert (kl(p, made) < 0.25 * kl(p, floored(noisy, 1e-6))).all()


@pytest.mark.slow
def test_the_noise_is_that_of_each_token():
    """Standard deviations over 4000 draws within 5 standard errors: a false alarm in 1e5 over 40 entries."""
    z, runs = 0.7, 4000
    weights = histogram_private.standard_weights(jnp.asarray(MEAN, jnp.float32))
    np.testing.assert_allclose(weights, (MEAN + 0.1 / 20) ** -0.5, rtol=1e-5)
    centers = jnp.asarray(CENTERS[:2], jnp.float32)
    draw = jax.vmap(lambda key: histogram_private.noisy_sums(key, USERS, centers, weights, z))
    made = jax.jit(draw)(jax.random.split(jax.random.key(0), runs))
    spread = np.asarray(made.sums).std(axis=0) * np.asarray(weights)
    np.testing.assert_allclose(spread, z, rtol=5 / math.sqrt(2 * runs))
    np.testing.assert_allclose(made.masses, made.sums.sum(axis=-1), rtol=1e-3, atol=1e-3)
    norms = np.linalg.norm(np.asarray(weights) * Q, axis=1)
    shares = np.minimum(1, 1 / norms)[:, None] * Q
    near = apart(Q, CENTERS[:2]).argmin(1)
    expected = np.stack([shares[near == j].sum(0) for j in range(2)])
    deviation = 5 * z / np.asarray(weights) / math.sqrt(runs)
    assert (np.abs(np.asarray(made.sums).mean(0) - expected) < deviation).all()


@pytest.mark.slow
@pytest.mark.parametrize("clusters", [1, 3])
def test_without_noise_it_is_algorithm_2_on_users_of_equal_norm(clusters, monkeypatch):
    """At a norm that no user reaches; one cluster is the mean."""
    monkeypatch.setattr(histogram_private, "REACH", 100.0)
    none = 1e-6
    first = histogram_private.release_of_all(jax.random.key(0), USERS, radius=1.0, noise=none)
    key = jax.random.key(1)
    made = histogram_private.cluster_standardised(
        key, USERS, first, clusters, 3, radius=1.0, noise=none, first_noise=none, floor=FLOOR
    )
    if clusters == 1:
        np.testing.assert_allclose(made[0], MEAN, rtol=1e-3, atol=1e-5)
        return
    mean = histogram_private.denoised_mean(histogram_private.initial_mean(first, 1.0, none), FLOOR)
    start = histogram_private.private_start(jax.random.split(key)[0], mean, clusters, 1.0, FLOOR)
    expected, _ = algorithm_2(Q, np.asarray(start, float), 3)
    some = np.bincount(apart(Q, expected).argmin(1), minlength=clusters) > 0
    np.testing.assert_allclose(np.asarray(made)[some], expected[some], rtol=0.02, atol=1e-4)
