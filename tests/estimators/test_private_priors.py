"""Priors from private counts: cells, what a client can change, noise, unbiased bits, smoothing, errors, bad input."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, stats

from jaxpfl.estimators.empirical_bayes import Cells, ebnm, private, private_ebnm
from jaxpfl.estimators.empirical_bayes.private import Released
from jaxpfl.support.errors import JaxpflError, JaxpflWarning

GRID = Cells(-7.0, 7.0, 1.0, 1.0, 28)
TWO = Cells(-3.0, 3.0, 0.5, 2.0, 5, error_bins=2)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def test_cells_by_numpy_with_those_outside_at_the_ends():
    x = np.array([-9.0, -3.0, -1.81, 0.0, 2.99, 3.0, 40.0, np.nan, np.inf])
    s = np.array([0.1, 0.99, 1.01, 3.0, 1.0, 0.6, 1.7, np.nan, 1.5])
    want = []
    for a, b in zip(x, s, strict=True):
        place = 0 if np.isnan(a) else int(np.clip(np.floor((np.clip(a, -9, 9) + 3) / 1.2), 0, 4))
        error = 0 if np.isnan(b) or b < 1 else 1
        want.append(2 * place + error)
    np.testing.assert_array_equal(TWO.place(jnp.asarray(x), jnp.asarray(s)), want)
    middle, spread = TWO.middles()
    np.testing.assert_allclose(middle, np.repeat([-2.4, -1.2, 0, 1.2, 2.4], 2), atol=1e-12)
    np.testing.assert_allclose(spread, np.tile(np.sqrt(np.array([0.5, 2.0]) + 1.2**2 / 12), 5))


def test_a_client_changes_one_count_by_one():
    """All data sets of three clients over four cells: the counts behind the noise, which the key alone decides."""

    @jax.jit
    @jax.vmap
    def counts(cells):
        return private.central(jax.random.key(0), cells, 4, epsilon=1.0, delta=0.1).counts

    every = np.array(list(itertools.product(range(4), repeat=3)))
    change = np.asarray(counts(every)) - counts(every[:, :-1])
    np.testing.assert_allclose(change, np.eye(4)[every[:, -1]], atol=0.01)  # but for the lattice of the noise


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-6), (3.0, 1e-3)])
def test_central_noise_is_calibrated_for_a_sensitivity_of_one(epsilon, delta):
    """Against the curve of Balle and Wang, solved here; 40,000 draws, deviation within 2 % (false alarms: 2e-8)."""
    sigma = optimize.brentq(
        lambda s: stats.norm.cdf(0.5 / s - epsilon * s) - math.exp(epsilon) * stats.norm.cdf(-0.5 / s - epsilon * s)
        - delta, 0.05, 200,
    )  # fmt: skip
    found = private.central(jax.random.key(1), jnp.zeros(7, int), 40_000, epsilon=epsilon, delta=delta)
    assert float(found.stddev) == pytest.approx(sigma, rel=1e-6)
    assert float(np.std(found.counts[1:])) == pytest.approx(sigma, rel=0.02)


def test_local_bits_are_unbiased_with_the_stated_noise():
    """Mean and deviation of 1500 releases, within five standard errors (false alarms: 6e-7 a number, eight of them)."""
    cells, epsilon = jnp.array([0, 0, 2, 1, 2, 2]), 1.5
    send = jax.jit(jax.vmap(lambda key: private.local(key, cells, 4, epsilon=epsilon).counts))
    sent = np.asarray(send(jax.random.split(jax.random.key(0), 1500)))
    stddev = float(private.local(jax.random.key(0), cells, 4, epsilon=epsilon).stddev)
    c = (math.exp(epsilon / 2) + 1) / (math.exp(epsilon / 2) - 1)
    assert stddev == pytest.approx(math.sqrt(6 * (c**2 - 1) / 4), rel=1e-9)
    np.testing.assert_allclose(sent.mean(axis=0), [2, 1, 3, 0], atol=5 * stddev / 1500**0.5)
    np.testing.assert_allclose(sent.std(axis=0), stddev, rtol=5 / (2 * 1500) ** 0.5)


def test_a_clients_bits_are_epsilon_private():
    """The likelihood ratio of every message between two cells is at most e^eps, and is reached."""
    epsilon = 0.8
    one = math.exp(epsilon / 2) / (math.exp(epsilon / 2) + 1)

    def likelihood(bits, cell):
        return math.prod(one if bit == (k == cell) else 1 - one for k, bit in enumerate(bits))

    ratios = [likelihood(bits, 0) / likelihood(bits, 1) for bits in itertools.product((False, True), repeat=3)]
    assert max(ratios) == pytest.approx(math.exp(epsilon), rel=1e-12)
    # The draws have these probabilities: 20,000 of each bit, within five standard errors (false alarms: 6e-7).
    keys = jax.random.split(jax.random.key(3), 20_000)
    high = (
        np.asarray(jax.jit(jax.vmap(lambda k: private.local(k, jnp.array([1]), 2, epsilon=epsilon).counts))(keys)) > 0.5
    )
    np.testing.assert_allclose(high.mean(axis=0), [1 - one, one], atol=5 * 0.5 / 20_000**0.5)


def test_smoothed_counts_are_the_nearest_of_a_population():
    """Against SciPy's non-negative least squares, with the weights' sum as one more, heavy equation."""
    rng = np.random.default_rng(0)
    cells = Cells(-3.0, 3.0, 1.0, 1.0, 8)
    noisy = jnp.asarray(np.array([0, 3, 40, 90, 70, 30, 10, 2.0]) + 4 * rng.normal(size=8))
    got = np.asarray(jax.jit(lambda c: private.smoothed(Released(c, jnp.asarray(4.0)), cells))(noisy))
    middle, spread = (np.asarray(of) for of in cells.middles())
    edges = np.append(np.append(-np.inf, (middle[1:] + middle[:-1]) / 2), np.inf)
    design = float(noisy.sum()) * np.diff(stats.norm.cdf((edges[:, None] - middle) / spread), axis=0)
    heavy = 1e6
    pi, _ = optimize.nnls(np.vstack([design, heavy * np.ones((1, 8))]), np.append(noisy, heavy), maxiter=1000)
    np.testing.assert_allclose(got, design @ pi, atol=0.05)


def test_counts_below_the_noise_tell_nothing():
    noise = 50 * jnp.asarray(np.random.default_rng(0).normal(size=28))
    found = private.smoothed(Released(noise, jnp.asarray(50.0)), GRID)
    np.testing.assert_allclose(found, found[0])


def population(m):
    rng = np.random.default_rng(0)
    theta = rng.choice([-2.0, 2.0], m)
    return theta, theta + rng.normal(size=m)


@pytest.mark.slow
def test_errors_fall_to_those_without_privacy():
    """10,000 clients at -2 and 2, errors of 1; seen: .294 at eps .1, 1 and 10, without privacy .289; alone 1."""
    theta, x = population(10_000)
    fit = jax.jit(
        lambda key, epsilon: private_ebnm(key, x, 1.0, GRID, epsilon=epsilon, delta=1e-6).mean, static_argnums=1
    )

    def error(mean):
        return float(((np.asarray(mean) - theta) ** 2).mean())

    own = error(ebnm(x, 1.0, "npmle").mean)
    found = [error(fit(jax.random.key(0), epsilon)) for epsilon in (0.1, 1.0, 10.0)]
    assert max(found[1:]) < own + 0.01
    assert found[0] < own + 0.05


@pytest.mark.slow
def test_clients_beyond_the_grid_are_counted():
    x = np.linspace(-2, 2, 9)
    with pytest.warns(JaxpflWarning, match="x of 2 of 9 clients lies beyond -1.9 to 2 and was clipped"):
        private_ebnm(jax.random.key(0), np.append(x[:-1], 2.1), 1.0, Cells(-1.9, 2.0, 1.0, 1.0, 8), epsilon=60.0)
    with pytest.warns(JaxpflWarning, match="s of 9 of 9 clients lies beyond 1 to 1 and was clipped"):
        private_ebnm(jax.random.key(0), x, 0.5, Cells(-2.0, 2.0, 1.0, 1.0, 8), epsilon=60.0)


def test_noise_that_hides_all_counts_is_said():
    x, cells = np.linspace(-2, 2, 9), Cells(-2.0, 2.0, 1.0, 1.0, 8)
    with pytest.warns(JaxpflWarning, match="nothing was learned"):
        private_ebnm(jax.random.key(0), x, 1.0, cells, epsilon=0.1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cells": Cells(1.0, 1.0, 1.0, 1.0)}, "low < high"),
        ({"cells": Cells(0.0, float("inf"), 1.0, 1.0)}, "low and high must be finite"),
        ({"cells": Cells(0.0, 1.0, 1.0, 1.0, 1)}, "bins must be a whole number of at least 2, got 1"),
        ({"cells": Cells(0.0, 1.0, 2.0, 1.0)}, "least and most must be in order"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": -1.0, "delta": None}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"x": [1.0, np.nan]}, "x must be finite"),
        ({"s": [1.0, 0.0]}, "s must be finite and > 0"),
    ],
)
def test_bad_input(change, said):
    given = {"x": [1.0, 2.0], "s": 1.0, "cells": GRID, "epsilon": 1.0, "delta": 1e-6} | change
    with pytest.raises(JaxpflError, match=said):
        private_ebnm(jax.random.key(0), **given)
