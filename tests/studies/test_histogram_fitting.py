"""Settings of the histogram study on small data: defaults follow, and all that cannot be is said at once."""

from dataclasses import replace

import numpy as np
import pytest

from jaxpfl.data.sources.token_counts import TokenCounts, build
from jaxpfl.studies.histograms import data as histogram_data
from jaxpfl.studies.histograms import fitting as histogram_fitting
from jaxpfl.studies.histograms.settings import HistogramSettings
from jaxpfl.support.errors import JaxpflError

OWN = HistogramSettings(data="csv:own.csv")


def counts(users: int, tokens: int, each: int) -> TokenCounts:
    """Users that have every token ``each`` times."""
    rows, indices = (axis.ravel() for axis in np.indices((users, tokens)))
    return build(rows, indices, np.full(rows.shape, each), np.arange(users), np.arange(tokens).astype(str))


def test_large_data_change_nothing():
    given = HistogramSettings(data="csv:own.csv", tokens=200)
    assert histogram_fitting.follow(given, counts(60, 250, 1)) == (given, {})
    assert histogram_fitting.follow(HistogramSettings(), None) == (HistogramSettings(), {})


def test_defaults_follow_small_data():
    fitted, taken = histogram_fitting.follow(OWN, counts(30, 20, 2))
    expected = {"tokens": 20, "least_tokens": 20, "kept_tokens": 2, "candidates": 20, "clusters": 5}
    assert taken == expected  # of 30 users, six validate and three are unseen
    assert fitted == replace(OWN, **expected)
    fitted.check()
    data = histogram_data.prepare(fitted, counts(30, 20, 2))
    assert int(data.clients.users.number) == 21
    line = histogram_fitting.said(taken, vars(fitted))
    assert line.endswith("which no eps covers: tokens 20, least_tokens 20, kept_tokens 2, candidates 20, clusters 5")
    assert histogram_fitting.follow(replace(OWN, tune=True), counts(30, 20, 2))[1]["folds"] == 3


def test_what_was_given_is_kept():
    given = replace(OWN, tokens=15, kept_tokens=12, candidates=13, clusters=7, least_tokens=3)
    assert histogram_fitting.follow(given, counts(30, 20, 2)) == (given, {})


def test_all_that_cannot_be_is_said_at_once():
    given = replace(OWN, tokens=50, kept_tokens=40, candidates=30, clusters=25, floor=0.2, tune=True, folds=5)
    with pytest.raises(JaxpflError) as caught:
        histogram_fitting.follow(given, counts(30, 20, 2))
    assert str(caught.value).split("; ") == [
        "tokens must be at most 20 (those of csv:own.csv), got 50",
        "kept_tokens must be at most 20, got 40",
        "candidates must be at most 20, got 30",
        "floor must be > 0 and below 1/20, got 0.2",
        "clusters must be at most 21 (the users that estimate, of 30), got 25",
        "folds must be at most 3, two of the 6 validation users each, got 5",
    ]
    with pytest.raises(JaxpflError, match="three users with least_tokens 2 tokens are needed, got 2"):
        histogram_fitting.follow(OWN, counts(2, 20, 1))
