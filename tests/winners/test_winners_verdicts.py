"""The best method of a cell: chosen on validation, its lead on test, paired over splits."""

import math

import numpy as np
import pytest
from scipy import stats

from jaxpfl.benchmarks.winners.atlas import Place, Scores
from jaxpfl.benchmarks.winners.skew import Measures
from jaxpfl.benchmarks.winners.verdicts import Lead, interval, lead, ranking, verdict

LOCAL = (0.80, 0.82, 0.79, 0.81, 0.83)


def scores(test, validation=0.5, reference=False):
    return Scores({"lr": 0.1}, (), 6, 10, (validation,) * len(test), tuple(test), reference)


def place(**methods):
    measured = Measures(20, 45.0, 3.0, 10, 0.25)
    named = {name.replace("_", "-"): one for name, one in methods.items()}
    return Place("one", "digits", "linear", "3 classes", "classes", 1.0, 400, None, (), measured, named, {})


def test_the_choice_reads_validation_and_the_lead_test():
    """The best on test must not be called the winner: its lead would be that of the luckiest."""
    lucky = [one + 0.05 for one in LOCAL]
    chosen = [one + 0.02 for one in LOCAL]
    found = verdict(
        place(
            local=scores(LOCAL, 0.7),
            fedavg_ft=scores(chosen, 0.9),
            ditto=scores(lucky, 0.8),
            pooled=scores(lucky, 1, True),
        )
    )
    assert (found.best, found.runner_up) == ("fedavg-ft", "ditto")
    assert found.accuracy == pytest.approx(100 * np.mean(chosen))
    assert found.over("ditto").points == pytest.approx(-3)
    assert found.over("local").points == pytest.approx(2)
    assert found.over("fedavg-ft") is None
    assert found.level_with == ("ditto",)  # ahead on test


def test_equal_validation_takes_the_first_of_the_cell():
    assert ranking(place(local=scores(LOCAL), fedavg=scores(LOCAL))) == ["local", "fedavg"]


def test_the_interval_is_students_over_paired_splits():
    gains = np.array([0.02, 0.01, 0.03, 0.00, 0.02])
    one = place(local=scores(LOCAL), fedavg_ft=scores(np.array(LOCAL) + gains))
    found = lead(one, "fedavg-ft", "local")
    low, high = stats.ttest_1samp(100 * gains, 0).confidence_interval(0.95)
    assert (found.points - found.half_width, found.points + found.half_width) == pytest.approx((low, high))
    assert not found.level
    unpaired = stats.ttest_ind(np.array(LOCAL) + gains, LOCAL)
    assert unpaired.pvalue > 0.05  # what the splits have in common is what pairing takes off


def test_level_holds_zero_and_a_single_split_says_nothing():
    assert Lead("local", -0.2, 0.3).level
    assert not Lead("local", 0.4, 0.3).level
    assert interval(np.array([1.5])) == (1.5, math.inf)
    assert interval(np.array([0.0, 0.0])) == (0.0, 0.0)
