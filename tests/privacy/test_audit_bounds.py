"""Audits of scores and noise that are drawn here: bounds against a truth in closed form and a theorem written out, and
residual noise, of which what is claimed passes, and each fault is found by its test."""

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
    """At most a share (1 - confidence) of 200 audits may lie above the truth.

    More than the binomial's quantile of 1 - 1e-6 does so with probability 1e-6 at most. The true epsilon is that of the
    noise, and delta is one where it is sharp.
    """
    rng = np.random.default_rng(1)
    bounds = np.array([audit.epsilon_lower_bound(*worlds(rng, Z), delta=DELTA, confidence=confidence).epsilon
                       for _ in range(200)])  # fmt: skip
    assert (bounds > CLAIM).sum() <= binom.isf(1e-6, 200, 1 - confidence)
    assert np.median(bounds) > 0.5 * CLAIM  # and it is no empty bound


def test_worlds_that_are_told_apart_by_delta_alone():
    """A mechanism that shows the canary with probability delta, and else nothing, is (0, delta)-DP: no bound above 0.

    The bound is 0 unless Clopper-Pearson's misses: probability 0.05 at most in each of 200 audits.
    """
    rng = np.random.default_rng(2)
    shown = [np.where(rng.random(500) < DELTA, 9.0, rng.random(500)) for _ in range(200)]
    above = [audit.epsilon_lower_bound(s, rng.random(500), delta=DELTA).epsilon > 0 for s in shown]
    assert sum(above) <= binom.isf(1e-6, 200, 0.05)


@pytest.mark.parametrize("fault", [0.5, 1 / math.sqrt(2)])
def test_too_little_noise_is_found(fault):
    """Noise halved, or one of two shares left out, with as many worlds as a minute allows."""
    count = 1000 if fault == 0.5 else 20_000
    rng = np.random.default_rng(3)
    found = [audit.epsilon_lower_bound(*worlds(rng, fault * Z, count), delta=DELTA).epsilon > CLAIM for _ in range(10)]
    assert all(found)


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
    with pytest.raises(JaxpflError, match="all worlds must have equally many scores, got 20 and 19"):
        audit.epsilon_lower_bound(with_, nothing[0], delta=DELTA)


def test_ceiling():
    apart = audit.epsilon_lower_bound(np.ones(1001), np.zeros(1001), delta=0.0)
    assert apart.epsilon == apart.ceiling
    # Clopper-Pearson of 500 of 500: the rate is above error^(1/500); of none: below 1 - error^(1/500).
    rate = 0.025 ** (1 / 500)
    assert apart.ceiling == pytest.approx(math.log(rate / (1 - rate)))
    assert audit.epsilon_lower_bound(np.zeros(1000), np.ones(1000), delta=0.0).epsilon == 0.0
    assert audit.epsilon_lower_bound(np.zeros(1000), np.zeros(1000), delta=0.0).epsilon == 0.0


GAME, RUN = audit.epsilon_lower_bound, audit.one_run_lower_bound
GOOD = {
    GAME: {"with_canary": np.ones(9), "without_canary": np.arange(9.0), "delta": 0.1, "confidence": 0.9},
    RUN: {"scores": np.arange(3.0), "included": np.ones(3, bool), "delta": 0.0},
}


@pytest.mark.parametrize(
    ("bound", "args", "message"),
    [
        (GAME, {"with_canary": [1.0, 2.0, 3.0]}, "with_canary must be a vector of at least 4 scores"),
        (GAME, {"without_canary": np.zeros((4, 2, 2))}, "without_canary must be a vector of at least 4 scores"),
        (GAME, {"with_canary": [1.0, math.nan, 3.0, math.inf]}, "with_canary must be finite, got 2 non-finite scores"),
        (GAME, {"delta": 1.0}, "delta must be"),
        (GAME, {"delta": math.nan}, "delta must be"),
        (GAME, {"confidence": 1.0}, "confidence must be > 0 and < 1, got 1.0"),
        (RUN, {"scores": [1.0]}, "scores and included must be vectors"),
        (RUN, {"scores": [1.0, math.nan, 0.0]}, "scores must be finite, got 1"),
        (RUN, {"delta": 1.0}, "delta must be"),
        (RUN, {"confidence": 0.0}, "confidence must be > 0 and < 1"),
    ],
)
def test_refusals(bound, args, message):
    with pytest.raises(JaxpflError, match=message):
        bound(**GOOD[bound] | args)


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
    assert audit.p_value(n, r, v, epsilon=epsilon, delta=delta) == pytest.approx(
        theorem(n, r, v, epsilon, delta), rel=1e-10
    )


def test_all_right_guesses_without_delta_have_a_closed_form():
    """With n coins, all guessed right, q^n is the error at the bound. A quarter of the error is for guesses of all."""
    found = audit.one_run_lower_bound(np.arange(40.0), np.arange(40) >= 20, delta=0.0)
    q = (0.05 / 4) ** (1 / 40)
    assert found.epsilon == pytest.approx(math.log(q / (1 - q)), rel=1e-6)
    assert found.ceiling == found.epsilon
    assert (found.canaries, found.guesses, found.correct) == (40, 40, 40)


def test_the_bound_of_one_run_is_below_the_truth_as_often_as_stated():
    """Randomised response tells each coin with e^eps / (1 + e^eps): the sharpest case. Of 100 audits at most 5 % may
    lie above; more than the binomial's quantile of 1 - 1e-6 do so with probability 1e-6."""
    rng, truth, n = np.random.default_rng(1), 1.0, 300
    bounds = []
    for _ in range(100):
        coins = rng.random(n) < 0.5
        told = coins ^ (rng.random(n) > 1 / (1 + math.exp(-truth)))
        bounds.append(audit.one_run_lower_bound(told + rng.random(n) / 2, coins, delta=1e-6).epsilon)
    assert (np.array(bounds) > truth).sum() <= binom.isf(1e-6, 100, 0.05)
    assert np.median(bounds) > 0.4 * truth


