"""Both sides of each limit, defaults, and searches that begin elsewhere: what no test saw changed, by mutation."""

import math
from dataclasses import replace

import numpy as np
import pytest

from jaxpfl import JaxpflError
from jaxpfl.core.participation import cyclic, full, poisson
from jaxpfl.privacy import (
    CentralNoise,
    Cyclic,
    DistributedNoise,
    FixedSize,
    Full,
    Mechanism,
    PerStepNoise,
    Poisson,
    PrivacyPlan,
    accounting,
    calibrate,
    calibrated,
    discrete_gaussian,
    plan_of,
    sampling_of,
    silos,
)
from jaxpfl.privacy.mechanism import _LEAST_STDDEV


@pytest.mark.parametrize(
    "given",
    [
        {"noise_multiplier": _LEAST_STDDEV, "clipping_norm": 1.0},
        {"noise_multiplier": 0.0, "clipping_norm": 1e-35},
        {"noise_multiplier": 1.0, "noise": "distributed", "min_uploads": 1},
        {"noise_multiplier": 2.0, "quantile": 0.5, "count_stddev": np.nextafter(1.0, 2)},
    ],
)
def test_the_last_values_that_mechanisms_take(given):
    Mechanism(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"noise_multiplier": np.nextafter(_LEAST_STDDEV, 0), "clipping_norm": 1.0}, "must be at least 1e-30"),
        ({"noise_multiplier": 1.0, "noise": "distributed", "min_uploads": 0}, "min_uploads must be at least 1, got 0"),
        ({"noise_multiplier": 2.0, "quantile": 0.5, "count_stddev": 1.0}, "above noise_multiplier / 2 = 1"),
        ({"noise_multiplier": 0.0, "quantile": 0.5, "count_stddev": 0.0}, "count_stddev must be > 0"),
        ({"noise_multiplier": 1.0, "quantile": 0.5, "count_stddev": math.inf}, "count_stddev must be > 0"),
        ({"noise_multiplier": math.inf}, "noise_multiplier must be >= 0 and finite"),
        ({"noise_multiplier": (1.0, -1.0)}, "noise_multiplier must be >= 0"),
    ],
)
def test_the_first_values_that_mechanisms_refuse(given, message):
    with pytest.raises(JaxpflError, match=message):
        Mechanism(**given)


def test_the_least_uploads_of_a_round():
    assert Mechanism(1.0, noise="distributed", min_uploads=7).least_uploads(9.0) == 7
    assert Mechanism(1.0, noise="per_step").least_uploads(3.4) == 3
    assert Mechanism(1.0).least_uploads(9.0) == 0


def test_streams_are_those_of_settings_without_numbers_of_one_run():
    def named(**given):
        return Mechanism(**({"noise_multiplier": 1.0} | given)).stream

    assert named(noise_multiplier=0.0) is None
    assert named(noise_multiplier=(0.0, 2.0)) is not None
    assert named() == named(noise_multiplier=2.0) == named(clipping_norm=0.1)
    assert named(noise="per_step") != named(noise="per_step", noise_multiplier=2.0)
    assert named(noise="per_step") != named(noise="per_step", clipping_norm=0.1)
    assert named() != named(quantile=0.5, count_stddev=1.0)
    assert named(noise="banded", bands=2) != named(noise="banded", bands=3)


def test_cyclic_cohorts_are_sampled_at_the_rate_of_their_turns():
    assert sampling_of(cyclic(12, 3, 0.5)) == Cyclic(3, 0.5, 12)
    assert sampling_of(cyclic(12, 3)) == Cyclic(3, 1.0, 12)
    assert sampling_of(cyclic(12, 3)._replace(rate=None)) == Cyclic(3, 1.0, 12)


def test_a_poisson_cohort_has_a_cap_only_where_it_can_cut():
    assert sampling_of(poisson(10, 0.25, 9)).cap == 9
    assert sampling_of(poisson(10, 0.25, 10)).cap is None


@pytest.mark.parametrize("z", [0.0, 1e-3, 50.0])
@pytest.mark.parametrize(
    "mechanism",
    [
        Mechanism(1.0, 0.3),
        Mechanism(1.0, 0.3, "per_step", scale_clipping_norm=2.0),
        Mechanism(1.0, 0.3, quantile=0.5, count_stddev=30.0),
    ],
    ids=["central", "per step", "adaptive"],
)
def test_calibration_does_not_depend_on_the_noise_that_it_replaces(mechanism, z):
    run = {"rounds": 5, "steps": 4, "scales": 1}
    want = calibrated(mechanism, full(10), 2.0, 1e-4, **run)
    assert calibrated(replace(mechanism, noise_multiplier=z), full(10), 2.0, 1e-4, **run) == want


