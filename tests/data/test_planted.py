"""Clients drawn in clusters, and the portable draws of splits, right to the last places."""

from __future__ import annotations

import math

import numpy as np
import pytest
from data_files import check_partition, places, source_of

from jaxpfl.data import PlantedSettings, draw_planted, federate, load, portable, true_clusters
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


KS = 2.72


def distance(sample: np.ndarray, cdf: np.ndarray) -> float:
    """The Kolmogorov-Smirnov distance of a sorted sample, whose distribution function is ``cdf`` at its points,
    times sqrt(n)."""
    n = len(sample)
    steps = np.arange(n + 1) / n
    return float(max(np.abs(cdf - steps[:-1]).max(), np.abs(cdf - steps[1:]).max()) * math.sqrt(n))


def test_log_and_exp_are_those_of_the_c_library_to_a_few_units_of_the_last_place() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(size=2000), 10.0 ** np.linspace(-300, 300, 601), [1.0, 0.5, np.sqrt(0.5)]])
    np.testing.assert_allclose(portable.log(x), [math.log(value) for value in x], rtol=5e-16, atol=0)
    x = np.concatenate([rng.uniform(-6, 6, size=2000), np.linspace(-700, 700, 1401)])
    np.testing.assert_allclose(portable.exp(x), [math.exp(value) for value in x], rtol=5e-16, atol=0)
    assert portable.log(np.array([1.0]))[0] == 0.0
    assert portable.exp(np.array([0.0]))[0] == 1.0
    assert 0.0 < portable.exp(np.array([-1e9]))[0] < 1e-300


def test_uniform_draws_are_the_middles_of_cells() -> None:
    rng = np.random.default_rng(1)
    u = portable.uniform(rng, 20_000)
    raw = np.random.default_rng(1).bit_generator.random_raw(3)
    assert u[:3].tolist() == [((int(word) >> 12) + 0.5) / 2**52 for word in raw]
    assert 0.0 < u.min() < u.max() < 1.0
    assert distance(np.sort(u), np.sort(u)) < KS
    assert portable.uniform(rng, 0).shape == (0,)


def test_normal_draws() -> None:
    z = np.sort(portable.normal(np.random.default_rng(2), 20_000))
    cdf = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])
    assert distance(z, cdf) < KS
    assert portable.normal(np.random.default_rng(2), 1).shape == (1,)
    # The two draws of a pair are not related: a correlation of 10 000 pairs exceeds 0.05 with probability 6e-7.
    pairs = portable.normal(np.random.default_rng(3), 20_000)
    half = len(pairs) // 2
    assert abs(np.corrcoef(pairs[:half], pairs[half:])[0, 1]) < 0.05


@pytest.mark.parametrize("shape", [0.03, 0.3, 1.0, 4.5, 200.0])
def test_gamma_draws(shape: float) -> None:
    special = pytest.importorskip("scipy.special")  # comes with scikit-learn
    draws = np.sort(portable.log_gamma(np.random.default_rng(4), shape, 20_000))
    # Below exp(-700) a gamma draw is no float64; its distribution function there is x**a / (a Gamma(a)).
    small = np.exp(shape * draws - special.gammaln(shape + 1))
    cdf = np.where(draws < -600, small, special.gammainc(shape, np.exp(np.maximum(draws, -600))))
    assert distance(draws, cdf) < KS


def test_proportions() -> None:
    log_weights = np.array([[0.0, math.log(3.0)], [-5000.0, -5001.0], [-1e6, 0.0]])
    shares = portable.proportions(log_weights)
    np.testing.assert_allclose(shares[0], [0.25, 0.75], rtol=1e-15)
    np.testing.assert_allclose(shares[1], [1 / (1 + math.exp(-1)), 1 / (1 + math.e)], rtol=1e-12)
    np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-15)
