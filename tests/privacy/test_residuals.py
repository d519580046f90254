"""Tests of residual noise, on noise that is known: what is as claimed passes, and each fault is found by its test."""

import numpy as np
import pytest

from jaxpfl.privacy.audit import check_noise

RUNS, ROUNDS, SIZES = 3, 6, {"kernel": 300, "bias": 40, "psi": 1}
LEVEL = 1e-6


def sound(seed: int = 0):
    rng = np.random.default_rng(seed)
    return tuple({name: rng.normal(size=(RUNS, ROUNDS, size)) for name, size in SIZES.items()} for _ in range(2))


def against(noise, sums) -> set[str]:
    """The names of the tests whose p-value is below the level."""
    return {finding.test.partition(":")[0] for finding in check_noise(noise, sums) if finding.p_value < LEVEL}


def test_sound_noise_passes_as_often_as_stated():
    """60 times 7 tests at 1 %: 15 and more below it have a probability below 1e-4 (and each is corrected upwards)."""
    values = [finding.p_value for seed in range(60) for finding in check_noise(*sound(seed))]
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


def test_noise_that_two_rounds_share_is_found():
    noise, sums = sound()
    for a in noise.values():
        a[:, 4] = a[:, 1]
    assert against(noise, sums) == {"rounds"}


def test_noise_that_two_runs_share_is_found():
    noise, sums = sound()
    for a in noise.values():
        a[2] = a[0]
    assert against(noise, sums) == {"runs"}


def test_noise_that_two_leaves_share_is_found():
    noise, sums = sound()
    assert against(noise | {"bias": noise["kernel"][:, :, :40]}, sums) == {"between leaves"}


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