def test_the_noise_of_a_count_limits_the_result_of_a_calibration_alone():
    free = calibrate(PrivacyPlan(CentralNoise(1.0), Full(), 20), 2.0, 1e-5).noise_multiplier
    near = PrivacyPlan(CentralNoise(1.0, count_stddev=0.505 * free), Full(), 20)
    assert calibrate(near, 2.0, 1e-5).noise_multiplier == pytest.approx(free, rel=2e-4)
    with pytest.raises(JaxpflError, match="count_stddev must be above"):
        calibrate(PrivacyPlan(CentralNoise(1.0, count_stddev=0.499 * free), Full(), 20), 2.0, 1e-5)


def test_a_search_that_ends_below_the_target_goes_up_in_small_steps(monkeypatch):
    plan = PrivacyPlan(CentralNoise(1.0), Full(), 3)
    want = calibrate.__wrapped__(plan, 2.0, 1e-5).noise_multiplier
    solve = accounting._solve
    monkeypatch.setattr(accounting, "_solve", lambda *args: solve(*args) * (1 - 5e-4))
    found = calibrate.__wrapped__(plan, 2.0, 1e-5)
    assert found.epsilon(1e-5) <= 2.0
    assert found.noise_multiplier == pytest.approx(want, rel=2e-4)


def test_the_largest_epsilon_of_a_calibration_is_a_target_still():
    assert calibrate(PrivacyPlan(CentralNoise(1.0), Full(), 3), 200.0, 1e-5).epsilon(1e-5) <= 200.0
    with pytest.raises(JaxpflError, match="at most 200"):
        calibrate(PrivacyPlan(CentralNoise(1.0), Full(), 3), np.nextafter(200.0, 201), 1e-5)


def test_a_bracket_holds_the_noise_between_a_multiplier_and_its_double():
    for plan in (PrivacyPlan(CentralNoise(1.0), Full(), 3), PrivacyPlan(CentralNoise(1.0), Poisson(0.2), 20)):
        lower, upper = accounting._bracket(plan, 2.0, 1e-5, "rdp")
        assert upper == 2 * lower
        spent = [plan.with_noise_multiplier(z).epsilon(1e-5, "rdp") for z in (lower, upper)]
        assert spent[0] > 2.0 >= spent[1]


def test_the_smallest_delta_of_pld_is_accounted():
    plan = PrivacyPlan(CentralNoise(5.0), Full(), 1)
    assert plan.epsilon(accounting.SMALLEST_DELTA) > plan.epsilon(1e-9)
    with pytest.raises(JaxpflError, match="pld resolves no delta below"):
        plan.epsilon(np.nextafter(accounting.SMALLEST_DELTA, 0))


@pytest.mark.parametrize(
    ("noise", "sampling"),
    [
        (DistributedNoise(1.0, 8), FixedSize(50, 8)),
        (PerStepNoise((1.0,), (1.0,), 1, 50), Full(50)),
        (CentralNoise(1.0, coefficients=(0.8, 0.6)), Cyclic(2, 1.0, 10)),
    ],
)
def test_the_last_combinations_that_are_accounted(noise, sampling):
    assert PrivacyPlan(noise, sampling, 4).releases_about_one == (2 if isinstance(sampling, Cyclic) else 4)


def test_compressed_sums_hide_a_client_by_its_own_noise_among_all():
    """A server that sees every compressed message sees who takes part: no sampling, and no others' noise."""
    mechanism = Mechanism(2.0, 0.5, "distributed", 4)
    plan = plan_of(mechanism, full(10), rounds=5, compressed=True)
    assert plan.sampling == Full(10)
    assert isinstance(plan.noise, DistributedNoise)
    assert plan.noise.alone
    assert plan.epsilon(1e-5) > plan_of(mechanism, full(10), rounds=5).epsilon(1e-5)


def test_tables_reach_nine_and_a_half_standard_deviations_and_no_further():
    """The width of a message rests on it: sigma = 100 steps take 11 bits, and one more from 1024 on."""
    table = discrete_gaussian.table(100.0)
    assert table.largest == 951
    assert table.distance == (2 * 951 + 2) * 2.0**-64
    assert table.message_bits(2) == 11
    assert table.message_bits(146) == 11
    assert table.message_bits(147) == 12


