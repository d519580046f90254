"""What is accounted is what the engine does: plans are read off the objects that a round is made of."""

import numpy as np
import pytest

from jaxpfl import JaxpflError
from jaxpfl.participation import full, poisson, uniform
from jaxpfl.privacy import (
    CentralNoise,
    DistributedNoise,
    FixedSize,
    Full,
    Mechanism,
    PerStepNoise,
    Poisson,
    PrivacyPlan,
    calibrated,
    plan_of,
    sampling_of,
)


@pytest.mark.parametrize(
    ("participation", "sampling"),
    [
        (full(10), Full()),
        (uniform(10, 3), FixedSize(10, 3)),
        (poisson(10, 0.25), Poisson(0.25, 10)),
        (poisson(10, 0.25, 6), Poisson(0.25, 10, 6)),
    ],
)
def test_sampling(participation, sampling):
    assert sampling_of(participation) == sampling


@pytest.mark.parametrize("rate", [0.1, 1 / 3, 1e-3, 0.999])
def test_a_rate_is_accounted_as_it_is_drawn(rate):
    """Scores are multiples of 2^-23: of all such numbers, the share below the threshold is the stated rate."""
    drawn = poisson(10, rate)
    scores = np.arange(2**23, dtype=np.float64) / 2**23
    assert drawn.rate == (scores < np.float32(drawn.rate)).mean() >= rate
    assert drawn.expected_cohort == 10 * rate
    sampling = sampling_of(drawn)
    assert isinstance(sampling, Poisson)
    assert sampling.rate == drawn.rate


@pytest.mark.parametrize(
    ("mechanism", "noise"),
    [
        (Mechanism(1.5, 0.3), CentralNoise(1.5, 0.3)),
        (Mechanism(1.5, 0.3, "distributed", 7), DistributedNoise(1.5, 7, 0.3)),
        (Mechanism(1.5, 0.3, "per_step"), PerStepNoise((0.3, 0.3), (0.45, 0.45), 4, 10)),
        (Mechanism(1.5, 0.3, "per_step", scale_clipping_norm=2.0), PerStepNoise((0.3, 2.0), (0.45, 3.0), 4, 10)),
        (Mechanism(1.5, 0.3, "per_step", joint=True, min_uploads=6), PerStepNoise((0.3,), (0.45,), 4, 6)),
    ],
)
def test_noise(mechanism, noise):
    plan = plan_of(mechanism, full(10), rounds=5, steps=4, scales=1)
    assert plan.rounds == 5
    assert plan.noise_multiplier == pytest.approx(noise.multiplier)
    assert type(plan.noise) is type(noise)
    assert plan.noise.clipping_norm == pytest.approx(noise.clipping_norm)


def test_adaptive_clipping_is_worth_its_noise_multiplier_with_the_count_released_too():
    plan = plan_of(Mechanism(1.5, 0.3, quantile=0.5, count_stddev=2.0), full(10), rounds=5)
    assert plan.noise_multiplier == pytest.approx(1.5)
    assert plan.noise.clipping_norm is None


@pytest.mark.parametrize(
    "mechanism",
    [
        Mechanism(9.0, 0.3),
        Mechanism(9.0, 0.3, "distributed", 7),
        Mechanism(9.0, 0.3, "per_step", scale_clipping_norm=2.0),
        Mechanism(9.0, 0.3, quantile=0.5, count_stddev=30.0),
    ],
)
def test_calibrated_noise_keeps_the_budget_and_no_less_would(mechanism):
    found = calibrated(mechanism, full(10), 2.0, 1e-4, rounds=5, steps=4, scales=1)
    less = type(found)(**{**vars(found), "noise_multiplier": 0.999 * float(np.asarray(found.noise_multiplier))})
    spent, more = (plan_of(m, full(10), rounds=5, steps=4, scales=1).epsilon(1e-4) for m in (found, less))
    assert spent <= 2.0 < more
    assert spent == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize(
    ("mechanism", "participation", "message"),
    [
        (Mechanism(1.0, 1.0, "distributed", 3), poisson(10, 0.5), "cannot be accounted with poisson"),
        (Mechanism(1.0, 1.0, "per_step"), poisson(10, 0.5), "cannot be accounted with poisson"),
        (Mechanism((1.0, 2.0)), full(10), "one noise multiplier"),
        (Mechanism(1.0, (1.0, 2.0)), full(10), "one clipping norm"),
    ],
)
def test_what_cannot_be_accounted_is_refused(mechanism, participation, message):
    with pytest.raises(JaxpflError, match=message):
        plan_of(mechanism, participation, rounds=5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier must be >= 0"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier must be >= 0"),
        ({"noise_multiplier": 1.0, "clipping_norm": 0.0}, "clipping_norm must be > 0"),
        ({"noise_multiplier": 1.0, "clipping_norm": (1.0, -1.0)}, "clipping_norm must be > 0"),
        ({"noise_multiplier": 1.0, "clipping_norm": (1.0, 2.0), "noise": "per_step"}, "for all runs"),
        ({"noise_multiplier": 1.0, "noise": "local"}, "central, distributed or per_step"),
        ({"noise_multiplier": 1.0, "noise": "distributed"}, "needs min_uploads"),
        ({"noise_multiplier": 1.0, "min_uploads": 3}, "noise that the clients add"),
        ({"noise_multiplier": 1.0, "joint": True}, "are for noise = per_step"),
        ({"noise_multiplier": 1.0, "quantile": 1.0, "count_stddev": 1.0}, "quantile must be > 0 and < 1"),
        ({"noise_multiplier": 1.0, "quantile": 0.5}, "count_stddev must be > 0"),
        ({"noise_multiplier": 4.0, "quantile": 0.5, "count_stddev": 2.0}, "above noise_multiplier / 2"),
        (
            {"noise_multiplier": 1.0, "noise": "distributed", "min_uploads": 3, "quantile": 0.5},
            "adaptive clipping has central noise only",
        ),
    ],
)
def test_mechanisms_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(JaxpflError, match=message):
        Mechanism(**arguments)


def test_a_claim_is_that_of_its_plan():
    plan = plan_of(Mechanism(2.0, 0.3), poisson(50, 0.1, 20), rounds=100)
    assert plan == PrivacyPlan(CentralNoise(2.0, 0.3), Poisson(poisson(50, 0.1).rate, 50, 20), 100)
    assert plan.epsilon(1e-4) == pytest.approx(1.966, abs=2e-3)  # privacy.md
