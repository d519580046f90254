"""Guarantees of partitions, for many shapes; and a seed determines the split."""

from __future__ import annotations

import hashlib

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpfl.core.types import Federation
from jaxpfl.data import Source, federate, stack_clients
from jaxpfl.data.federate import hold_out
from jaxpfl.data.partition.deals import _deal_greedily, deal_classes, iid, present_classes, split_by_class
from jaxpfl.data.partition.registry import PartitionOptions, partitioner
from jaxpfl.support.errors import JaxpflError

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


def classes_per_client(labels: np.ndarray, m: int, k: int, num_classes: int, rng: np.random.Generator) -> list:
    """The examples of every client with k classes, as the partition of that name deals them."""
    held = deal_classes(present_classes(labels, num_classes), m, k, rng)
    return split_by_class(labels, held, rng)


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
    parts = classes_per_client(labels, m, k, num_classes, rng)
    assert len(parts) == m
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))  # disjoint, all used
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


@SETTINGS
@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 2**32))
def test_iid_deals_evenly(n: int, m: int, seed: int) -> None:
    parts = iid(np.zeros(n, np.int32), m, np.random.default_rng(seed))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(n))


@pytest.mark.parametrize(
    ("m", "k", "message"),
    [
        (5, 5, r"classes per client must be 1 to 4 .*got 5"),
        (5, 0, "classes per client must be 1 to 4"),
        (3, 1, "3 clients with 1 classes each cannot hold all 4 classes"),
        (0, 2, "clients must be at least 1, got 0"),
        (30, 2, r"class 0 has 10 examples for 15 clients"),
    ],
)
def test_impossible_settings(m: int, k: int, message: str) -> None:
    with pytest.raises(JaxpflError, match=message):
        classes_per_client(np.repeat(np.arange(4), 10), m, k, 4, np.random.default_rng(0))


def test_labels_out_of_range_and_classes_without_examples() -> None:
    with pytest.raises(JaxpflError, match=r"lie in 0 .. 2"):
        classes_per_client(np.array([0, 3]), 1, 1, 3, np.random.default_rng(0))
    labels = np.repeat([1, 2, 4], 20)
    parts = classes_per_client(labels, 6, 2, 5, np.random.default_rng(0))
    assert {len(np.unique(labels[part])) for part in parts} == {2}


def test_registry() -> None:
    with pytest.raises(JaxpflError, match="unknown partition 'class': did you mean 'classes'"):
        partitioner("class")
    with pytest.raises(JaxpflError, match="needs the number of classes per client"):
        partitioner("classes")
    assert partitioner("classes", PartitionOptions(classes_per_client=3)).name == "3 classes per client"