@pytest.mark.parametrize(("fault", "caught"), [(1.0, False), (0.1, True)])
def test_gaussian_noise(fault, caught):
    """5000 canaries, and noise that is claimed to be worth eps 1.88 at delta 1e-6; a tenth of it is found."""
    rng, z = np.random.default_rng(2), 2.0
    coins = rng.random(5000) < 0.5
    found = audit.one_run_lower_bound(coins + fault * z * rng.normal(size=5000), coins, delta=1e-6)
    assert (found.epsilon > dp.get_epsilon_gaussian(z, 1e-6)) == caught
    assert found.epsilon > 0.1


def test_a_delta_above_one_over_n_shows_nothing():
    coins = np.arange(100) >= 50
    assert audit.one_run_lower_bound(np.arange(100.0), coins, delta=0.05).epsilon == 0.0
    assert audit.one_run_lower_bound(np.zeros(100), coins, delta=0.0).epsilon == 0.0  # ties do not tell by their place


RUNS, ROUNDS, SIZES = 3, 6, {"kernel": 300, "bias": 40, "psi": 1}
LEVEL = 1e-6


def sound(seed: int = 0):
    rng = np.random.default_rng(seed)
    return tuple({name: rng.normal(size=(RUNS, ROUNDS, size)) for name, size in SIZES.items()} for _ in range(2))


def against(noise, sums) -> set[str]:
    """The names of the tests whose p-value is below the level."""
    return {finding.test.partition(":")[0] for finding in audit.check_noise(noise, sums) if finding.p_value < LEVEL}


def test_sound_noise_passes_as_often_as_stated():
    """60 times 7 tests at 1 %: 15 and more below it have a probability below 1e-4 (and each is corrected upwards)."""
    values = [finding.p_value for seed in range(60) for finding in audit.check_noise(*sound(seed))]
    assert len(values) == 60 * 7
    assert sum(p < 0.01 for p in values) < 15
    assert min(values) > LEVEL


@pytest.mark.parametrize("factor", [2 / 3, 3 / 2])
def test_another_scale_is_found(factor):
    noise, sums = sound()
    assert {"scale", "shape"} <= against({name: factor * a for name, a in noise.items()}, sums)


def test_a_leaf_without_noise_is_found():
    noise, sums = sound()
    assert against(noise | {"psi": 0 * noise["psi"]}, sums) == {"leaves"}


def share(noise, where: str) -> None:
    for a in noise.values():
        if where == "rounds":
            a[:, 4] = a[:, 1]
        elif where == "runs":
            a[2] = a[0]
    if where == "between leaves":
        noise["bias"] = noise["kernel"][:, :, :40]


@pytest.mark.parametrize("where", ["rounds", "runs", "between leaves"])
def test_noise_that_is_shared_is_found(where):
    noise, sums = sound()
    share(noise, where)
    assert against(noise, sums) == {where}


def repeat(noise, where: str) -> None:
    """Few entries are the same: too few for a correlation."""
    kernel, bias, psi = noise.values()
    if where == "a part of a leaf":
        bias[..., :8] = kernel[..., :8]
    elif where == "signs":
        bias[..., :8] = -kernel[..., :8]
    elif where == "a scalar":
        psi[...] = kernel[..., :1]
    elif where == "a leaf of one round":
        bias[:, 4] = bias[:, 1]
    elif where == "seed + round":
        bias[1, :-1] = bias[0, 1:]
    elif where == "leaf + round":
        psi[:, :-1] = bias[:, 1:, :1]
    for a in noise.values():
        a[0, 3] = np.nan  # a round that one run did not release


@pytest.mark.parametrize(
    ("where", "test"),
    [
        ("a part of a leaf", "between leaves"),
        ("signs", "between leaves"),
        ("a scalar", "between leaves"),
        ("leaf + round", "between leaves"),
        ("a leaf of one round", "rounds"),
        ("seed + round", "runs"),
    ],
)
def test_entries_that_repeat_are_found(where, test):
    noise, sums = sound()
    lattice = 2.0**-9
    repeat(noise, where)
    assert against({name: lattice * np.round(a / lattice + 0.3) for name, a in noise.items()}, sums) == {test}


def test_one_pair_of_equal_entries_has_the_probability_of_its_distance():
    noise = {"leaf": np.ones((1, 2, 1))}
    (found,) = (one for one in audit.check_noise(noise, noise) if one.test.startswith("rounds"))
    assert found.p_value == pytest.approx(2 * 2 * 0.0025 * math.sqrt(2 / math.pi), rel=1e-3)  # one of two tests


def test_what_is_left_of_the_sum_is_found():
    noise, sums = sound()
    assert "sum" in against({name: a + 0.1 * sums[name] for name, a in noise.items()}, sums)


def test_noise_of_another_shape_is_found():
    """The noise has the same variance."""
    noise, sums = sound()
    assert "shape" in against({name: np.sign(a) for name, a in noise.items()}, sums)


def test_rounds_without_a_release_are_left_out():
    noise, sums = sound()
    for a in noise.values():
        a[1, 2] = np.nan
    assert against(noise, sums) == set()
    for a in noise.values():
        a[:] = np.nan
    assert against(noise, sums) == set()
