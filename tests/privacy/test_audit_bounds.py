"""Lower bounds on epsilon from synthetic scores whose true epsilon is known in closed form."""

import math

import dp_accounting as dp
import numpy as np
import pytest
from scipy.stats import binom

from jaxpfl.privacy import audit
from jaxpfl.support.errors import JaxpflError

DELTA = 0.1
Z = 1.0
CLAIM = dp.get_epsilon_gaussian(Z, DELTA)


def worlds(rng: np.random.Generator, stddev: float, count: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    """Scores of ``count`` worlds with the canary, and as many without, where the noise has this stddev over C."""
    return 1 + stddev * rng.normal(size=count), stddev * rng.normal(size=count)


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_the_bound_is_below_the_truth_as_often_as_stated(confidence):
    """At most a share (1 - confidence) of 400 audits may lie above the truth.

    More than the binomial's quantile of 1 - 1e-6 does so with probability 1e-6 at most. The true epsilon is that of the
    noise, and delta is one where it is sharp.
    """
    rng = np.random.default_rng(1)
    bounds = np.array([audit.epsilon_lower_bound(*worlds(rng, Z), delta=DELTA, confidence=confidence).epsilon
                       for _ in range(400)])  # fmt: skip
    assert (bounds > CLAIM).sum() <= binom.isf(1e-6, 400, 1 - confidence)
    assert np.median(bounds) > 0.5 * CLAIM  # and it is no empty bound


def test_worlds_that_are_told_apart_by_delta_alone():
    """A mechanism that shows the canary with probability delta, and else nothing, is (0, delta)-DP: no bound above 0.

    The bound is 0 unless Clopper-Pearson's misses: probability 0.05 at most in each of 400 audits.
    """
    rng = np.random.default_rng(2)
    shown = [np.where(rng.random(500) < DELTA, 9.0, rng.random(500)) for _ in range(400)]
    above = [audit.epsilon_lower_bound(s, rng.random(500), delta=DELTA).epsilon > 0 for s in shown]
    assert sum(above) <= binom.isf(1e-6, 400, 0.05)


@pytest.mark.parametrize("fault", [0.5, 1 / math.sqrt(2)])
def test_too_little_noise_is_found(fault):
    """Noise halved, or one of two shares left out, with as many worlds as a minute allows."""
    count = 1000 if fault == 0.5 else 20_000
    rng = np.random.default_rng(3)
    found = [audit.epsilon_lower_bound(*worlds(rng, fault * Z, count), delta=DELTA).epsilon > CLAIM for _ in range(20)]
    assert all(found)


def test_a_small_delta_shows_little():
    rng = np.random.default_rng(4)
    scores = worlds(rng, 0.5 * Z)
    small = audit.epsilon_lower_bound(*scores, delta=1e-5)
    assert small.epsilon < dp.get_epsilon_gaussian(Z, 1e-5)
    assert audit.epsilon_lower_bound(*scores, delta=DELTA).epsilon > CLAIM


def test_of_several_scores_the_best_is_chosen_on_worlds_that_the_bound_does_not_see():
    """Nineteen scores that tell nothing beside one that does; and twenty that tell nothing, in 100 audits: a bound
    above 0 is then false, and that has a probability of 5 %."""
    rng = np.random.default_rng(7)
    nothing = rng.normal(size=(2, 1000, 19))
    good = np.stack(worlds(rng, 0.5))
    with_, without = np.concatenate([nothing, good[:, :, None]], axis=2)
    found = audit.epsilon_lower_bound(with_, without, delta=DELTA)
    assert found.statistic == 19
    assert found.epsilon > CLAIM
    assert found.epsilon == audit.epsilon_lower_bound(*good, delta=DELTA).epsilon
    above = [audit.epsilon_lower_bound(*rng.normal(size=(2, 200, 20)), delta=0.0).epsilon > 0 for _ in range(100)]
    assert sum(above) <= binom.isf(1e-6, 100, 0.05)
    with pytest.raises(JaxpflError, match="each world must have as many scores, got 20 and 19"):
        audit.epsilon_lower_bound(with_, nothing[0], delta=DELTA)


def test_ceiling():
    apart = audit.epsilon_lower_bound(np.ones(1000), np.zeros(1000), delta=0.0)
    assert apart.epsilon == apart.ceiling
    # Clopper-Pearson of 500 of 500: the rate is above error^(1/500); of none: below 1 - error^(1/500).
    rate = 0.025 ** (1 / 500)
    assert apart.ceiling == pytest.approx(math.log(rate / (1 - rate)))
    assert audit.epsilon_lower_bound(np.zeros(1000), np.ones(1000), delta=0.0).epsilon == 0.0
    assert audit.epsilon_lower_bound(np.zeros(1000), np.zeros(1000), delta=0.0).epsilon == 0.0


def test_either_error_may_show_it():
    """Canary worlds that are all alike and others that are spread out, and the reverse: two different tests."""
    rng = np.random.default_rng(5)
    alike, spread = np.full(2000, 2.0), 3 * rng.random(2000)
    # P(score >= 2) is 1 with and 1/3 without; P(score < 2) is 2/3 without and never with the canary.
    bound = audit.epsilon_lower_bound(alike, spread, delta=0.0).epsilon
    assert bound > math.log(3) + 1
    assert audit.epsilon_lower_bound(2 - spread, 2 - alike, delta=0.0).epsilon > math.log(3) + 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"with_canary": [1.0, 2.0, 3.0]}, "with_canary must be a vector of at least 4 scores"),
        ({"without_canary": np.zeros((4, 2, 2))}, "without_canary must be a vector of at least 4 scores"),
        ({"with_canary": [1.0, math.nan, 3.0, math.inf]}, "with_canary must be finite, got 2 scores that are not"),
        ({"delta": 1.0}, "delta must be"),
        ({"delta": math.nan}, "delta must be"),
        ({"confidence": 1.0}, "confidence must be > 0 and < 1, got 1.0"),
    ],
)
def test_refusals(args, message):
    good = {"with_canary": np.ones(9), "without_canary": np.arange(9.0), "delta": 0.1, "confidence": 0.9}
    with pytest.raises(JaxpflError, match=message):
        audit.epsilon_lower_bound(**{**good, **args})
