"""Planted clusters of clients: the partition that permutes labels, and the clients that are drawn."""

from __future__ import annotations

import numpy as np
import pytest
from data_files import check_partition, places, source_of

from jaxpfl.data import (
    PlantedSettings,
    draw_planted,
    federate,
    load,
    set_apart,
    true_clusters,
)
from jaxpfl.data.sources import planted
from jaxpfl.runs.config import RunConfig, resolve

LABELS = np.arange(600, dtype=np.int32) % 5


def test_clients_of_a_cluster_agree_on_the_labels_and_others_do_not() -> None:
    source = source_of(LABELS, LABELS[:200])
    federation = federate(source, partition="clusters", clusters=4, clients=10, validation_share=0.25, split_seed=7)
    truth = true_clusters(10, 4, 5, split_seed=7)
    assert np.bincount(truth.member).tolist() == [3, 3, 2, 2]
    assert len({tuple(names) for names in truth.labels.tolist()}) == 4
    np.testing.assert_array_equal(np.sort(truth.labels, axis=1), np.broadcast_to(np.arange(5), (4, 5)))
    for split in ("train", "validation", "test"):
        data = getattr(federation, split)
        for x, y, mask, cluster in zip(data.x, data.y, data.mask, truth.member, strict=True):
            assert mask.sum() > 5
            np.testing.assert_array_equal(y[mask], truth.labels[cluster][LABELS[x[mask, 0].astype(int)]])
    check_partition(places(federation, "train") + places(federation, "validation"), 600)
    check_partition(places(federation, "test"), 200)


def test_who_is_set_apart_keeps_its_cluster() -> None:
    federation = federate(source_of(LABELS), partition="clusters", clusters=3, clients=9)
    truth = true_clusters(9, 3, 5)
    for part in set_apart(federation, 4):
        for client, x, y, mask in zip(part.client_ids, part.train.x, part.train.y, part.train.mask, strict=True):
            names = truth.labels[truth.member[client]]
            np.testing.assert_array_equal(y[mask], names[LABELS[x[mask, 0].astype(int)]])


def test_planted_clients_follow_their_clusters_model() -> None:
    """E [y - sigmoid(x . theta)] x = 0 of every cluster, entry by entry, and its variance is E p (1 - p) x^2.

    Of 3 clusters in 4 dimensions each standardised mean is within 4.5: 1e-4 of 12 together by chance. Under another
    cluster's coefficients the largest is far beyond."""
    given = PlantedSettings(clients=9, clusters=3, examples=2000, test_examples=500, dim=4, seed=5)
    source, member, theta = draw_planted(given)
    np.testing.assert_allclose(np.linalg.norm(theta, axis=1), 3, rtol=1e-12)
    assert np.bincount(member).tolist() == [3, 3, 3]
    assert source.users_train is not None
    assert source.x_test is not None
    assert (np.bincount(source.users_train) == 2000).all()
    assert len(source.x_test) == 9 * 500

    def largest(model: np.ndarray, cluster: int) -> float:
        own = member[source.users_train] == cluster
        x = source.x_train[own].astype(float)
        p = 1 / (1 + np.exp(-x @ model))
        score = (source.y_train[own] - p) @ x
        return float(np.abs(score / np.sqrt((p * (1 - p)) @ x**2)).max())

    for cluster in range(3):
        assert largest(theta[cluster], cluster) < 4.5
        assert largest(theta[cluster - 1], cluster) > 20


def test_the_inputs_are_normal_and_a_name_is_a_population() -> None:
    source = load("planted:clients=10,clusters=2,examples=500,dim=3,seed=2")
    again = draw_planted(PlantedSettings(10, 2, 500, dim=3, seed=2)).source
    np.testing.assert_array_equal(source.x_train, again.x_train)
    np.testing.assert_array_equal(source.y_train, again.y_train)
    other = draw_planted(PlantedSettings(10, 2, 500, dim=3, seed=3)).source
    assert (source.x_train != other.x_train).mean() > 0.99
    # 5000 examples: moments within 5 standard errors.
    np.testing.assert_allclose(source.x_train.mean(axis=0), 0, atol=5 / 5000**0.5)
    np.testing.assert_allclose(np.cov(source.x_train.T), np.eye(3), atol=5 * (2 / 5000) ** 0.5)
    assert load("planted").num_classes == 2
    assert federate(source, partition="natural").num_clients == 10


@pytest.mark.parametrize(
    ("given", "clients", "named"),
    [
        ("planted", 50, "planted"),
        ("planted", 60, "planted:clients=60"),
        ("planted:dim=4", 60, "planted:dim=4,clients=60"),
        ("planted:clients=20", 60, "planted:clients=20"),
        ("digits", 60, "digits"),
    ],
)
def test_there_are_as_many_clients_as_a_run_asks_for(given: str, clients: int, named: str):
    assert planted.enlarged(given, clients) == named
    assert resolve(RunConfig(given, clients=clients - 5, unseen_clients=5)).data == named
