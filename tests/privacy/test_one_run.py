"""The one-run bound against its theorem written out, and on guesses whose true epsilon is known."""

import math

import dp_accounting as dp
import numpy as np
import pytest
from scipy.stats import binom

from jaxpfl.privacy.audit import one_run_lower_bound, p_value
from jaxpfl.support.errors import JaxpflError


def theorem(n: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """Theorem 5.2, term by term."""
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    pmf = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    beta = sum(pmf[v:])
    alpha = max(sum(p for k, p in enumerate(pmf) if v > k >= v - i) / i for i in range(1, n + 1))
    return min(1.0, beta + 2 * n * delta * alpha)


@pytest.mark.parametrize(
    ("n", "r", "v", "epsilon", "delta"),
    [
        (20, 20, 17, 0.5, 0.0),
        (50, 20, 20, 1.0, 1e-3),
        (100, 60, 41, 0.2, 1e-2),
        (10, 10, 0, 1.0, 1e-3),
        (9, 8, 8, 3, 0),
    ],
)
def test_the_p_value_is_the_theorems(n, r, v, epsilon, delta):
    assert p_value(n, r, v, epsilon=epsilon, delta=delta) == pytest.approx(theorem(n, r, v, epsilon, delta), rel=1e-10)


def test_all_right_guesses_without_delta_have_a_closed_form():
    """With n coins, all guessed right, q^n is the error at the bound. A quarter of the error is for guesses of all."""
    found = one_run_lower_bound(np.arange(40.0), np.arange(40) >= 20, delta=0.0)
    q = (0.05 / 4) ** (1 / 40)
    assert found.epsilon == pytest.approx(math.log(q / (1 - q)), rel=1e-6)
    assert found.ceiling == found.epsilon
    assert (found.canaries, found.guesses, found.correct) == (40, 40, 40)


def test_the_bound_is_below_the_truth_as_often_as_stated():
    """Randomised response tells each coin with e^eps / (1 + e^eps): the sharpest case. Of 100 audits at most 5 % may
    lie above; more than the binomial's quantile of 1 - 1e-6 do so with probability 1e-6."""
    rng, truth, n = np.random.default_rng(1), 1.0, 300
    bounds = []
    for _ in range(100):
        coins = rng.random(n) < 0.5
        told = coins ^ (rng.random(n) > 1 / (1 + math.exp(-truth)))
        bounds.append(one_run_lower_bound(told + rng.random(n) / 2, coins, delta=1e-6).epsilon)
    assert (np.array(bounds) > truth).sum() <= binom.isf(1e-6, 100, 0.05)
    assert np.median(bounds) > 0.4 * truth


@pytest.mark.parametrize(("fault", "caught"), [(1.0, False), (0.1, True)])
def test_gaussian_noise(fault, caught):
    """5000 canaries, and noise that is claimed to be worth eps 1.88 at delta 1e-6; a tenth of it is found."""
    rng, z = np.random.default_rng(2), 2.0
    coins = rng.random(5000) < 0.5
    found = one_run_lower_bound(coins + fault * z * rng.normal(size=5000), coins, delta=1e-6)
    assert (found.epsilon > dp.get_epsilon_gaussian(z, 1e-6)) == caught
    assert found.epsilon > 0.1


def test_a_delta_above_one_over_n_shows_nothing():
    coins = np.arange(100) >= 50
    assert one_run_lower_bound(np.arange(100.0), coins, delta=0.05).epsilon == 0.0
    assert one_run_lower_bound(np.zeros(100), coins, delta=0.0).epsilon == 0.0  # ties do not tell by their place


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"scores": [1.0]}, "scores must be a vector of at least 2"),
        ({"scores": [1.0, math.nan, 0.0]}, "scores must be finite, got 1"),
        ({"delta": 1.0}, "delta must be"),
        ({"confidence": 0.0}, "confidence must be > 0 and < 1"),
    ],
)
def test_refusals(args, message):
    good = {"scores": np.arange(3.0), "included": np.ones(3, bool), "delta": 0.0}
    with pytest.raises(JaxpflError, match=message):
        one_run_lower_bound(**{**good, **args})
