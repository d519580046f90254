"""The study of planted clusters: its measures against what they are defined as, and a small run."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from jaxpfl.benchmarks.studies import network
from jaxpfl.benchmarks.studies.network import METHODS, NetworkSettings
from jaxpfl.data import PlantedSettings, draw_planted

SMALL = NetworkSettings(
    clients=12,
    clusters=2,
    samples=40,
    dim=3,
    strengths=(0.001, 0.01, 0.05, 2.0),
    methods=("network-lasso", "local", "ifca"),
    neighbours=7,  # of twelve clients in two clusters: the graph is connected
    rounds=40,
    local_steps=3,
    repetitions=1,
)


@pytest.fixture(scope="module")
def result() -> dict:
    return network.simulated(SMALL).json


def mean(row: dict, part: str) -> np.ndarray:
    return np.array([point["mean"] for point in row["path"][part]])


@pytest.mark.slow
def test_every_method_has_a_path_and_is_chosen_by_validation(result: dict):
    assert tuple(result["methods"]) == SMALL.methods
    for name, row in result["methods"].items():
        assert row["values"] == ([0, 1, 2, 3] if name == "ifca" else list(SMALL.strengths))
        place = int(mean(row, "validation").argmin())
        assert row["chosen_values"] == [row["values"][place]]
        for part in network.MEASURES:
            assert row["chosen"][part]["mean"] == row["path"][part][place]["mean"]
            assert len(row["path"][part]) == 4


@pytest.mark.slow
def test_the_network_lasso_goes_from_everyone_alone_to_one_model(result: dict):
    """Between the ends lies a lambda at which the planted clusters are found exactly, and a smaller one with less error
    than anybody has alone."""
    row = result["methods"]["network-lasso"]
    assert mean(row, "clusters").tolist() == [12, 12, 2, 1]
    assert mean(row, "ari").tolist() == [0, 0, 1, 0]
    assert mean(row, "error").min() < 0.8 * mean(result["methods"]["local"], "error").min()


def test_measures_are_what_they_say():
    """One run has the true models, the other the true models plus 2 in one coordinate."""
    truth = draw_planted(PlantedSettings(clients=6, clusters=3, examples=1, test_examples=1, dim=4))
    theta = truth.theta[truth.member]
    models = np.stack([theta, theta + np.array([2.0, 0, 0, 0])])
    # Only the difference of the two columns is the model.
    kernel = np.stack([0 * models + 7, models + 7], axis=-1)
    found = SimpleNamespace(
        simulation=SimpleNamespace(personal_models=lambda state: {"head": {"kernel": kernel}}),
        validation={"after": {"loss": np.array([[[9.0] * 6] * 2, [[1.0] * 6, [2.0] * 6]])}},
        state=None,
        clusters=np.stack([truth.member, np.zeros(6, int)]),
        personalized_accuracy=np.array([[0.5] * 6, [0.25, 0.75] * 3]),
    )
    rows = network.measures(found, truth)  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose(rows["error"], [0, 4], atol=1e-12)
    assert rows["ari"].tolist() == [1, 0]
    assert rows["clusters"].tolist() == [3, 1]
    assert rows["accuracy"].tolist() == [0.5, 0.5]
    assert rows["validation"].tolist() == [1, 2]


def test_distinct_models_are_clusters_and_others_are_clustered():
    centers = np.array([[0.0, 0], [10, 0], [0, 10]])
    member = np.array([2, 0, 1, 1, 0, 2, 2])
    exact = network.distinct(centers[member], 3)
    near = network.distinct(centers[member] + np.random.default_rng(0).normal(size=(7, 2)), 3)
    for labels in (exact, near):
        assert ((labels[:, None] == labels) == (member[:, None] == member)).all()
    assert len(np.unique(network.distinct(np.zeros((7, 2)), 3))) == 1


@pytest.mark.slow
def test_the_path_of_the_readme():
    """One draw of the defaults, with margins of what was seen (errors .49; .99, 3.0, 8.2, 3.0, 3.0)."""
    rows = network.simulated(replace(NetworkSettings(), repetitions=1)).json["methods"]
    assert tuple(rows) == METHODS
    best = {name: mean(row, "error").min() for name, row in rows.items()}
    assert best["network-lasso"] < 0.75 * best["ifca"]
    for name in ("local", "fedavg", "ditto", "pfedme"):
        assert best["network-lasso"] < 0.3 * best[name]
    assert mean(rows["network-lasso"], "ari").max() == 1
    assert mean(rows["fedavg"], "clusters").tolist() == [1] * 10
