"""Partitions by shard, superclass and user: promises for many shapes, and what cannot be done."""

from __future__ import annotations

import numpy as np
import pytest
from data_files import check_partition, places, source_of
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpfl.data import federate, seen, summary
from jaxpfl.data.partition.deals import choose_users, deal_superclasses, examples_of, shards, split_by_class
from jaxpfl.data.partition.registry import PARTITIONS, PartitionOptions, options_of, partitioner
from jaxpfl.support.errors import JaxpflError, JaxpflWarning

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


@SETTINGS
@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 90), st.integers(1, 6), st.integers(0, 2**32))
def test_shards(m: int, s: int, more: int, num_classes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(num_classes, size=m * s + more)
    parts = shards(labels, m, s, rng)
    check_partition(parts, len(labels))
    sizes = np.array([len(part) for part in parts])
    assert len(parts) == m
    assert sizes.max() - sizes.min() <= s
    # A shard lies in the sorted labels, so s shards touch at most s classes and the boundaries inside them.
    edges = np.concatenate([[0], np.cumsum(np.bincount(labels, minlength=num_classes))])
    longest = -(-len(labels) // (m * s))
    across = 1 + max(np.sum((edges > start) & (edges < start + longest)) for start in range(len(labels)))
    assert max(len(np.unique(labels[part])) for part in parts) <= s * across


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
    for options, message in [
        ({}, "needs the number of superclasses per client"),
        ({"superclasses_per_client": 4}, "superclasses per client must be 1 to 3, got 4"),
        ({"superclasses_per_client": 1, "clients": 2}, "2 clients with 1 superclasses each cannot hold all 3"),
    ]:
        with pytest.raises(JaxpflError, match=message):
            federate(source, partition="superclasses", **{"clients": 6, **options})
    with pytest.raises(JaxpflError, match="data set 'toy' has no superclasses"):
        federate(source_of(labels), partition="superclasses", superclasses_per_client=1, clients=6)
    bad = source._replace(superclasses=superclasses[:3])
    with pytest.raises(JaxpflError, match=r"superclasses must be \[6\]"):
        federate(bad, partition="superclasses", superclasses_per_client=1, clients=6)


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


def users_source(**kwargs: object):
    """Users of 1, 2, ..., 6 examples; in the test set of half as many, so that user 0 has none there."""
    users = np.repeat(np.arange(6), np.arange(1, 7))
    users_test = np.repeat(np.arange(6), np.arange(1, 7) // 2)
    return source_of(users % 3, users_test % 3, users=users, users_test=users_test, **kwargs)


def test_clients_are_users_and_are_tested_on_their_own_examples() -> None:
    source = users_source()
    with pytest.raises(JaxpflError, match=r"1 of 6 clients have too few examples to be tested \(client 0\)"):
        federate(source, partition="natural")
    with pytest.warns(JaxpflWarning, match="left out: 1 of 6 clients have too few examples"):
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
    with said, pytest.raises(JaxpflError, match=r"1 of 6 clients have too few examples to be tested \(client 0\)"):
        federate(source, partition="natural", test_share=0.3)
    with said:
        federation = federate(source, partition="natural", users_per_client=2, test_share=0.3)
    parts = [places(federation, split) for split in ("train", "test")]
    check_partition([np.concatenate(pair) for pair in zip(*parts, strict=True)], 21)
    assert min(len(test) for test in parts[1]) >= 1
    # Without a test share nobody is refused.
    assert federate(seen(source), partition="natural", test_share=0.0).num_clients == 6


def test_some_users_of_many() -> None:
    source = source_of(np.arange(600) % 3, users=np.arange(600) // 6)
    federation = federate(source, partition="natural", clients=12, users_per_client=3)
    held = [places(federation, split) for split in ("train", "test")]
    owners = [np.unique(np.concatenate(own) // 6) for own in zip(*held, strict=True)]
    assert [len(own) for own in owners] == [3] * 12
    assert len(np.unique(np.concatenate(owners))) == 36
    assert summary(federation, 3, source).unused == 64 * 6
    other = federate(source, partition="natural", clients=12, users_per_client=3, split_seed=1)
    assert not np.array_equal(other.train.x, federation.train.x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 7}, "7 clients of 1 users need 7 users, but there are 6: use at most 6"),
        ({"clients": 3, "users_per_client": 3}, "3 clients of 3 users need 9 users, but there are 6: use at most 2"),
        ({"users_per_client": 7}, "users per client must be at most the 6 users there are, got 7"),
        ({"users_per_client": 0}, "users per client must be at least 1, got 0"),
        ({"alpha": 0.5}, "the partition 'natural' takes users per client, not alpha"),
    ],
)
def test_impossible_users(options: dict, message: str) -> None:
    with pytest.raises(JaxpflError, match=message):
        federate(users_source(), partition="natural", **options)


def test_sources_without_users_or_with_bad_ones() -> None:
    source = users_source()
    with pytest.raises(JaxpflError, match="data set 'toy' has no users"):
        federate(source._replace(users_train=None, users_test=None), partition="natural")
    for broken in (source._replace(users_train=np.arange(3)), source._replace(users_test=np.zeros(9))):
        with pytest.raises(JaxpflError, match="users must be integers, one for each example"):
            federate(broken, partition="iid", clients=2)


def test_impossible_shards() -> None:
    source = source_of(np.arange(20) % 2)
    with pytest.raises(JaxpflError, match="7 clients with 3 shards each need 21 examples, but there are 20"):
        federate(source, partition="shards", clients=7, shards_per_client=3)
    with pytest.raises(JaxpflError, match="shards per client must be at least 1, got 0"):
        federate(source, partition="shards", clients=7, shards_per_client=0)
    with pytest.raises(JaxpflError, match="classes per client must be 1 to 2"):
        federate(source, partition="classes", clients=7, classes_per_client=3)


def test_every_partition_says_what_it_takes() -> None:
    fields = set(vars(PartitionOptions()))
    for name in PARTITIONS:
        assert set(options_of(name)) <= fields
        for other in fields - set(options_of(name)):
            with pytest.raises(JaxpflError, match=f"the partition {name!r} takes .*, not {other.replace('_', ' ')}"):
                partitioner(name, PartitionOptions(**{other: 1}))
    assert fields == {option for name in PARTITIONS for option in options_of(name)}
    with pytest.raises(JaxpflError, match="unknown partition 'natrual': did you mean 'natural'"):
        options_of("natrual")
