"""The numbers of a report, by hand."""

import numpy as np
import pytest

from jaxpfl.experiment.summary import best_on_validation, fraction_hurt, other_metrics, over_clients
from jaxpfl.headline import Headline


def test_statistics_over_clients():
    accuracy = np.array([np.arange(20) / 20, np.arange(20) / 20 + 0.02])
    got = over_clients(accuracy)
    assert got["mean"] == pytest.approx(0.475 + 0.01)
    assert got["std"] == pytest.approx(0.02 / np.sqrt(2))
    assert got["std_clients"] == pytest.approx(np.std(np.arange(20) / 20))
    assert got["p10"] == pytest.approx(np.quantile(np.arange(20) / 20, 0.1) + 0.01)
    assert got["worst_decile"] == pytest.approx((0 + 0.05) / 2 + 0.01)


def test_worst_decile_of_few_clients_is_the_worst():
    assert over_clients(np.array([[0.3, 0.9, 0.6]]))["worst_decile"] == pytest.approx(0.3)


def test_one_seed_has_no_spread_and_clients_without_examples_do_not_count():
    got = over_clients(np.array([[0.5, np.nan, 1.0]]))
    assert (got["mean"], got["std"]) == (0.75, None)
    assert over_clients(np.array([[np.nan]]))["mean"] is None


def test_fraction_hurt_counts_strictly_worse_clients():
    assert fraction_hurt(np.array([[0.5, 0.5], [0.4, 0.9]]), np.full((2, 2), 0.5)) == 0.25


def test_best_on_validation_takes_the_first_best_of_each_seed():
    got = best_on_validation(
        [10, 20, 30],
        np.array([[0.5, 0.1], [0.9, 0.3], [0.9, 0.2]]),
        np.array([[0.1, 0.4], [0.2, 0.5], [0.3, 0.6]]),
    )
    assert got["rounds"] == [20, 20]
    assert got["personalized_accuracy"]["mean"] == pytest.approx(0.35)


def test_other_metrics_leave_out_and_count_the_clients_that_do_not_define_them():
    scores = {
        "after_accuracy": np.array([[0.5, 1.0, np.nan], [0.5, 0.5, np.nan]]),  # the third has no test examples
        "global_accuracy": np.array([[0.5, 1.0, np.nan], [0.5, 0.5, np.nan]]),
        "after_auc": np.array([[0.7, np.nan, np.nan], [0.9, np.nan, np.nan]]),
        "after_loss": np.ones((2, 3)),
        "before_auc": np.zeros((2, 3)),
    }
    found = other_metrics(scores, Headline())
    assert found == {
        "auc": {
            "personalized": {"mean": pytest.approx(0.8), "std": pytest.approx(np.sqrt(0.02))},
            "global": None,
            "undefined": 1,
        }
    }
    assert other_metrics({"after_accuracy": np.ones((1, 2)), "after_diverged": np.zeros((1, 2))}, Headline()) == {}
