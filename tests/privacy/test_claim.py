"""The accounted mechanism is the engine's: plans are read off the objects that a round is made of."""

import statistics

import numpy as np
import pytest

from jaxpfl import JaxpflError
from jaxpfl.core.participation import full, poisson, uniform
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


def test_runs_of_several_clipping_norms_are_calibrated_at_once():
    """The multiplier is relative to the norm, and each run's own plan meets the budget with it."""
    one = calibrated(Mechanism(1.0, clipping_norm=0.5), full(10), 2.0, 1e-4, rounds=5)
    several = calibrated(Mechanism(1.0, clipping_norm=(0.5, 2.0)), full(10), 2.0, 1e-4, rounds=5)
    assert several.noise_multiplier == one.noise_multiplier
    assert several.clipping_norm == (0.5, 2.0)
    for norm in several.clipping_norm:
        plan = plan_of(Mechanism(several.noise_multiplier, clipping_norm=norm), full(10), rounds=5)
        assert 1.98 < plan.epsilon(1e-4) <= 2.0


@pytest.mark.parametrize(
    ("mechanism", "participation", "message"),
    [
        (Mechanism(1.0, 1.0, "per_step"), poisson(10, 0.5), "cannot be accounted for with poisson"),
        (Mechanism((1.0, 2.0)), full(10), "noise_multiplier and clipping_norm must be single"),
        (Mechanism(1.0, (1.0, 2.0)), full(10), "clipping_norm must be single numbers, got several"),
    ],
)
def test_what_cannot_be_accounted_is_refused(mechanism, participation, message):
    with pytest.raises(JaxpflError, match=message):
        plan_of(mechanism, participation, rounds=5, steps=1, scales=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier must be >= 0"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier must be >= 0"),
        ({"noise_multiplier": 1e-20, "clipping_norm": 1e-15}, "must be 0 or at least 1e-30, got 1e-35"),
        ({"noise_multiplier": 1.0, "clipping_norm": 0.0}, "clipping_norm must be > 0"),
        ({"noise_multiplier": 1.0, "clipping_norm": (1.0, -1.0)}, "clipping_norm must be > 0"),
        ({"noise_multiplier": 1.0, "noise": "local"}, "central, distributed, per_step or banded"),
        ({"noise_multiplier": 1.0, "noise": "distributed"}, "requires min_uploads"),
        ({"noise_multiplier": 1.0, "min_uploads": 3}, "min_uploads requires noise = distributed or per_step"),
        ({"noise_multiplier": 1.0, "joint": True}, "require noise = per_step"),
        ({"noise_multiplier": 1.0, "quantile": 1.0, "count_stddev": 1.0}, "quantile must be > 0 and < 1"),
        ({"noise_multiplier": 1.0, "quantile": 0.5}, "quantile requires count_stddev"),
        ({"noise_multiplier": 4.0, "quantile": 0.5, "count_stddev": 2.0}, "above noise_multiplier / 2"),
    ],
)
def test_mechanisms_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(JaxpflError, match=message):
        Mechanism(**arguments)


def test_a_claim_is_that_of_its_plan():
    plan = plan_of(Mechanism(2.0, 0.3), poisson(50, 0.1, 20), rounds=100)
    assert plan == PrivacyPlan(CentralNoise(2.0, 0.3), Poisson(poisson(50, 0.1).rate, 50, 20), 100)
    assert plan.epsilon(1e-4) == pytest.approx(1.966, abs=2e-3)  # privacy.md


def own_share(z: float, uploads: int, rounds: int, cohort=None) -> PrivacyPlan:
    mechanism = Mechanism(z, 0.3, "distributed", uploads)
    return plan_of(mechanism, cohort or full(10), rounds=rounds, compressed=True)


@pytest.mark.parametrize(("z", "uploads", "rounds"), [(20.0, 10, 1), (40.0, 4, 25)])
def test_a_compressed_upload_is_hidden_by_its_own_share_alone(z, uploads, rounds):
    """R Gaussian releases of z / sqrt(K_min) are one of z / sqrt(K_min R), whose delta has a closed form (Balle and
    Wang 2018, Theorem 8)."""
    plan = own_share(z, uploads, rounds)
    assert plan.noise_multiplier == pytest.approx(z / np.sqrt(uploads))
    epsilon, s = plan.epsilon(1e-4), z / np.sqrt(uploads * rounds)
    normal = statistics.NormalDist().cdf
    delta = normal(1 / (2 * s) - epsilon * s) - np.exp(epsilon) * normal(-1 / (2 * s) - epsilon * s)
    assert delta == pytest.approx(1e-4, rel=0.01)
    summed = plan_of(Mechanism(z, 0.3, "distributed", uploads), full(10), rounds=rounds)
    assert summed.epsilon(1e-4) < epsilon


def test_whose_compressed_upload_is_seen_takes_part_for_all_to_see():
    """No amplification: cohorts of a fixed size are accounted as if all took part, and their K_min is still theirs."""
    assert own_share(20.0, 3, 5, uniform(10, 3)) == own_share(20.0, 3, 5)
    with pytest.raises(JaxpflError, match="min_uploads must be at most 3, got 4"):
        own_share(20.0, 4, 5, uniform(10, 3))


def test_the_statement_says_whose_noise_it_is():
    said = str(own_share(20.0, 4, 5).statement(1e-4))
    assert "z = 10 (own share of the noise)" in said
    assert "zero-out" in said
    assert "own share" not in str(plan_of(Mechanism(20.0, 0.3, "distributed", 4), full(10), rounds=5).statement(1e-4))


def test_calibrated_noise_of_compressed_uploads_keeps_the_budget():
    mechanism = Mechanism(1.0, 0.3, "distributed", 9)
    alone = calibrated(mechanism, full(10), 2.0, 1e-4, rounds=5, compressed=True)
    summed = calibrated(mechanism, full(10), 2.0, 1e-4, rounds=5)
    assert plan_of(alone, full(10), rounds=5, compressed=True).epsilon(1e-4) == pytest.approx(2.0, rel=1e-3)
    assert float(np.asarray(alone.noise_multiplier)) == pytest.approx(3 * float(np.asarray(summed.noise_multiplier)))


def test_a_way_to_draw_that_is_not_known_is_refused():
    """Say, the first K clients always: accounted as if it were uniform, its epsilon would be a tenth of the truth."""
    mine = uniform(10, 3)._replace(name="mine", fixed_size=False)
    with pytest.raises(JaxpflError, match="participation mine must set rate"):
        sampling_of(mine)
    with pytest.raises(JaxpflError, match="participation mine must set rate"):
        plan_of(Mechanism(1.0), mine, rounds=2)
    assert sampling_of(mine._replace(rate=0.3)) == Poisson(0.3, 10, 3)
