"""Local mechanisms: odds of exactly e^eps, the mean of a message, and the calibration against 50-digit arithmetic."""

import math

import dp_accounting
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from jaxpfl.estimators import release
from jaxpfl.estimators.base import every
from jaxpfl.estimators.gaussian import personalized as personalized_gaussian
from jaxpfl.privacy import discrete_gaussian
from jaxpfl.privacy import local_dp as local
from jaxpfl.studies import gaussian
from jaxpfl.support.errors import JaxpflError

KEY = jax.random.key(3)
ODD = [0.0, 0.3, -1.0, 1.0, 7.0, -1e30, np.inf, -np.inf, np.nan]


def gaussian_delta(epsilon: float, stddev: float) -> mpmath.mpf:
    """delta(eps) of a Gaussian mechanism of sensitivity 1, from the two tail probabilities."""
    with mpmath.workdps(50):
        s, e = mpmath.mpf(stddev), mpmath.mpf(epsilon)
        return mpmath.ncdf(1 / (2 * s) - e * s) - mpmath.exp(e) * mpmath.ncdf(-1 / (2 * s) - e * s)


@pytest.mark.parametrize("epsilon", [1e-4, 0.5, 1.0, 8.0, 40.0, 1e4])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_analytic_stddev_solves_the_exact_equation(epsilon, delta):
    stddev = local.analytic_gaussian_stddev(epsilon, delta, 3.0) / 3.0
    # A stddev right to a relative 1e-10 brackets delta.
    assert gaussian_delta(epsilon, stddev * (1 + 1e-10)) < delta < gaussian_delta(epsilon, stddev * (1 - 1e-10))


def test_printed_stddev_is_sound_for_small_eps_in_one_dimension():
    for epsilon in (0.1, 0.5, 0.99):
        printed = local.printed_gaussian_stddev(epsilon, 1e-5, 2.0)
        assert printed == pytest.approx(2.0 / epsilon * math.sqrt(8 * math.log(2e5)))
        assert printed > local.analytic_gaussian_stddev(epsilon, 1e-5, sensitivity=4.0)
    # Ten coordinates with the noise meant for one are sqrt(10) as far apart: delta is more than 100 times too large.
    stddev = local.printed_gaussian_stddev(0.9, 1e-5, 1.0) / (2 * math.sqrt(10))
    assert gaussian_delta(0.9, stddev) > 100 * 1e-5


def probability_of_high(monkeypatch, draw, epsilon: float, grid: np.ndarray) -> np.ndarray:
    """P(the higher value) for each input of ``ODD``, by putting every point of a grid in the place of the uniform."""
    uniforms = jnp.broadcast_to(jnp.asarray(grid, jnp.float32)[:, None], (len(grid), len(ODD)))
    with monkeypatch.context() as patch:
        patch.setattr(jax.random, "uniform", lambda key, shape, dtype: uniforms)
        messages = np.asarray(jax.jit(draw)(jnp.broadcast_to(jnp.asarray(ODD, jnp.float32), uniforms.shape)))
    assert len(np.unique(messages)) <= 2
    return (messages > 0).mean(axis=0)


@pytest.mark.parametrize("epsilon", [0.1, 4.0])
@pytest.mark.parametrize("unit", [False, True])
def test_odds_are_exactly_e_to_the_eps(monkeypatch, epsilon, unit):
    def draw(x):
        return local.one_bit_unit(KEY, x, epsilon) if unit else local.one_bit(KEY, x, 1.0, epsilon)

    high = probability_of_high(monkeypatch, draw, epsilon, (np.arange(2**19) + 0.5) / 2**19)
    e = math.exp(epsilon)
    for odds in (high.max() / high.min(), (1 - high).max() / (1 - high).min()):
        assert odds == pytest.approx(e, rel=2**-18 * (e + 1))
    # Out of range is the nearest end, and not a number the middle: never an outcome of its own.
    x = np.nan_to_num(np.clip(ODD, 0, 1) if unit else np.clip(ODD, -1, 1), nan=0.5 if unit else 0.0)
    expected = x * (e - 1) / (e + 1) + 1 / (e + 1) if unit else (1 + x * (e - 1) / (e + 1)) / 2
    np.testing.assert_allclose(high, expected, atol=2**-18)


@pytest.mark.parametrize("epsilon", [12.0, 15.0])
def test_rounding_never_makes_the_rare_value_rarer(monkeypatch, epsilon):
    """If 1/(e^eps + 1) is near the step of a float32 uniform, it is rounded up, for both values."""
    step = 2.0**-23
    grid = np.arange(4096) * step  # the smallest uniforms there are; a hit has the probability of one step
    rare = 1 / (math.exp(epsilon) + 1)
    high = probability_of_high(monkeypatch, lambda x: local.one_bit(KEY, x, 1.0, epsilon), epsilon, grid)
    hits = 4096 * np.array([high[ODD.index(-1.0)], 1 - high[ODD.index(1.0)]])
    assert rare <= hits.min() * step
    assert hits.max() * step < rare + 2 * step


@pytest.mark.parametrize("epsilon", [16.0, 88.0, 104.0, 1e4, math.inf])
def test_a_bit_is_never_certain(monkeypatch, epsilon):
    """A float32 sigmoid of -eps is zero from 104 on: the rare value keeps one step of the generator, 2^-23."""
    grid = np.arange(4096) * 2.0**-23
    with np.errstate(invalid="ignore"):
        high = probability_of_high(monkeypatch, lambda x: local.one_bit(KEY, x, 1.0, epsilon), epsilon, grid)
    hits = 4096 * np.array([high[ODD.index(-1.0)], 1 - high[ODD.index(1.0)]])
    assert hits.tolist() == [1, 1] if epsilon > 16 else (hits <= 2).all()
    assert (hits > 0).all()


