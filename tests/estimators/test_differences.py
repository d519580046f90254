"""Tests that clients differ, the interval for their spread, and clients' own variances: against SciPy, and coverage."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from jaxpfl.estimators import base, gaussian, gaussian_columns
from jaxpfl.estimators.empirical_bayes import differences

learn_variances = jax.jit(gaussian_columns.learn_variances)
trigamma_inverse = jax.jit(gaussian_columns._trigamma_inverse)


def summed(samples) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means, summed squared deviations and sizes."""
    return tuple(np.array(each) for each in zip(*[(x.mean(), x.var() * len(x), len(x)) for x in samples], strict=True))


def test_the_analysis_of_variance_is_scipys():
    rng = np.random.default_rng(0)
    samples = [rng.normal(size=n) + rng.normal() for n in (3, 5, 9, 4)]
    mean, scatter, size = summed(samples)
    pooled = scatter.sum() / (size - 1).sum()
    found = differences.compare_means(mean, pooled / size, float((size - 1).sum()), pooled=True)
    expected = stats.f_oneway(*samples)
    np.testing.assert_allclose(found[1:], expected, rtol=1e-10)
    welch = differences.compare_means(mean, scatter / (size - 1) / size, size - 1.0, pooled=False)
    np.testing.assert_allclose(welch[1:], stats.f_oneway(*samples, equal_var=False), rtol=1e-9)


def test_the_spreads_interval_is_williams_for_equal_sizes():
    rng = np.random.default_rng(1)
    m, n = 7, 4
    mean, scatter, _ = summed(1.3 * rng.normal(size=(m, 1)) + rng.normal(size=(m, n)))
    free, sx2 = m * (n - 1.0), scatter.sum() / (m * (n - 1))
    found = differences.spread(mean, np.full(m, sx2 / n), free, 0.9, pooled=True)
    between = n * mean.var(ddof=1)
    for end, tail in zip(found, (0.95, 0.05), strict=True):
        f, chi = stats.f.ppf(tail, m - 1, free), stats.chi2.ppf(tail, m - 1)
        assert end**2 == pytest.approx((m - 1) * (between - sx2 * f) / (n * chi), rel=1e-9)


@pytest.mark.parametrize("st", [0.0, 1.5])
def test_the_spreads_interval_covers(st: float):
    """95 % asked, eight clients of unequal sizes: 400 files, standard error 1.1 %."""
    rng = np.random.default_rng(0)
    sizes = np.array([2, 2, 3, 4, 6, 9, 12, 20])
    hits = []
    for _ in range(400):
        mean, scatter, size = summed([st * rng.normal() + rng.normal(size=n) for n in sizes])
        sx2, free = scatter.sum() / (size - 1).sum(), float((size - 1).sum())
        low, high = differences.spread(mean, sx2 / size, free, 0.95, pooled=True)
        hits.append(low <= st <= high)
    assert np.mean(hits) > 0.915
    if st > 1:
        assert np.mean(hits) < 0.985


def test_the_chi_square_test_is_scipys_and_simulated_where_counts_are_small():
    ones, size = np.array([100, 90, 130]), np.full(3, 300)
    found = differences.compare_shares(ones, size, 0)
    expected = stats.chi2_contingency([ones, size - ones], correction=False)
    np.testing.assert_allclose(found[1:], expected[:2], rtol=1e-10)
    # Two ones among six samples of three clients: 3 of 15 deals give both to one client.
    simulated = differences.compare_shares(np.array([2, 0, 0]), np.full(3, 2), 0)
    assert simulated.name == "chi-square, simulated"
    assert simulated.p_value == pytest.approx(0.2, abs=0.02)
    assert differences.compare_shares(np.zeros(4), np.full(4, 9), 0).p_value == 1


def test_bartletts_test_and_the_fitted_prior():
    rng = np.random.default_rng(0)
    sigma = np.exp(0.7 * rng.normal(size=400))
    samples = [s * rng.normal(size=n) for s, n in zip(sigma, rng.integers(3, 9, size=400), strict=True)]
    _, scatter, size = summed(samples)
    with jax.enable_x64(True):
        found = learn_variances(scatter, size - 1.0)
        assert float(found.p_value) == pytest.approx(stats.bartlett(*samples).pvalue, abs=2e-3)
        # The logarithms of the variances have the variance trigamma(nu_0 / 2): here 1.4^2.
        assert special.polygamma(1, float(found.degrees) / 2) == pytest.approx(1.96, rel=0.25)
        s2 = np.asarray(found.client_variance(jnp.asarray(scatter), jnp.asarray(size - 1.0)))
        by_hand = (float(found.degrees) * float(found.scale) + scatter) / (float(found.degrees) + size - 1)
        np.testing.assert_allclose(s2, by_hand, rtol=1e-12)
        assert np.log(s2 / sigma**2).std() < 0.9 * np.log(scatter / (size - 1) / sigma**2).std()


@pytest.mark.slow
def test_equal_noise_takes_one_variance_for_all():
    """Equal sizes: the estimates are those of `gaussian.personalized`, and rounded samples change nothing."""
    rng = np.random.default_rng(1)
    x = 5 + rng.normal(size=(15, 1, 1)) + rng.normal(size=(15, 4, 1))
    with jax.enable_x64(True):
        data, key = base.every(jnp.asarray(x)), jax.random.key(0)
        found = base.estimate(gaussian_columns.personalized(), key, data)
        assert np.isinf(float(found.shared.variances.degrees[0]))
        np.testing.assert_allclose(
            found.estimates, base.estimate(gaussian.personalized(), key, data).estimates, rtol=1e-12
        )
        alike = jnp.asarray(np.where(np.arange(15)[:, None, None] < 3, 0.1 + 0.2, x))
        variances = base.estimate(gaussian_columns.personalized(), key, base.every(alike)).shared.variances
        assert np.isinf(float(variances.degrees[0]))


@pytest.mark.parametrize("value", [1e-3, 0.1, 1.0, 30.0])
def test_the_inverse_trigamma_function(value: float):
    with jax.enable_x64(True):
        root = float(trigamma_inverse(value))
    assert special.polygamma(1, root) == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("spread", [0.3, 1.0, 1.6])
def test_bartletts_p_value_is_scipys(spread: float):
    rng = np.random.default_rng(2)
    samples = [np.exp(spread * rng.normal()) * rng.normal(size=6) for _ in range(9)]
    _, scatter, size = summed(samples)
    with jax.enable_x64(True):
        found = float(learn_variances(scatter, size - 1.0).p_value)
    assert found == pytest.approx(stats.bartlett(*samples).pvalue, abs=2e-3)
