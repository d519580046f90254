"""Both sides of each limit, defaults, and searches that begin elsewhere: what no test saw changed, by mutation."""

import math

import numpy as np
import pytest

from jaxpfl import JaxpflError
from jaxpfl.privacy import (
    CentralNoise,
    Full,
    Mechanism,
    Poisson,
    PrivacyPlan,
    accounting,
    calibrate,
    discrete_gaussian,
    silos,
)


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


def test_the_noise_of_a_count_limits_the_result_of_a_calibration_alone():
    free = calibrate(PrivacyPlan(CentralNoise(1.0), Full(), 20), 2.0, 1e-5).noise_multiplier
    near = PrivacyPlan(CentralNoise(1.0, count_stddev=0.505 * free), Full(), 20)
    assert calibrate(near, 2.0, 1e-5).noise_multiplier == pytest.approx(free, rel=2e-4)
    with pytest.raises(JaxpflError, match="count_stddev must be above"):
        calibrate(PrivacyPlan(CentralNoise(1.0, count_stddev=0.499 * free), Full(), 20), 2.0, 1e-5)


def test_the_smallest_delta_of_pld_is_accounted():
    plan = PrivacyPlan(CentralNoise(5.0), Full(), 1)
    assert plan.epsilon(accounting.SMALLEST_DELTA) > plan.epsilon(1e-9)
    with pytest.raises(JaxpflError, match="delta must be at least 1e-12 for pld"):
        plan.epsilon(np.nextafter(accounting.SMALLEST_DELTA, 0))


def test_tables_reach_nine_and_a_half_standard_deviations_and_no_further():
    """The width of a message rests on it: sigma = 100 steps take 11 bits, and one more from 1024 on."""
    table = discrete_gaussian.table(100.0)
    assert table.largest == 951
    assert table.distance == (2 * 951 + 2) * 2.0**-64
    assert table.message_bits(2) == 11
    assert table.message_bits(146) == 11
    assert table.message_bits(147) == 12


@pytest.mark.parametrize(("epsilon", "delta", "sensitivity"), [(1.0, 1e-5, 1), (0.5, 1e-3, 15), (8.0, 1e-6, 1)])
def test_stddev_is_the_least_that_is_enough(epsilon, delta, sensitivity):
    """With the error of sampling, whose bound is (1 + e^eps) times the table's distance."""
    found = discrete_gaussian.stddev(epsilon, delta, sensitivity)

    def spent(sigma):
        room = (1 + math.exp(epsilon)) * (2 * (math.ceil(9.5 * sigma) + 1) + 2) * 2.0**-64
        return discrete_gaussian.delta(sigma, epsilon, sensitivity) + room

    assert spent(found) <= delta < spent(found * (1 - 1e-5))


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


def test_epsilon_of_a_coarse_grid_is_refined():
    """The accountant's error is on the safe side, and smaller on a grid of half the step."""
    plan = PrivacyPlan(CentralNoise(0.5), Poisson(0.2), 30)
    assert plan._pld_step > 2 * accounting.FINE
    with accounting.quiet():
        fine, coarse = (
            plan.accountant("pld", step).compose(plan.event()).get_epsilon(1e-5) for step in (1e-3, plan._pld_step)
        )
    assert fine < plan.epsilon(1e-5) < coarse
