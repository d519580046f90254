"""Partitions by class, shard, user and random skew: guarantees for many shapes, and distributions."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from data_files import check_partition, places, source_of
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpfl.core.types import Federation
from jaxpfl.data import Source, federate, portable, seen, summary
from jaxpfl.data.federate import hold_out
from jaxpfl.data.partition.deals import (
    _deal_greedily,
    choose_users,
    count_classes,
    deal_classes,
    deal_superclasses,
    examples_of,
    shards,
    split_by_class,
)
from jaxpfl.data.partition.skew import (
    _draw_in_turn,
    _split_classes,
    dirichlet_per_class,
    dirichlet_per_client,
    lognormal,
    lognormal_by_class,
    lognormal_sizes,
)
from jaxpfl.support.errors import JaxpflError, JaxpflWarning

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


def check_hands(held: np.ndarray, num_classes: int, k: int) -> None:
    assert all(len(set(hand)) == k for hand in held.tolist())
    holders = np.bincount(held.ravel(), minlength=num_classes)
    assert holders.max() - holders.min() <= 1


@st.composite
def deals(draw: st.DrawFn) -> tuple[int, int, int, int]:
    num_classes = draw(st.integers(1, 12))
    k = draw(st.integers(1, num_classes))
    m = draw(st.integers(-(-num_classes // k), 40))
    return num_classes, k, m, draw(st.integers(0, 2**32))


@SETTINGS
@given(deals(), st.integers(0, 30))
def test_classes_per_client_keeps_its_promises(deal: tuple[int, int, int, int], extra: int) -> None:
    num_classes, k, m, seed = deal
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(num_classes), 40 + rng.integers(extra + 1, size=num_classes)))
    parts = split_by_class(labels, deal_classes(np.unique(labels), m, k, rng), rng)
    assert len(parts) == m
    check_partition(parts, len(labels))
    check_hands(np.array([np.unique(labels[part]) for part in parts]), num_classes, k)
    for label in range(num_classes):
        shares = np.array([np.sum(labels[part] == label) for part in parts])
        shares = shares[shares > 0]
        assert shares.max() - shares.min() <= 1


@SETTINGS
@given(deals())
def test_the_greedy_deal_always_succeeds(deal: tuple[int, int, int, int]) -> None:
    num_classes, k, m, seed = deal
    copies = np.full(num_classes, m * k // num_classes)
    copies[: m * k % num_classes] += 1
    check_hands(_deal_greedily(copies, m, k, np.random.default_rng(seed)), num_classes, k)


def test_pairs_of_classes_are_mixed() -> None:
    """Repair must not prefer pairs of classes. 400 deals of 5 classes to 10 clients, 2 each: each of the 10
    pairs is expected 400 times, with a standard deviation below 20 (pairs within a deal repel): 5 of them are
    a false alarm once in 1e5 runs."""
    counts = np.zeros((5, 5))
    for seed in range(400):
        held = np.sort(deal_classes(np.arange(5), 10, 2, np.random.default_rng(seed)), axis=1)
        np.add.at(counts, (held[:, 0], held[:, 1]), 1)
    pairs = counts[np.triu_indices(5, 1)]
    assert np.abs(pairs - 400).max() < 100


def toy_source(*, official_test: bool = False) -> Source:
    labels = np.random.default_rng(7).permutation(np.arange(600) % 6).astype(np.int32)
    return source_of(labels, (np.arange(120) % 6).astype(np.int32) if official_test else None)


def split_of(**options: object) -> Federation:
    arguments: dict = {"partition": "classes", "clients": 20, **options}
    if arguments["partition"] == "classes":
        arguments.setdefault("classes_per_client", 2)
    return federate(toy_source(official_test=bool(arguments.pop("official_test", False))), **arguments)


@pytest.mark.parametrize("partition", ["classes", "iid"])
def test_without_an_official_test_set_each_client_is_split(partition: str) -> None:
    federation = split_of(partition=partition, test_share=0.25, validation_share=0.2)
    parts = [places(federation, split) for split in ("train", "validation", "test")]
    assert sorted(np.concatenate([np.concatenate(part) for part in parts])) == list(range(600))
    for train, validation, test in zip(*parts, strict=True):
        n = len(train) + len(validation) + len(test)
        assert len(test) == int(n * 0.25 + 0.5)
        assert len(validation) == int((n - len(test)) * 0.2 + 0.5)
    if partition == "classes":
        for i in range(20):
            assert len(set(federation.test.y[i][federation.test.mask[i]])) == 2


def test_the_last_examples_of_an_ordered_source_are_held_out() -> None:
    source = toy_source()._replace(ordered=True)
    federation = federate(source, partition="iid", clients=5, test_share=0.25, validation_share=0.2)
    for train, validation, test in zip(*(places(federation, s) for s in ("train", "validation", "test")), strict=True):
        assert train.max() < validation.min() < validation.max() < test.min()


@SETTINGS
@given(st.lists(st.integers(0, 4), min_size=1, max_size=50), st.floats(0.0, 0.99), st.integers(0, 99))
def test_hold_out_is_stratified(labels: list[int], share: float, seed: int) -> None:
    y = np.array(labels)
    held = hold_out(y, share, np.random.default_rng(seed))
    if share > 0 and len(y) > 1:
        assert 1 <= held.sum() < len(y)
    for label in np.unique(y):
        assert abs(held[y == label].sum() - share * np.sum(y == label)) <= 1 + 1e-9


def checksum(federation: Federation) -> str:
    digest = hashlib.sha256()
    for split in ("train", "validation", "test"):
        for part in places(federation, split):
            digest.update(np.asarray(part, "<i8").tobytes() + b"|")
    return digest.hexdigest()[:16]


def test_a_seed_is_a_split_on_every_platform() -> None:
    """Pinned: a change here changes everybody's splits and must be said in the CHANGELOG."""
    assert checksum(split_of(test_share=0.25, validation_share=0.1)) == "43c6839fcc4ed961"
    assert checksum(split_of(test_share=0.25, official_test=True, split_seed=3)) == "f7b83a193776e9ad"
    assert checksum(split_of(test_share=0.25, partition="iid")) == "c094d1526ad3c713"


