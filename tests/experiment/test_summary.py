"""The numbers of a report, by hand, and choices and words where less is better."""

import numpy as np
import pytest

from jaxpfl.engine.evaluate import (
    ACCURACY,
    HEADLINES,
    Headline,
    best_on_validation,
    find_headline,
    fraction_hurt,
    mean_over_examples,
    other_metrics,
    over_clients,
    stored_headline,
    undefined,
)


def test_statistics_over_clients():
    accuracy = np.array([np.arange(20) / 20, np.arange(20) / 20 + 0.02])
    got = over_clients(accuracy)
    assert got["mean"] == pytest.approx(0.475 + 0.01)
    assert got["std"] == pytest.approx(0.02 / np.sqrt(2))
    assert got["std_clients"] == pytest.approx(np.std(np.arange(20) / 20))
    assert got["p10"] == pytest.approx(np.quantile(np.arange(20) / 20, 0.1) + 0.01)
    assert got["worst_decile"] == pytest.approx((0 + 0.05) / 2 + 0.01)
    assert got["median"] == pytest.approx(0.475 + 0.01)


def test_worst_decile_of_few_clients_is_the_worst():
    assert over_clients(np.array([[0.3, 0.9, 0.6]]))["worst_decile"] == pytest.approx(0.3)


def test_one_seed_has_no_spread_and_clients_without_examples_do_not_count():
    got = over_clients(np.array([[0.5, np.nan, 1.0]]))
    assert (got["mean"], got["std"]) == (0.75, None)
    assert over_clients(np.array([[np.nan]]))["mean"] is None


def test_best_on_validation_takes_the_first_best_of_each_seed():
    got = best_on_validation(
        [10, 20, 30], np.array([[0.5, 0.1], [0.9, 0.3], [0.9, 0.2]]), np.array([[0.1, 0.4], [0.2, 0.5], [0.3, 0.6]])
    )
    assert got is not None
    assert got["rounds"] == [20, 20]
    assert got["personalized_accuracy"]["mean"] == pytest.approx(0.35)


def test_no_round_is_best_where_a_seed_has_no_validation_score():
    validation = np.array([[0.5, np.nan], [0.9, np.nan]])
    assert best_on_validation([1, 2], validation, np.ones((2, 2))) is None
    assert best_on_validation([1, 2], validation[:, :1], np.ones((2, 1))) is not None


def test_other_metrics_leave_out_and_count_the_clients_that_do_not_define_them():
    scores = {
        "after_accuracy": np.array([[0.5, 1.0, np.nan], [0.5, 0.5, np.nan]]),  # the third has no test examples
        "global_accuracy": np.array([[0.5, 1.0, np.nan], [0.5, 0.5, np.nan]]),
        "after_auc": np.array([[0.7, np.nan, np.nan], [0.9, np.nan, np.nan]]),
        "after_loss": np.array([[1.0, 1.0, np.nan], [1.0, 1.0, np.nan]]),
        "before_auc": np.zeros((2, 3)),
    }
    found = other_metrics(scores, Headline(), np.array([4, 1, 0]))
    own = found["auc"].pop("personalized")
    assert found == {"auc": {"global": None, "undefined": 1}}
    assert own["mean"] == own["median"] == own["mean_examples"] == pytest.approx(0.8)
    assert own["std"] == own["std_examples"] == pytest.approx(np.sqrt(0.02))
    alone = {"after_accuracy": np.ones((1, 2)), "after_diverged": np.zeros((1, 2))}
    assert other_metrics(alone, Headline(), np.ones(2)) == {}
    # Of a headline too, whose own scores cannot tell who has test examples.
    sizes = np.array([4, 1, 0])
    assert undefined({**scores, "after_diverged": np.zeros((2, 3))}, "auc", sizes) == 1
    assert undefined(scores, "loss", sizes) == 0
    # A client without any score is counted where it has test examples, such as tokens without labels.
    assert [undefined(scores, name, np.array([4, 1, 7])) for name in ("loss", "auc")] == [1, 2]
    assert undefined({**scores, "attackers_after_loss": np.array([[np.nan, np.nan, 1.0]])}, "loss", sizes + 7) == 0


def test_means_over_examples_are_the_scores_of_all_examples_together():
    rng, sizes = np.random.default_rng(0), np.array([3, 40, 7])
    errors = [rng.normal(scale=scale, size=(2, n)) for n, scale in zip(sizes, (9, 1, 2), strict=True)]
    together = np.concatenate(errors, axis=1)
    rmse = np.stack([np.sqrt((one**2).mean(axis=1)) for one in errors], axis=1)
    got = over_clients(rmse, lower=True, sizes=sizes, root=True)
    want = np.sqrt((together**2).mean(axis=1))
    assert got["mean_examples"] == pytest.approx(want.mean())
    assert got["std_examples"] == pytest.approx(want.std(ddof=1))
    assert abs(got["mean_examples"] - mean_over_examples(rmse, sizes).mean()) > 0.1  # no mean of RMSEs
    mae = np.stack([abs(one).mean(axis=1) for one in errors], axis=1)
    assert over_clients(mae, lower=True, sizes=sizes)["mean_examples"] == pytest.approx(abs(together).mean())


def test_who_has_no_score_has_no_weight_and_one_that_overflows_is_not_hidden():
    scores, sizes = np.array([[0.2, np.nan, 0.6], [np.nan, np.nan, np.nan]]), np.array([1, 50, 3])
    np.testing.assert_allclose(mean_over_examples(scores, sizes), [0.5, np.nan])
    assert over_clients(scores, sizes=sizes)["mean_examples"] == pytest.approx(0.5)
    assert mean_over_examples(np.array([np.inf, 1.0]), np.array([1, 1]), root=True) == np.inf
    assert mean_over_examples(np.array([np.nan, 1.0]), np.array([0, 1])) == 1
    broken = over_clients(np.array([[-np.inf, 0.5, 0.7]]), sizes=np.array([1, 1, 1]))
    assert (broken["mean"], broken["mean_examples"], broken["median"]) == (-np.inf, -np.inf, 0.5)


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
    assert fraction_hurt(np.array([[0.5, 0.5], [0.4, 0.9]]), np.full((2, 2), 0.5)) == 0.25  # equal ones are not hurt


def test_the_best_round_has_the_least_validation_error():
    validation, test = np.array([[3.0], [1.0], [2.0]]), np.array([[0.3], [0.1], [0.2]])
    found = best_on_validation([10, 20, 30], validation, test, RMSE)
    assert found == {"rounds": [20], "personalized_rmse": {"mean": 0.1, "std": None}}


def test_names_of_scores_tell_the_headline():
    assert find_headline(["train_loss", "personalized_rmse"]) == RMSE
    assert find_headline(["validation_auc", "personalized_accuracy", "personalized_auc"]).name == "auc"
    assert find_headline(["train_loss"]) == stored_headline({}) == ACCURACY
    assert stored_headline({"metric": "macro_f1"}).number(0.123456) == "12.35"