def test_the_largest_stddev_of_a_table_is_one_still(monkeypatch):
    monkeypatch.setattr(discrete_gaussian, "MOST_STDDEV", 3.0)
    assert discrete_gaussian.table(3.0).largest == 30
    with pytest.raises(JaxpflError, match="stddev must be at most 3 steps"):
        discrete_gaussian.table(np.nextafter(3.0, 4))


@pytest.mark.parametrize(("epsilon", "delta", "sensitivity"), [(1.0, 1e-5, 1), (0.5, 1e-3, 15), (8.0, 1e-6, 1)])
def test_stddev_is_the_least_that_is_enough(epsilon, delta, sensitivity):
    """With the error of sampling, whose bound is (1 + e^eps) times the table's distance."""
    found = discrete_gaussian.stddev(epsilon, delta, sensitivity)

    def spent(sigma):
        room = (1 + math.exp(epsilon)) * (2 * (math.ceil(9.5 * sigma) + 1) + 2) * 2.0**-64
        return discrete_gaussian.delta(sigma, epsilon, sensitivity) + room

    assert spent(found) <= delta < spent(found * (1 - 1e-5))


def test_delta_far_out_is_neither_negative_nor_infinite():
    assert discrete_gaussian.delta(50.0, 800.0, 1) == 0.0
    assert discrete_gaussian.delta(0.5, 1e-9, 1) == pytest.approx(
        1 / (1 + 2 * sum(np.exp(-2.0 * k**2) for k in range(1, 9))), rel=1e-6
    )


def of_sizes(sizes, **more):
    told = {"batch_size": 10, "rounds": 3, "clipping_norm": 0.5, "releases": 1} | more
    return silos.mechanism_of(np.array(sizes), per_round=lambda n: 2, once=lambda n: 1, **told)


def test_silos_of_the_batch_size_give_all_of_their_examples():
    mechanism = of_sizes([9, 10, 11])
    assert [silo.threshold for silo in mechanism.silos] == [silos.WORD, silos.WORD, silos.WORD * 10 // 11]
    assert [silo.expected for silo in mechanism.silos[:2]] == [9.0, 10.0]
    assert [mechanism.plan(silo).rounds for silo in mechanism.silos] == [7, 7, 7]
    assert mechanism.slots == 11
    assert mechanism.plan(mechanism.silos[2]).sampling.cap is None
    assert of_sizes([0, 3]).slots == 3


def test_a_silo_like_one_before_needs_no_search_of_its_own(monkeypatch):
    """Whole batches of equal numbers of steps: the neighbour's noise is right at once."""
    searches = []
    search = silos.calibrate
    monkeypatch.setattr(silos, "calibrate", lambda *given: searches.append(given) or search(*given))
    found = of_sizes([5, 6, 7, 8], noise_multiplier=1.0).calibrated(3.0, 1e-3)
    assert len(searches) == 1
    assert len({silo.noise_multiplier for silo in found.silos}) == 1


def test_epsilon_of_a_coarse_grid_is_refined():
    """The accountant's error is on the safe side, and smaller on a grid of half the step."""
    plan = PrivacyPlan(CentralNoise(0.5), Poisson(0.2), 30)
    assert plan._pld_step > 2 * accounting.FINE
    with accounting.quiet():
        fine, coarse = (
            plan.accountant("pld", step).compose(plan.event()).get_epsilon(1e-5) for step in (1e-3, plan._pld_step)
        )
    assert fine < plan.epsilon(1e-5) < coarse


@pytest.mark.slow
def test_silos_are_calibrated_each_for_itself_near_its_target():
    mechanism = of_sizes([40, 50, 400], noise_multiplier=0.0, cuts=False)
    with pytest.raises(JaxpflError, match="noise multiplier of 0"):
        mechanism.epsilons(1e-3, "rdp")
    found = mechanism.calibrated(3.0, 1e-3, "rdp")
    assert mechanism.noise_multiplier == 0.0
    spent = found.epsilons(1e-3, "rdp")
    assert max(spent) <= 3.0
    assert min(spent) >= 0.997 * 3.0
    assert found.noise_multiplier == max(silo.noise_multiplier for silo in found.silos)
    assert found == replace(mechanism, silos=found.silos)