def test_inputs_are_stored_in_one_type_and_refused_where_they_do_not_fit() -> None:
    source = toy_source(official_test=True)
    assert source.x_test is not None
    whole = np.arange(source.x_train.size).reshape(source.x_train.shape)
    mixed = federate(source._replace(x_train=whole), partition="iid", clients=3)
    assert mixed.train.examples.x.dtype == mixed.test.examples.x.dtype == np.float32
    assert federate(source._replace(x_train=whole, x_test=whole[:5].astype(bool), y_test=source.y_train[:5]),
                    partition="iid", clients=3, drop_empty=True).train.examples.x.dtype == np.int32  # fmt: skip
    with pytest.raises(JaxpflError, match="data set 'toy', test: integer inputs must fit in 32 bits"):
        federate(source._replace(x_test=np.full(source.x_test.shape, 2**31)), partition="iid", clients=3)


def test_shards_as_in_the_paper() -> None:
    """McMahan et al.: equal classes and two shards that each lie in one class: at most two classes a client."""
    labels = np.random.default_rng(0).permutation(np.arange(6000) % 10)
    parts = shards(labels, 100, 2, np.random.default_rng(1))
    assert {len(part) for part in parts} == {60}
    held = [len(np.unique(labels[part])) for part in parts]
    assert set(held) == {1, 2}
    # Two shards of one class have probability 19 / 199: 9.5 of 100 expected, sd below 3.
    assert 0 < held.count(1) < 28
    assert federate(source_of(labels), partition="pathological", clients=100).num_clients == 100


