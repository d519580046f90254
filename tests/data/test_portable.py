"""Draws made of raw integers and IEEE arithmetic: right to the last places, and distributed as they should be.

Kolmogorov-Smirnov distances: a sample of n exceeds 2.72 / sqrt(n) with probability 2 exp(-2 * 2.72**2) = 8e-7.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxpfl.data import portable

KS = 2.72


def distance(sample: np.ndarray, cdf: np.ndarray) -> float:
    """The Kolmogorov-Smirnov distance of a sorted sample, whose distribution function is ``cdf`` at its points,
    times sqrt(n)."""
    n = len(sample)
    steps = np.arange(n + 1) / n
    return float(max(np.abs(cdf - steps[:-1]).max(), np.abs(cdf - steps[1:]).max()) * math.sqrt(n))


def test_log_and_exp_are_those_of_the_c_library_to_a_few_units_of_the_last_place() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(size=2000), 10.0 ** np.linspace(-300, 300, 601), [1.0, 0.5, np.sqrt(0.5)]])
    np.testing.assert_allclose(portable.log(x), [math.log(value) for value in x], rtol=5e-16, atol=0)
    x = np.concatenate([rng.uniform(-6, 6, size=2000), np.linspace(-700, 700, 1401)])
    np.testing.assert_allclose(portable.exp(x), [math.exp(value) for value in x], rtol=5e-16, atol=0)
    assert portable.log(np.array([1.0]))[0] == 0.0
    assert portable.exp(np.array([0.0]))[0] == 1.0
    assert 0.0 < portable.exp(np.array([-1e9]))[0] < 1e-300


def test_uniform_draws_are_the_middles_of_cells() -> None:
    rng = np.random.default_rng(1)
    u = portable.uniform(rng, 20_000)
    raw = np.random.default_rng(1).bit_generator.random_raw(3)
    assert u[:3].tolist() == [((int(word) >> 12) + 0.5) / 2**52 for word in raw]
    assert 0.0 < u.min() < u.max() < 1.0
    assert distance(np.sort(u), np.sort(u)) < KS
    assert portable.uniform(rng, 0).shape == (0,)


def test_normal_draws() -> None:
    z = np.sort(portable.normal(np.random.default_rng(2), 20_000))
    cdf = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])
    assert distance(z, cdf) < KS
    assert portable.normal(np.random.default_rng(2), 1).shape == (1,)
    # The two draws of a pair are not related: a correlation of 10 000 pairs exceeds 0.05 with probability 6e-7.
    pairs = portable.normal(np.random.default_rng(3), 20_000)
    half = len(pairs) // 2
    assert abs(np.corrcoef(pairs[:half], pairs[half:])[0, 1]) < 0.05


@pytest.mark.parametrize("shape", [0.03, 0.3, 1.0, 4.5, 200.0])
def test_gamma_draws(shape: float) -> None:
    special = pytest.importorskip("scipy.special")  # comes with scikit-learn
    draws = np.sort(portable.log_gamma(np.random.default_rng(4), shape, 20_000))
    # Below exp(-700) a gamma draw is no float64; its distribution function there is x**a / (a Gamma(a)).
    small = np.exp(shape * draws - special.gammaln(shape + 1))
    cdf = np.where(draws < -600, small, special.gammainc(shape, np.exp(np.maximum(draws, -600))))
    assert distance(draws, cdf) < KS


def test_proportions() -> None:
    log_weights = np.array([[0.0, math.log(3.0)], [-5000.0, -5001.0], [-1e6, 0.0]])
    shares = portable.proportions(log_weights)
    np.testing.assert_allclose(shares[0], [0.25, 0.75], rtol=1e-15)
    np.testing.assert_allclose(shares[1], [1 / (1 + math.exp(-1)), 1 / (1 + math.e)], rtol=1e-12)
    np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-15)


@pytest.mark.parametrize("alpha", [0.1, 1.0, 8.0])
def test_dirichlet_moments(alpha: float) -> None:
    """Mean 1/C and variance (1/C)(1 - 1/C) / (C alpha + 1) of each proportion, over 20 000 draws of C = 5.

    Six standard errors each, the variance's by its sample fourth moment: false alarms below 1e-7 in all.
    """
    classes, draws = 5, 20_000
    log_weights = portable.log_gamma(np.random.default_rng(5), alpha, draws * classes).reshape(draws, classes)
    p = portable.proportions(log_weights)
    variance = (1 / classes) * (1 - 1 / classes) / (classes * alpha + 1)
    assert np.abs(p.mean(axis=0) - 1 / classes).max() < 6 * math.sqrt(variance / draws)
    squares = (p - 1 / classes) ** 2
    assert (np.abs(squares.mean(axis=0) - variance) < 6 * squares.std(axis=0) / math.sqrt(draws)).all()
    # Two proportions repel: covariance -1 / (C**2 (C alpha + 1)).
    products = (p[:, 0] - 1 / classes) * (p[:, 1] - 1 / classes)
    covariance = -1 / (classes**2 * (classes * alpha + 1))
    assert abs(products.mean() - covariance) < 6 * products.std() / math.sqrt(draws)
