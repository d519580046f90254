"""Statistics, choices and words where less is better."""

import numpy as np
import pytest

from jaxpfl.engine.scores import (
    ACCURACY,
    HEADLINES,
    best_on_validation,
    find_headline,
    fraction_hurt,
    over_clients,
    stored_headline,
)

RMSE = HEADLINES["rmse"]


def test_the_worst_clients_are_those_with_the_largest_error():
    scores = np.arange(1.0, 21.0)[None]
    assert over_clients(scores)["worst_decile"] == 1.5
    found = over_clients(scores, lower=True)
    assert found["worst_decile"] == 19.5
    assert found["p10"] == pytest.approx(np.quantile(scores, 0.9))
    assert over_clients(np.array([[1.0, np.inf, np.nan]]), lower=True)["mean"] == np.inf


def test_a_larger_error_than_with_local_training_hurts():
    own, local = np.array([[1.0, 3.0, 2.0, np.nan]]), np.array([[2.0, 2.0, 2.0, 1.0]])
    assert fraction_hurt(own, local, lower=True) == pytest.approx(1 / 3)
    assert fraction_hurt(own, local) == pytest.approx(1 / 3)
    assert fraction_hurt(np.array([[1.0, 1.0]]), np.array([[2.0, 2.0]]), lower=True) == 0


def test_the_best_round_has_the_least_validation_error():
    validation, test = np.array([[3.0], [1.0], [2.0]]), np.array([[0.3], [0.1], [0.2]])
    found = best_on_validation([10, 20, 30], validation, test, RMSE)
    assert found == {"rounds": [20], "personalized_rmse": {"mean": 0.1, "std": None}}


def test_names_of_scores_tell_the_headline():
    assert find_headline(["train_loss", "personalized_rmse"]) == RMSE
    assert find_headline(["validation_auc", "personalized_accuracy", "personalized_auc"]).name == "auc"
    assert find_headline(["train_loss"]) == stored_headline({}) == ACCURACY
    assert stored_headline({"metric": "macro_f1"}).number(0.123456) == "12.35"
