"""Test that a family of priors is right: its statistic beside the textbook's formula, its level and its power."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxpfl.errors import JaxpflError
from jaxpfl.estimators.normal_means import goodness_of_fit
from jaxpfl.estimators.normal_means.goodness import anderson_darling


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def test_the_statistic():
    z = np.sort(np.random.default_rng(0).normal(size=40) * 2)
    u, i = stats.norm.cdf(z), np.arange(1, 41)
    by_hand = -40 - ((2 * i - 1) * (np.log(u) + np.log(1 - u[::-1]))).sum() / 40
    np.testing.assert_allclose(anderson_darling(jnp.array(z[::-1])), by_hand, rtol=1e-9)
    assert np.isfinite(anderson_darling(jnp.array([-30.0, 0.0, 30.0])))  # probabilities of which round to 0 and 1


@pytest.mark.slow
def test_a_wrong_family_is_found_and_a_right_one_is_not():
    """100 clients at -3 or 3 are not normal; those with a single p-value of more than .02 are one in 50 by chance."""
    rng = np.random.default_rng(0)
    call = jax.jit(lambda key, x: goodness_of_fit(key, x, 1.0, draws=49))
    wrong = call(jax.random.key(0), jnp.array(rng.choice([-3.0, 3.0], 100) + rng.normal(size=100)))
    right = call(jax.random.key(1), jnp.array(2 * rng.normal(size=100) + rng.normal(size=100)))
    np.testing.assert_allclose(wrong.p_value, 1 / 50)
    assert right.p_value > 1 / 50


@pytest.mark.slow
def test_the_level_is_as_stated():
    """80 files of 30 normal clients: p-values of at most .2 are 16 on average, from 3 to 30 in all but 2e-4 of seeds.
    By the table for a known distribution there would be next to none."""
    rng = np.random.default_rng(0)
    call = jax.jit(lambda key, x: goodness_of_fit(key, x, 1.0, draws=49).p_value)
    x = jnp.array(rng.normal(size=(80, 30)) + rng.normal(size=(80, 30)))
    small = sum(float(call(jax.random.key(i), own)) <= 0.2 for i, own in enumerate(x))
    assert 3 <= small <= 30


def test_bad_arguments_are_refused_in_a_line():
    with pytest.raises(JaxpflError, match="draws must be a whole number of at least 1, got 0"):
        goodness_of_fit(jax.random.key(0), [1.0, 2.0], 1.0, draws=0)