@st.composite
def hierarchies(draw: st.DrawFn) -> tuple[np.ndarray, int, int, int]:
    groups = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, 4), min_size=groups, max_size=groups))
    k = draw(st.integers(1, groups))
    return np.repeat(np.arange(groups), sizes), draw(st.integers(-(-groups // k), 15)), k, draw(st.integers(0, 2**32))


@SETTINGS
@given(hierarchies())
def test_superclasses(problem: tuple[np.ndarray, int, int, int]) -> None:
    superclasses, m, k, seed = problem
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(len(superclasses)), 20))
    parts = split_by_class(labels, deal_superclasses(superclasses, m, k, rng), rng)
    check_partition(parts, len(labels))
    groups = [np.unique(superclasses[labels[part]]) for part in parts]
    assert {len(own) for own in groups} == {k}
    holders = np.bincount(np.concatenate(groups), minlength=superclasses.max() + 1)
    assert holders.max() - holders.min() <= 1
    for part, own in zip(parts, groups, strict=True):  # all classes of the superclasses held
        np.testing.assert_array_equal(np.unique(labels[part]), np.flatnonzero(np.isin(superclasses, own)))


def test_superclasses_of_a_source_with_a_test_set() -> None:
    superclasses = np.array([2, 0, 1, 1, 0, 2])
    labels = np.arange(600) % 6
    source = source_of(labels, labels[:120], superclasses=superclasses)
    federation = federate(source, partition="superclasses", superclasses_per_client=2, clients=6)
    check_partition(places(federation, "train"), 600)
    check_partition(places(federation, "test"), 120)
    for train, test in zip(places(federation, "train"), places(federation, "test"), strict=True):
        assert set(labels[train]) == set(labels[test])
        assert len(set(superclasses[labels[train]])) == 2


@SETTINGS
@given(st.integers(1, 30), st.integers(1, 5), st.booleans(), st.integers(0, 2**32))
def test_groups_of_users(count: int, g: int, choose: bool, seed: int) -> None:
    users = np.random.default_rng(seed).permutation(100)[:count]
    if g > count:
        with pytest.raises(JaxpflError, match="users per client must be at most"):
            choose_users(users, None, g, np.random.default_rng(seed))
        return
    m = 1 + seed % (count // g) if choose else None
    groups = choose_users(users, m, g, np.random.default_rng(seed))
    assert groups.shape == ((count // g) if m is None else m, g)
    assert len(np.unique(groups)) == groups.size
    assert set(groups.ravel()) <= set(users.tolist())
    made = np.random.default_rng(seed).choice(users, size=50)
    parts = examples_of(made, groups)
    for group, part in zip(groups, parts, strict=True):
        np.testing.assert_array_equal(part, np.flatnonzero(np.isin(made, group)))


def users_source():
    """Users of 1, 2, ..., 6 examples; in the test set of half as many, so that user 0 has none there."""
    users = np.repeat(np.arange(6), np.arange(1, 7))
    users_test = np.repeat(np.arange(6), np.arange(1, 7) // 2)
    return source_of(users % 3, users_test % 3, users=users, users_test=users_test)


def test_clients_are_users_and_are_tested_on_their_own_examples() -> None:
    source = users_source()
    with pytest.raises(JaxpflError, match=r"1 of 6 clients have too few examples to be tested \(namely 0\)"):
        federate(source, partition="natural")
    with pytest.warns(JaxpflWarning, match="1 of 6 clients have too few examples .*: they are left out"):
        federation = federate(source, partition="natural", drop_empty=True)
    assert source.users_train is not None
    assert source.users_test is not None
    np.testing.assert_array_equal(federation.client_ids, np.arange(1, 6))
    for client, train, test in zip(
        federation.client_ids, places(federation, "train"), places(federation, "test"), strict=True
    ):
        np.testing.assert_array_equal(train, np.flatnonzero(source.users_train == client))
        np.testing.assert_array_equal(test, np.flatnonzero(source.users_test == client))
    assert summary(federation, 3, source).unused == 1


def test_a_test_set_of_other_users_leaves_the_clients_to_be_split() -> None:
    source = users_source()
    assert source.users_test is not None
    source = source._replace(users_test=source.users_test + 6)
    said = pytest.warns(JaxpflWarning, match="test users have no training examples")
    with said, pytest.raises(JaxpflError, match=r"1 of 6 clients have too few examples to be tested \(namely 0\)"):
        federate(source, partition="natural", test_share=0.3)
    with said:
        federation = federate(source, partition="natural", users_per_client=2, test_share=0.3)
    parts = [places(federation, split) for split in ("train", "test")]
    check_partition([np.concatenate(pair) for pair in zip(*parts, strict=True)], 21)
    assert min(len(test) for test in parts[1]) >= 1
    # Without a test share nobody is refused.
    assert federate(seen(source), partition="natural", test_share=0.0).num_clients == 6


PARTITION_SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int, int, np.random.Generator]:
    """Labels (some classes possibly empty), a number of clients that they suffice for, classes, a generator."""
    num_classes = draw(st.integers(1, 6))
    counts = draw(st.lists(st.integers(0, 30), min_size=num_classes, max_size=num_classes).filter(sum))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    labels = rng.permutation(np.repeat(np.arange(num_classes), counts))
    return labels, draw(st.integers(1, min(len(labels), 12))), num_classes, rng


@PARTITION_SETTINGS
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


@pytest.mark.parametrize("alpha", [0.2, 5.0])
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
        {"partition": "classes", "classes_per_client": 2},
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
    sigma sqrt(2). Over 300 splits of one class of 10 000 its sample deviation is within 5 of its standard errors,
    1 / sqrt(600) of it."""
    sigma, labels, held = 0.7, np.zeros(10_000, np.int64), np.zeros((2, 1), np.int64)
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
