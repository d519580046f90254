"""Intervals cover as often as they say, and the gain that collaboration promises is the one that it has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.optimize import linprog

from jaxpfl.estimators import base, gaussian, gaussian_closed_form, intervals, learned_gaussian


def covered(study, repetitions: int, seed: int = 0) -> tuple[float, float]:
    """The mean coverage of ``study(key) -> [m] bool`` and its standard error over repetitions."""
    found = np.asarray(jax.jit(jax.vmap(study))(jax.random.split(jax.random.key(seed), repetitions)))
    of_one = found.reshape(repetitions, -1).mean(axis=1)
    return of_one.mean(), of_one.std(ddof=1) / np.sqrt(repetitions)


def gaussian_clients(key, m: int, n: int, st: float, draw=jax.random.normal):
    of_theta, of_x = jax.random.split(key)
    theta = 2.0 + st * draw(of_theta, (m, 1))
    return theta, base.every(theta[:, None] + jax.random.normal(of_x, (m, n, 1)))


def test_with_known_variances_the_coverage_is_exact():
    """m = 10: the mean of all is itself uncertain. Within 4 standard errors (.1 %); intervals that forget it miss."""
    m, n, st = 10, 2, 0.5
    exact = float(gaussian_closed_form.personalized(m, 1 / n, st**2))
    forgetful = float(gaussian_closed_form.bound_known_mean(1 / n, st**2))

    def study(key, mse=exact):
        theta, clients = gaussian_clients(key, m, n, st)
        made = base.estimate(gaussian.personalized(st2=st**2, sx2=1.0), key, clients)
        low, high = intervals.known(made.estimates, mse, 0.9)
        return (low <= theta) & (theta <= high)

    mean, error = covered(study, 8000)
    assert abs(mean - 0.9) < 4 * error
    assert error < 0.0025
    mean, error = covered(lambda key: study(key, forgetful), 8000)
    assert mean < 0.9 - 4 * error


@pytest.mark.parametrize(
    ("m", "st"), [(8, 0.5), *(pytest.param(*given, marks=pytest.mark.slow) for given in ((8, 1.5), (40, 0.4)))]
)
def test_morris_intervals_cover_with_an_estimated_variance(m: int, st: float):
    """95 % asked, 95 to 97 % given (standard errors are .1 %), where plain intervals give 84 to 92 %."""
    n = 2

    def study(key, corrected=True):
        theta, clients = gaussian_clients(key, m, n, st)
        if corrected:
            low, high = learned_gaussian.morris(clients.x.mean(axis=1), 1 / n, 0.95)
        else:
            told = base.estimate(gaussian.personalized(sx2=1.0), key, clients)
            mse = gaussian_closed_form.personalized(m, 1 / n, told.shared.st2)
            low, high = intervals.known(told.estimates, mse, 0.95)
        return (low <= theta) & (theta <= high)

    mean, error = covered(study, 6000)
    assert mean > 0.94 - 4 * error
    plain, _ = covered(lambda key: study(key, False), 6000)
    assert plain < 0.93


@pytest.mark.slow
def test_robust_intervals_cover_whatever_the_population():
    """theta takes a far value with probability 1/50, else a common one: at least the 90 % that were asked for."""
    m, n, share = 400, 1, 0.02
    far = 5.0
    st2 = far**2 * share * (1 - share)

    def draw(key, shape):
        return far * (jax.random.bernoulli(key, share, shape) - share)

    def study(key):
        theta, clients = gaussian_clients(key, m, n, 1.0, draw)
        a = gaussian_closed_form.weight(m, 1 / n, st2)
        made = base.estimate(gaussian.personalized(st2=st2, sx2=1.0), key, clients).estimates
        low, high = intervals.robust(made, a, 1 / n, st2, 0.9)
        return (low <= theta) & (theta <= high)

    mean, error = covered(study, 300)
    assert mean > 0.9 - 4 * error
    # Where the bias is spread as badly as can be, a normal interval of the right variance is too short.
    with jax.enable_x64(True):
        t = (1 - 0.33) ** 2 * st2 / 0.33**2
        assert float(intervals.worst_miss(jnp.asarray(t), jnp.asarray(1.645 * np.sqrt(1 + t)))) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("t", "chi"), [(0.0, 2.0), (0.3, 2.2), (1.0, 2.5), (4.0, 3.5), (0.5, 1.2), (9.0, 2.0)])
def test_worst_miss_is_the_linear_programs_value(t: float, chi: float):
    """Over distributions of the squared bias on a grid, with mean t."""
    u = np.linspace(0, 120, 24_001)
    miss = stats.norm.cdf(np.sqrt(u) - chi) + stats.norm.cdf(-np.sqrt(u) - chi)
    best = linprog(-miss, A_eq=np.stack([np.ones_like(u), u]), b_eq=[1, t])
    with jax.enable_x64(True):
        assert float(intervals.worst_miss(jnp.asarray(t), jnp.asarray(chi))) == pytest.approx(-best.fun, abs=1e-6)


def test_critical_values_invert_the_worst_miss():
    with jax.enable_x64(True):
        t = jnp.array([0.0, 0.1, 1.0, 4.0])
        chi = intervals.critical_value(t, 0.05)
        np.testing.assert_allclose(intervals.worst_miss(t, chi), 0.05, rtol=1e-8)
    assert float(chi[0]) == pytest.approx(stats.norm.ppf(0.975), rel=1e-9)


def test_beta_intervals_are_scipys_quantiles_and_cover():
    mu, v, n = 0.3, 0.02, 12
    total = mu * (1 - mu) / v - 1
    alpha, beta = mu * total, (1 - mu) * total
    ones = np.arange(n + 1)
    low, high = intervals.beta(mu, v, jnp.asarray(ones / n), jnp.full(n + 1, float(n)), 0.9)
    exact = stats.beta.ppf([[0.05], [0.95]], alpha + ones, beta + n - ones)
    np.testing.assert_allclose([low, high], exact, atol=2e-6)
    # Coverage under that prior is exact: P(low <= p <= high | ones) = .9 for every count.
    given = stats.beta.cdf(high, alpha + ones, beta + n - ones) - stats.beta.cdf(low, alpha + ones, beta + n - ones)
    np.testing.assert_allclose(given, 0.9, atol=1e-5)
    for edge in (0.0, mu * (1 - mu)):
        low, high = intervals.beta(mu, edge, jnp.array([0.0, 0.5, 1.0]), jnp.full(3, 4.0), 0.9)
        assert np.isfinite(np.asarray([low, high])).all()


@pytest.mark.parametrize(("s2", "st2", "sq2"), [(0.0167, 0.01, 0.0), (0.0167, 0.01, 100.0), (1.0, 0.2, 3.0)])
def test_gain_and_the_clients_and_noise_that_it_takes(s2: float, st2: float, sq2: float):
    with jax.enable_x64(True):
        limit = float(gaussian_closed_form.most_gain(s2, st2))
        for share in (0.1, 0.5, 0.9):
            target = share * limit
            m = float(gaussian_closed_form.clients_needed(target, s2, st2, sq2))
            assert m >= 2
            assert float(gaussian_closed_form.gain(m, s2, st2, sq2)) >= target * (1 - 1e-9)
            if m > 2:
                assert float(gaussian_closed_form.gain(m - 1, s2, st2, sq2)) < target
            noise = float(gaussian_closed_form.most_noise(target, m + 50, s2, st2))
            assert float(gaussian_closed_form.gain(m + 50, s2, st2, noise)) == pytest.approx(target, rel=1e-9)
        assert np.isinf(float(gaussian_closed_form.clients_needed(limit * 1.01, s2, st2, sq2)))
        assert np.isnan(float(gaussian_closed_form.most_noise(limit, 10, s2, st2)))
        m = 37
        by_hand = (m - 1) / m * s2 / (s2 + st2 + sq2 / (m - 1))
        assert float(gaussian_closed_form.gain(m, s2, st2, sq2)) == pytest.approx(by_hand, rel=1e-12)
        # Ignoring the noise never helps, and one estimate for all is the same with weight zero.
        assert float(gaussian_closed_form.careless_gain(m, s2, st2, sq2)) <= by_hand + 1e-12
        worse = st2 + sq2 / (m - 1) > s2
        assert (float(gaussian_closed_form.global_gain(m, s2, st2, sq2)) < 0) == worse
