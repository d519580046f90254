"""The discrete Gaussian: its probabilities, its variance, the least delta by brute force, and messages of few bits."""

import jax
import numpy as np
import pytest

from jaxpfl.privacy import discrete_gaussian
from jaxpfl.privacy import local_dp as local
from jaxpfl.support.errors import JaxpflError

JOIN = 2.0**32


def probabilities(table: discrete_gaussian.Table) -> np.ndarray:
    """Probabilities of -K ... K, from the thresholds, in float64."""
    below = (np.asarray(table.high, float) * JOIN + np.asarray(table.low, float)) / 2.0**64
    return np.diff(np.concatenate([[0.0], below, [1.0]]))


@pytest.mark.parametrize("stddev", [0.3, 1.0, 7.7])
def test_thresholds_are_the_discrete_gaussians(stddev: float):
    table = discrete_gaussian.table(stddev)
    k = np.arange(-table.largest, table.largest + 1)
    exact = np.exp(-(k**2) / (2 * stddev**2))
    exact /= exact.sum()
    np.testing.assert_allclose(probabilities(table), exact, atol=1e-15)
    assert table.variance == pytest.approx(exact @ k**2, rel=1e-12)
    assert table.variance <= stddev**2 * (1 + 1e-9)
    assert table.distance < 1e-16


def test_samples_follow_the_probabilities():
    """Chi-square over 200000 draws at sigma = 2: the p-value of a fixed seed; a sampler shifted by one gives 0."""
    from scipy import stats

    table = discrete_gaussian.table(2.0)
    drawn = np.asarray(discrete_gaussian.sample(jax.random.key(0), (200_000,), table))
    k = np.arange(-7, 8)
    p = probabilities(table)[k + table.largest]
    seen = np.array([(drawn == i).sum() for i in k])
    seen, expected = np.append(seen, 200_000 - seen.sum()), 200_000 * np.append(p, 1 - p.sum())
    statistic = ((seen - expected) ** 2 / expected).sum()
    assert stats.chi2.sf(statistic, len(k)) > 1e-3
    shifted = ((np.roll(seen, 1) - expected) ** 2 / expected).sum()
    assert stats.chi2.sf(shifted, len(k)) < 1e-12


@pytest.mark.parametrize(("stddev", "epsilon", "sensitivity"), [(3.0, 0.5, 1), (8.0, 1.0, 7), (2.0, 2.0, 3)])
def test_delta_is_the_hockey_stick_divergence(stddev: float, epsilon: float, sensitivity: int):
    """Brute force over outputs and shifts, both signs."""
    k = np.arange(-400, 401)
    p = np.exp(-(k**2) / (2 * stddev**2))
    p /= p.sum()
    worst = 0.0
    for shift in range(1, sensitivity + 1):
        for moved in (np.roll(p, shift), np.roll(p, -shift)):
            worst = max(worst, np.maximum(p - np.exp(epsilon) * moved, 0).sum())
    assert discrete_gaussian.delta(stddev, epsilon, sensitivity) == pytest.approx(worst, rel=1e-9, abs=1e-18)


def test_calibration_is_tight_and_near_the_continuous_one():
    pytest.importorskip("dp_accounting")
    for epsilon, sensitivity in ((0.5, 15), (2.0, 3)):
        sigma = discrete_gaussian.stddev(epsilon, 1e-5, sensitivity)
        assert discrete_gaussian.delta(sigma, epsilon, sensitivity) <= 1e-5
        assert discrete_gaussian.delta(0.999 * sigma, epsilon, sensitivity) > 1e-5
        continuous = local.analytic_gaussian_stddev(epsilon, 1e-5, sensitivity)
        assert sigma == pytest.approx(continuous, rel=0.01)


def test_messages_fit_into_their_bits():
    table = discrete_gaussian.table(5.0)
    bits = table.message_bits(16)
    sent = 15 + np.asarray(discrete_gaussian.sample(jax.random.key(1), (10_000,), table)) + table.largest
    assert sent.min() >= 0
    assert sent.max() < 2**bits
    assert 16 + 2 * table.largest <= 2**bits < 2 * (16 + 2 * table.largest)


@pytest.mark.parametrize("bad", [{"stddev": 0.0}, {"stddev": float("nan")}, {"stddev": 1e9}])
def test_bad_tables_are_refused(bad: dict):
    with pytest.raises(JaxpflError, match="stddev"):
        discrete_gaussian.table(**bad)
    with pytest.raises(JaxpflError, match="epsilon"):
        discrete_gaussian.stddev(-1.0, 1e-5, 3)


def test_an_epsilon_beyond_64_random_bits_is_refused_for_what_it_is():
    assert discrete_gaussian.stddev(14.0, 1e-10, 3) > 0
    with pytest.raises(JaxpflError, match=r"epsilon is too large for delta 1e-05 and 64 random bits, got 28"):
        discrete_gaussian.stddev(28.0, 1e-5, 255)
