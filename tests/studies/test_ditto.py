"""Ditto's point estimation against its closed form, and at lambda* against the posterior mean."""

import dataclasses
import functools
from statistics import NormalDist

import numpy as np
import pytest

from jaxpfl.benchmarks.studies import ditto
from jaxpfl.benchmarks.studies.ditto import DittoSettings

FALSE_ALARM = 1e-4
"""Probability that the test of one setting fails by chance: the bound of all its estimators together."""
GIVEN = [
    DittoSettings(clients=20, samples=5, sigma=1.0, tau=0.5, repetitions=1500),
    DittoSettings(clients=3, samples=4, sigma=0.5, tau=2.0, repetitions=3000, seed=1),
]


@functools.cache
def simulated(given):
    return ditto.simulated(given)


every = pytest.mark.parametrize(
    "given", [pytest.param(GIVEN[0], id="many"), pytest.param(GIVEN[1], id="few", marks=pytest.mark.slow)]
)


@pytest.mark.slow
@every
def test_errors_over_lambda_are_those_of_theory(given):
    found = simulated(given)
    assert found.json["lambda_star"] == given.sigma**2 / (given.samples * given.tau**2)
    bound = NormalDist().inv_cdf(1 - FALSE_ALARM / (2 * len(found.series)))
    assert found.json["largest_z"] < bound
    # The same errors are no longer those of theory for samples that spread a tenth more.
    other = dataclasses.replace(given, sigma=1.1 * given.sigma)
    values = found.series["ditto 1"]
    gap = abs(values.mean() - ditto.error(other, given.best))
    assert gap / (values.std(ddof=1) / np.sqrt(len(values))) > bound


@every
def test_ditto_at_its_best_lambda_is_the_posterior_mean(given):
    found = simulated(given)
    assert found.json["oracle_gap"] < 1e-5
    np.testing.assert_allclose(found.series["ditto 1"], found.series["personalized"], rtol=1e-4)
    np.testing.assert_allclose(found.series["ditto 0"], found.series["local"], rtol=1e-4)
    w, x = ditto.draw(given)
    mean = x.mean(axis=1)
    precision = given.samples / given.sigma**2, 1 / given.tau**2
    expected = (precision[0] * mean + precision[1] * mean.mean(axis=0)) / sum(precision)
    error = ((expected - w) ** 2).mean(axis=0)
    np.testing.assert_allclose(found.series["personalized"], error, rtol=1e-5)


def test_no_other_lambda_has_a_smaller_error():
    for given in GIVEN:
        at = given.best * np.geomspace(0.01, 100, 2001)
        errors = ditto.error(given, at)
        assert at[errors.argmin()] == pytest.approx(given.best, rel=1e-9)
        assert errors.max() < max(ditto.error(given, 0.0), ditto.error(given, np.inf))