def test_messages_under_other_budgets_or_bounds_share_no_randomness():
    """One client's message in two studies of one seed: the difference must not be free of noise."""
    x = jnp.zeros(1000)
    message = jax.jit(local.gaussian)
    first, second = (np.asarray(message(KEY, x, 1.0, s)) / s for s in (1.0, 2.0))
    third = np.asarray(message(KEY, x, 1.5, 1.0))
    for a, b in ((first, second), (first, third)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(1000)  # false alarms 6e-7
    bits = [np.sign(local.one_bit(KEY, x, 1.0, epsilon)) for epsilon in (0.5, 0.6)]
    assert abs(np.mean(bits[0] * bits[1])) < 5 / math.sqrt(1000)
    sent = [release.discrete_gaussian(1.0, 8, discrete_gaussian.table(s)).send for s in (40.0, 50.0)]
    a, b = (np.asarray(jax.jit(send)(KEY, x)) for send in sent)
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(1000)


def test_a_private_message_tells_of_the_mean_alone():
    """Two clients whose samples have one mean and another scatter send the same."""
    estimator = personalized_gaussian(st2=0.2, sx2=0.5, release=release.gaussian(1.0, 1.0))
    clients = every(jnp.array([[[0.2], [0.4]], [[0.1], [0.5]]]))
    sent = jax.vmap(estimator.summarize, in_axes=(None, None, 0))(KEY, None, clients)
    for leaf in jax.tree.leaves(sent):
        np.testing.assert_allclose(leaf[0], leaf[1], rtol=1e-6)


def test_mean_and_values_of_messages():
    """False alarms: each mean is normal, 5 standard errors, 6 comparisons: below 4e-6."""
    n, epsilon, bound = 200_000, 1.0, 2.0
    x = jnp.array([-2.0, 0.3, 1.5])
    e = math.exp(epsilon)
    signed = np.asarray(local.one_bit(KEY, jnp.broadcast_to(x, (n, 3)), bound, epsilon), np.float64)
    c = bound * (e + 1) / (e - 1)
    np.testing.assert_allclose(np.abs(signed), c, rtol=1e-6)
    assert (np.abs(signed.mean(axis=0) - np.asarray(x)) < 5 * np.sqrt((c**2 - np.asarray(x) ** 2) / n)).all()
    p = jnp.array([0.0, 0.25, 1.0])
    unit = np.asarray(local.one_bit_unit(KEY, jnp.broadcast_to(p, (n, 3)), epsilon), np.float64)
    np.testing.assert_allclose(np.unique(unit), [-1 / (e - 1), e / (e - 1)], rtol=1e-6)
    assert (np.abs(unit.mean(axis=0) - np.asarray(p)) < 5 * c / bound / 2 / math.sqrt(n)).all()


def test_gaussian_messages_are_clipped_first():
    x = jnp.array(ODD, jnp.float32)
    bound = 0.5
    np.testing.assert_array_equal(
        jax.jit(local.gaussian)(KEY, x, bound, 0.0), np.nan_to_num(np.clip(ODD, -bound, bound)).astype(np.float32)
    )
    noise = np.asarray(jax.jit(local.gaussian)(KEY, jnp.full(100_000, 9.0), bound, 2.0), np.float64) - bound
    # Relative standard error of a standard deviation: 1/sqrt(2 n); 5 of them, false alarms 6e-7.
    assert abs(noise.std() / 2 - 1) < 5 / math.sqrt(2 * len(noise))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((0.0, 1e-5, 1.0), "epsilon must be > 0 and finite, got 0.0"),
        ((math.nan, 1e-5, 1.0), "epsilon must be > 0 and finite, got nan"),
        ((math.inf, 1e-5, 1.0), "epsilon must be > 0 and finite, got inf"),
        ((1.0, 0.0, 1.0), "delta must be > 0 and < 1, got 0.0"),
        ((1.0, 1.0, 1.0), "delta must be > 0 and < 1, got 1.0"),
    ],
)
def test_refusals(args, message):
    for calibrate in (local.analytic_gaussian_stddev, local.printed_gaussian_stddev):
        with pytest.raises(JaxpflError, match=message):
            calibrate(*args)
    with pytest.raises(JaxpflError, match="sensitivity must be > 0 and finite, got -1"):
        local.analytic_gaussian_stddev(1.0, 1e-5, -1)
    with pytest.raises(JaxpflError, match="bound must be > 0 and finite, got 0"):
        local.printed_gaussian_stddev(1.0, 1e-5, 0)


@pytest.mark.parametrize("mechanism", ["analytic", "discrete"])
def test_noise_of_the_study_is_that_of_any_two_messages(mechanism):
    """Means may differ by 2 b, and levels by all but one of their number."""
    given = gaussian.GaussianSettings(epsilon=2.0, delta=1e-3, mechanism=mechanism)
    stddev = gaussian.strength(given, 2.0)
    if mechanism == "analytic":
        assert stddev == pytest.approx(dp_accounting.get_sigma_gaussian(2.0, 1e-3) * 2 * given.bound)
    else:
        assert discrete_gaussian.delta(stddev, 2.0, 2**given.levels_bits - 1) <= 1e-3