def toy_source(*, official_test: bool = False, n: int = 600, num_classes: int = 6) -> Source:
    """Inputs are the examples' own places, so that a federation shows who holds what."""
    rng = np.random.default_rng(7)
    y = rng.permutation(np.arange(n) % num_classes).astype(np.int32)
    x = np.arange(n, dtype=np.float32)[:, None]
    y_test = (np.arange(n // 5) % num_classes).astype(np.int32)
    x_test = np.arange(n // 5, dtype=np.float32)[:, None]
    if not official_test:
        return Source("toy", x, y, None, None, num_classes, "toy")
    return Source("toy", x, y, x_test, y_test, num_classes, "toy")


def places(federation: Federation, split: str) -> list[np.ndarray]:
    data = getattr(federation, split)
    return [x[mask, 0].astype(int) for x, mask in zip(data.x, data.mask, strict=True)]


def split_of(**options: object) -> Federation:
    arguments: dict = {"partition": "classes", "clients": 20, **options}
    if arguments["partition"] == "classes":
        arguments.setdefault("classes_per_client", 2)
    return federate(toy_source(official_test=bool(arguments.pop("official_test", False))), **arguments)


def test_the_official_test_set_goes_to_the_same_holders() -> None:
    federation = split_of(official_test=True)
    assert sorted(np.concatenate(places(federation, "test"))) == list(range(120))
    assert sorted(np.concatenate(places(federation, "train"))) == list(range(600))
    for i in range(20):
        held = set(federation.train.y[i][federation.train.mask[i]])
        assert set(federation.test.y[i][federation.test.mask[i]]) == held


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


@SETTINGS
@given(st.lists(st.integers(0, 4), min_size=1, max_size=50), st.floats(0.0, 0.99), st.integers(0, 99))
def test_hold_out_is_stratified(labels: list[int], share: float, seed: int) -> None:
    y = np.array(labels)
    held = hold_out(y, share, np.random.default_rng(seed))
    if share > 0 and len(y) > 1:
        assert 1 <= held.sum() < len(y)
    for label in np.unique(y):
        assert abs(held[y == label].sum() - share * np.sum(y == label)) <= 1 + 1e-9


def test_the_validation_share_leaves_the_test_examples_alone() -> None:
    for a, b in zip(places(split_of(), "test"), places(split_of(validation_share=0.3), "test"), strict=True):
        np.testing.assert_array_equal(a, b)


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


def test_seeds() -> None:
    assert checksum(split_of(split_seed=1)) == checksum(split_of(split_seed=1))
    assert len({checksum(split_of(split_seed=seed)) for seed in range(5)}) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test_share": 1.0}, "test_share must be >= 0 and < 1, got 1"),
        ({"validation_share": -0.1}, "validation_share must be >= 0 and < 1, got -0.1"),
        ({"split_seed": -1}, "split_seed must be at least 0, got -1"),
        ({"clients": 0}, "clients must be at least 1, got 0"),
        ({"partition": "nearest"}, "unknown partition 'nearest'"),
    ],
)
def test_bad_arguments_of_federate(options: dict, message: str) -> None:
    with pytest.raises(JaxpflError, match=message):
        split_of(**options)


def test_a_bad_source_is_named() -> None:
    source = toy_source(official_test=True)
    assert source.x_test is not None
    source.x_test[17] = np.nan
    with pytest.raises(JaxpflError, match="data set 'toy', test: example 17 holds a NaN"):
        federate(source, partition="iid", clients=3)
    source = toy_source()
    with pytest.raises(JaxpflError, match=r"labels must lie in 0 .. 2"):
        federate(source._replace(num_classes=3), partition="iid", clients=3)
    with pytest.raises(JaxpflError, match="labels must be integers"):
        federate(source._replace(y_train=source.y_train + 0.5), partition="iid", clients=3)
    with pytest.raises(JaxpflError, match="give x_test and y_test, or neither"):
        federate(source._replace(x_test=source.x_train), partition="iid", clients=3)
    with pytest.raises(JaxpflError, match="600 inputs but 5 labels"):
        federate(source._replace(y_train=source.y_train[:5]), partition="iid", clients=3)


def test_inputs_are_stored_in_one_type_and_refused_where_they_do_not_fit() -> None:
    source = toy_source(official_test=True)
    assert source.x_test is not None
    whole = np.arange(source.x_train.size).reshape(source.x_train.shape)
    mixed = federate(source._replace(x_train=whole), partition="iid", clients=3)
    assert mixed.train.examples.x.dtype == mixed.test.examples.x.dtype == np.float32
    assert federate(source._replace(x_train=whole, x_test=whole[:5].astype(bool), y_test=source.y_train[:5]),
                    partition="iid", clients=3, drop_empty=True).train.examples.x.dtype == np.int32  # fmt: skip
    for inputs, message in (
        (source.x_test[:, :-1], r"data set 'toy': one test input has shape \(.*\), those of training \("),
        ({"a": source.x_test}, "data set 'toy': test inputs are PyTreeDef.*, those of training PyTreeDef"),
        (source.x_test.astype(float) * 1e300, "data set 'toy', test: example 1 holds a NaN or infinite value"),
        (np.full(source.x_test.shape, 2**31), "data set 'toy', test: integer inputs must fit in 32 bits"),
        (np.full(source.x_test.shape, "a"), "data set 'toy', test: inputs must be real numbers"),
    ):
        with pytest.raises(JaxpflError, match=message):
            federate(source._replace(x_test=inputs), partition="iid", clients=3)


def test_federate_is_stacking_the_parts() -> None:
    """The same federation, put together by hand."""
    source = toy_source()
    federation = split_of()
    own = [places(federation, split) for split in ("train", "test")]
    train, test = ([(source.x_train[i], source.y_train[i]) for i in part] for part in own)
    by_hand = stack_clients(train, test=test)
    for split in ("train", "test"):
        got, want = getattr(federation, split), getattr(by_hand, split)
        jax.tree.map(np.testing.assert_array_equal, got, want)
