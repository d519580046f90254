"""The study of unequal numbers of samples, against that of equal ones, closed forms and the limit of many clients."""

import numpy as np
import pytest

from jaxpfl.studies import bernoulli, unequal
from jaxpfl.studies.bernoulli import BernoulliSettings
from jaxpfl.studies.unequal import UnequalSettings
from jaxpfl.support.errors import JaxpflError


def test_equal_sizes_are_the_bernoulli_study():
    equal = unequal.simulated(UnequalSettings(clients=40, least=6, most=6, repetitions=5)).json
    other = bernoulli.run(BernoulliSettings(clients=40, samples=6, repetitions=5))
    for name, row in equal["mse"].items():
        assert row["mean"] == pytest.approx(other["mse"][name]["mean"], rel=1e-5), name
    for name in ("local", "global"):
        assert equal["mse"][name]["closed_form"] == pytest.approx(other["mse"][name]["closed_form"], rel=1e-5)
    assert [row["samples"] for row in equal["by_samples"]] == [6]


def test_closed_forms_and_the_limit_of_every_size():
    """The seed is fixed; under a right formula each of ten comparisons fails with probability 6e-5."""
    result = unequal.simulated(UnequalSettings(clients=2000, least=2, most=21, repetitions=60, prior="uniform")).json
    for name in ("local", "global"):
        row = result["mse"][name]
        assert abs(row["mean"] - row["closed_form"]) < 4 * row["stderr"], name
        assert row["stderr"] < 0.02 * row["mean"], name
    limits = [row["limit"] for row in result["by_samples"]]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] == pytest.approx(2 / (2 + 2))  # uniform is Beta(1, 1): (alpha + beta) / (alpha + beta + n)
    for row in result["by_samples"]:
        found = row["gains"]["personalized"]
        assert abs(found["mean"] - row["limit"]) < 4 * found["stderr"], row["samples"]
        assert found["stderr"] < 0.02
    assert result["mse"]["personalized"]["mean"] < result["mse"]["printed"]["mean"]


def test_sizes_are_spread_evenly():
    given = UnequalSettings(clients=12, least=2, most=5)
    assert np.bincount(given.sizes).tolist() == [0, 0, 3, 3, 3, 3]
    assert given.shown == [2, 3, 4, 5]
    few = UnequalSettings(clients=3, least=1, most=60)
    assert few.sizes.tolist() == few.shown == [1, 21, 41]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"most": 1, "least": 1}, "most must be at least 2"),
        ({"most": 4, "least": 5}, "most must be at least 2 and the least samples \\(5\\), got 4"),
        ({"least": 0}, "least must be a whole number of at least 1, got 0"),
        ({"prior": "unifrm"}, "did you mean 'uniform'"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(JaxpflError, match=message):
        UnequalSettings(**change).check()
