"""Dirichlet and log-normal partitions: what they promise always, and their distributions, at fixed seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from data_files import check_partition, places, source_of
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpfl.data import federate, portable
from jaxpfl.data.partition.deals import apportion, count_classes
from jaxpfl.data.partition.skew import (
    _draw_in_turn,
    _split_classes,
    dirichlet_per_class,
    dirichlet_per_client,
    lognormal,
    lognormal_by_class,
    lognormal_sizes,
)

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int, int, np.random.Generator]:
    """Labels (some classes possibly empty), a number of clients that they suffice for, classes, a generator."""
    num_classes = draw(st.integers(1, 6))
    counts = draw(st.lists(st.integers(0, 30), min_size=num_classes, max_size=num_classes).filter(sum))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    labels = rng.permutation(np.repeat(np.arange(num_classes), counts))
    return labels, draw(st.integers(1, min(len(labels), 12))), num_classes, rng


@SETTINGS
@given(problems(), st.floats(1e-3, 1e3))
def test_everything_is_used(problem: tuple, value: float) -> None:
    labels, m, num_classes, rng = problem
    even = dirichlet_per_client(labels, m, value, num_classes, rng)
    by_class = dirichlet_per_class(labels, m, value, 0, num_classes, rng)
    unequal = lognormal(labels, m, min(value, 4.0), rng)
    for parts in (even, by_class, unequal):
        check_partition(parts, len(labels))
        assert len(parts) == m
    sizes = [len(part) for part in even]
    assert max(sizes) - min(sizes) <= 1
    assert min(len(part) for part in unequal) >= 1


@SETTINGS
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(sum), st.integers(0, 50), st.integers(0, 99))
def test_apportionment(weights: list[int], total: int, seed: int) -> None:
    shares = apportion(np.array(weights), total, np.random.default_rng(seed))
    assert shares.sum() == total
    exact = np.array(weights) * total / sum(weights)
    assert (np.abs(shares - exact) < 1).all()
    assert (shares[np.array(weights) == 0] == 0).all()


@pytest.mark.parametrize("alpha", [0.1, 2.0])
def test_class_counts_of_a_client_are_dirichlet_multinomial(alpha: float) -> None:
    """While no class runs out, a client's count of a class has mean n / C and variance
    n p (1 - p) (n + A) / (1 + A), with p = 1 / C and A = C alpha.

    4000 clients of n = 20 draws from C = 4 classes: mean and variance within 6 standard errors (the variance's by the
    sample's fourth moment), false alarm below 1e-7.
    """
    m, n, classes = 4000, 20, 4
    rng = np.random.default_rng(7)
    log_weights = portable.log_gamma(rng, alpha, m * classes).reshape(m, classes)
    turns = rng.permutation(np.repeat(np.arange(m), n))
    counts = _draw_in_turn(log_weights, turns, np.full(classes, m * n), rng)
    np.testing.assert_array_equal(counts.sum(axis=1), n)
    total, p = classes * alpha, 1 / classes
    variance = n * p * (1 - p) * (n + total) / (1 + total)
    assert np.abs(counts.mean(axis=0) - n * p).max() < 6 * math.sqrt(variance / m)
    squares = (counts - n * p) ** 2
    assert (np.abs(squares.mean(axis=0) - variance) < 6 * squares.std(axis=0) / math.sqrt(m)).all()


@pytest.mark.parametrize("alpha", [0.2, 1.0, 5.0])
def test_shares_of_a_class_are_dirichlet(alpha: float) -> None:
    """One class, no least size: a client's share of it is Beta(alpha, (m - 1) alpha), cut to whole examples.

    2000 seeds, m = 5 clients of 100 000 examples, each client's mean and variance within 6 standard errors: false alarm
    below 1e-7. Cutting moves a share by at most 1e-5.
    """
    m, n, seeds = 5, 100_000, 2000
    rng = np.random.default_rng(6)
    shares = np.array([_split_classes(np.array([n]), m, alpha, rng)[:, 0] for _ in range(seeds)]) / n
    variance = (1 / m) * (1 - 1 / m) / (m * alpha + 1)
    assert np.abs(shares.mean(axis=0) - 1 / m).max() < 6 * math.sqrt(variance / seeds) + 1e-5
    squares = (shares - 1 / m) ** 2
    assert (np.abs(squares.mean(axis=0) - variance) < 6 * squares.std(axis=0) / math.sqrt(seeds) + 1e-5).all()


def test_a_client_that_has_its_share_gets_no_more_classes() -> None:
    """Lin et al.: with many classes, sizes exceed N / m by at most one class's examples."""
    labels = np.repeat(np.arange(40), 50)
    parts = dirichlet_per_class(labels, 10, 0.1, 0, 40, np.random.default_rng(1))
    assert max(len(part) for part in parts) < 200 + 50
    least = dirichlet_per_class(labels, 10, 0.1, 100, 40, np.random.default_rng(1))
    assert min(len(part) for part in least) >= 100


def test_lognormal_sizes_have_their_spread() -> None:
    """The logarithm of 2000 sizes of 1000 on average: standard deviation sigma, within 6 of its standard errors
    sigma / sqrt(2 m), and normal quartiles. Rounding to whole examples is below 1 %."""
    m, sigma = 2000, 0.8
    logs = np.log(lognormal_sizes(1000 * m, m, sigma, np.random.default_rng(2)))
    assert abs(logs.std() - sigma) < 6 * sigma / math.sqrt(2 * m)
    quartiles = (np.quantile(logs, [0.25, 0.5, 0.75]) - logs.mean()) / sigma
    np.testing.assert_allclose(quartiles, [-0.6745, 0, 0.6745], atol=6 * 1.36 / math.sqrt(m))
    sizes = lognormal_sizes(103, 10, 0.0, np.random.default_rng(0))
    assert sorted(sizes.tolist()) == [10] * 7 + [11] * 3
    assert lognormal_sizes(12, 10, 5.0, np.random.default_rng(0)).min() == 1


@pytest.mark.parametrize(
    "options",
    [
        {"partition": "dirichlet", "alpha": 0.4},
        {"partition": "dirichlet-class", "alpha": 0.4},
        {"partition": "lognormal", "sigma": 0.6},
        {"partition": "shards"},
    ],
    ids=lambda options: options["partition"],
)
def test_an_official_test_set_follows_the_training_set(options: dict) -> None:
    labels = np.random.default_rng(0).permutation(np.arange(1200) % 6)
    source = source_of(labels, labels[:300])
    federation = federate(source, clients=10, **options)
    check_partition(places(federation, "train"), 1200)
    check_partition(places(federation, "test"), 300)
    own = [count_classes(labels, places(federation, split), 6) for split in ("train", "test")]
    assert np.abs(own[1] - own[0] * (np.bincount(labels[:300]) / np.bincount(labels))).max() < 1
    # The same training set without a test set.
    alone = federate(source_of(labels), clients=10, test_share=0.0, **options)
    for a, b in zip(places(federation, "train"), places(alone, "train"), strict=True):
        np.testing.assert_array_equal(a, b)


def test_classes_of_lognormal_sizes() -> None:
    """Everybody holds two classes and the least number of examples; without a spread sizes are equal."""
    labels = np.random.default_rng(0).permutation(np.arange(6000) % 10)
    source = source_of(labels, labels[:600])
    parts = places(federate(source, clients=10, classes_per_client=2, sigma=2.0, min_examples=7), "train")
    check_partition(parts, 6000)
    counts = count_classes(labels, parts, 10)
    assert ((counts > 0).sum(axis=1) == 2).all()
    assert counts[counts > 0].min() >= 3
    assert counts.sum(axis=1).min() >= 7
    assert counts.sum(axis=1).max() > 5 * counts.sum(axis=1).min()
    even = count_classes(labels, places(federate(source, clients=10, classes_per_client=2, sigma=0.0), "train"), 10)
    assert set(even[even > 0]) == {300}


def test_classes_of_lognormal_sizes_share_a_class_as_their_weights() -> None:
    """Two holders of a class: the logarithm of the ratio of their shares is normal with standard deviation
    sigma sqrt(2). Over 300 splits of one class of 100 000 its sample deviation is within 5 of its standard errors,
    1 / sqrt(600) of it."""
    sigma, labels, held = 0.7, np.zeros(100_000, np.int64), np.zeros((2, 1), np.int64)
    sizes = np.array(
        [
            [len(part) for part in lognormal_by_class(labels, held, sigma, 0, 1, np.random.default_rng(seed))]
            for seed in range(300)
        ]
    )
    ratios = np.log(sizes[:, 0] / sizes[:, 1])
    assert abs(ratios.std() / (sigma * math.sqrt(2)) - 1) < 5 / math.sqrt(600)
    assert abs(ratios.mean()) < 5 * sigma * math.sqrt(2 / 300)


def test_the_official_test_set_can_be_pooled() -> None:
    """60 / 20 / 20 of every client's examples, of both sets together."""
    labels = np.random.default_rng(0).permutation(np.arange(1000) % 5)
    source = source_of(labels[:800], labels[800:])
    federation = federate(
        source, clients=5, classes_per_client=2, test_share=0.2, validation_share=0.25, pool_test=True
    )
    sizes = [np.asarray(split.size) for split in (federation.train, federation.validation, federation.test)]
    np.testing.assert_array_equal(np.stack(sizes), np.full((3, 5), [[120], [40], [40]]))
