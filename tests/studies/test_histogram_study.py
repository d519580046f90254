"""The histogram study: settings on small data, and mis-clustering rates."""

import math
from dataclasses import replace

import numpy as np
import pytest

from jaxpfl.benchmarks.studies.histogram import study as histogram_study
from jaxpfl.benchmarks.studies.histogram.methods import HistogramSettings, follow, prepare
from jaxpfl.benchmarks.studies.histogram.simulated_users import DirichletMixture
from jaxpfl.benchmarks.studies.histogram.token_counts import TokenCounts, build
from jaxpfl.support.errors import JaxpflError

OWN = HistogramSettings(data="csv:own.csv")


def counts(users: int, tokens: int, each: int) -> TokenCounts:
    """Users that have every token ``each`` times."""
    rows, indices = (axis.ravel() for axis in np.indices((users, tokens)))
    return build(rows, indices, np.full(rows.shape, each), np.arange(users), np.arange(tokens).astype(str))


def test_large_data_change_nothing():
    given = HistogramSettings(data="csv:own.csv", tokens=200)
    assert follow(given, counts(60, 250, 1)) == (given, {})
    assert follow(HistogramSettings(), None) == (HistogramSettings(), {})


def test_defaults_follow_small_data():
    fitted, taken = follow(OWN, counts(30, 20, 2))
    expected = {"tokens": 20, "least_tokens": 20, "kept_tokens": 2, "candidates": 20, "clusters": 5}
    assert taken == expected  # of 30 users, six validate and three are unseen
    assert fitted == replace(OWN, **expected)
    fitted.check()
    data = prepare(fitted, counts(30, 20, 2))
    assert int(data.clients.users.number) == 21


def test_what_was_given_is_kept():
    given = replace(OWN, tokens=15, kept_tokens=12, candidates=13, clusters=7, least_tokens=3)
    assert follow(given, counts(30, 20, 2)) == (given, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 50}, r"tokens must be at most 20 \(the size of the vocabulary of csv:own.csv\), got 50"),
        ({"kept_tokens": 40}, "kept_tokens must be at most 20, got 40"),
        ({"candidates": 30}, "candidates must be at most 20, got 30"),
        ({"floor": 0.2}, "floor must be > 0 and below 1/20, got 0.2"),
        ({"clusters": 25}, r"clusters must be at most 21 \(the number of training users among 30 users\), got 25"),
    ],
)
def test_what_the_data_cannot_hold_is_refused(change, message):
    with pytest.raises(JaxpflError, match=message):
        follow(replace(OWN, **change), counts(30, 20, 2))


def test_three_users_are_needed():
    with pytest.raises(JaxpflError, match=r"at least 3 users must have 2 or more tokens \(least_tokens\), got 2"):
        follow(OWN, counts(2, 20, 1))


def test_labels_are_matched_before_they_are_counted():
    true = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    assert histogram_study.wrong(np.array([2, 2, 2, 0, 0, 1, 1, 1]), true, 3) == 0
    assert histogram_study.wrong(np.array([2, 2, 1, 0, 0, 1, 1, 1]), true, 3) == pytest.approx(1 / 8)
    assert histogram_study.wrong(np.zeros(8, int), true, 3) == pytest.approx(5 / 8)


def test_the_bound():
    """Two centers (.6, .4) and (.4, .6), alpha = 99, m = 50: Delta^2 = .08, sigma^2 = .24 (1/100 + 99/5000)."""
    population = DirichletMixture(np.array([[0.6, 0.4], [0.4, 0.6]]), np.full(2, 0.5), 99.0)
    expected = math.exp(-0.08 / (8 * 0.24 * (0.01 + 0.99 / 50)))
    assert histogram_study.rate(population, 50) == pytest.approx(expected)


@pytest.mark.slow
def test_separated_clusters_are_found_and_ifca_is_slower():
    """Users of 200 tokens at two centers of a spread of 1.5: at most 1 % are wrong after six rounds."""
    population = {"users": 120, "tokens": 40, "components": 2, "samples": 200, "spread": 1.5, "block": 64}
    dimred = {"kept_tokens": 10, "candidates": 20}
    given = HistogramSettings(**population, **dimred, clusters=2, rounds=6, repetitions=3)
    found = histogram_study.misclustering(prepare(given), given)["wrong"]
    assert found["Algorithm 2"][-1] <= 0.01
    assert sum(found["IFCA"]) >= sum(found["Algorithm 2"])
