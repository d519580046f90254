"""Stacking users' arrays: the flat store, its padded views, and the errors of bad arrays."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxpfl.data import (
    Source,
    check_batch_size,
    describe,
    federate,
    format_description,
    pad,
    permute,
    stack_clients,
    summary,
)
from jaxpfl.data.stack import Examples
from jaxpfl.support.errors import JaxpflError, JaxpflWarning

SIZES = (3, 5, 2)


def clients(sizes: tuple[int, ...] = SIZES) -> list[Examples]:
    return [(np.full((n, 2), i + 1.0), np.arange(n) % 3) for i, n in enumerate(sizes)]


def test_the_store_and_its_padded_views() -> None:
    federation = stack_clients(clients(), test=clients((1, 0, 4)))
    train = federation.train
    np.testing.assert_array_equal(train.examples.x, np.concatenate([x for x, _ in clients()]))
    np.testing.assert_array_equal(train.examples.y, np.concatenate([y for _, y in clients()]))
    np.testing.assert_array_equal(train.start, [0, 3, 8])
    np.testing.assert_array_equal(federation.test.start, [0, 0, 1])
    assert (train.x.shape, train.y.shape, train.mask.shape) == ((3, 5, 2), (3, 5), (3, 5))
    assert (train.x.dtype, train.y.dtype, train.mask.dtype) == (np.float32, np.int32, bool)
    np.testing.assert_array_equal(train.size, SIZES)
    for i, (x, y) in enumerate(clients()):
        np.testing.assert_array_equal(train.x[i, : len(y)], x)
        np.testing.assert_array_equal(train.y[i, : len(y)], y)
        assert train.mask[i, : len(y)].all()
    assert not train.x[~train.mask].any()
    assert not train.y[~train.mask].any()
    np.testing.assert_array_equal(federation.test.size, [1, 0, 4])
    assert federation.validation.x.shape == (3, 0, 2)
    np.testing.assert_array_equal(federation.client_ids, [0, 1, 2])
    assert federation.input_shape == (2,)


def test_integer_inputs_stay_integers_and_mixed_ones_become_floats() -> None:
    tokens = [(np.array([[1, 2]]), np.array([0]))]
    assert stack_clients(tokens).train.x.dtype == np.int32
    assert stack_clients(tokens + clients()).train.x.dtype == np.float32


def test_dropping_empty_clients_keeps_the_ids_of_the_others() -> None:
    sizes = (3, 0, 2, 0)
    with pytest.warns(JaxpflWarning, match=r"left out 2 of 4 clients, .*\(client 1, 3\)"):
        federation = stack_clients(clients(sizes), test=clients((1, 9, 2, 9)), drop_empty=True)
    np.testing.assert_array_equal(federation.client_ids, [0, 2])
    np.testing.assert_array_equal(federation.train.size, [3, 2])
    np.testing.assert_array_equal(federation.test.size, [1, 2])
    np.testing.assert_array_equal(federation.train.x[1, :2], np.full((2, 2), 3.0))
    with pytest.raises(JaxpflError, match="none of the 2 clients has training data"):
        stack_clients([([], []), ([], [])], drop_empty=True)  # type: ignore[list-item]


def test_pad_and_permute() -> None:
    federation = stack_clients(clients(), test=clients((1, 0, 4)))
    padded = pad(federation, train_capacity=9, validation_capacity=2)
    assert padded.train.x.shape == (3, 9, 2)
    assert padded.validation.mask.shape == (3, 2)
    np.testing.assert_array_equal(padded.train.size, SIZES)
    np.testing.assert_array_equal(padded.train.x[:, :5], federation.train.x)
    assert not padded.train.x[:, 5:].any()
    assert padded.test.x is not None
    with pytest.raises(JaxpflError, match="test capacity 3 is below the present one, 4"):
        pad(federation, test_capacity=3)

    moved = permute(federation, [2, 0, 1])
    np.testing.assert_array_equal(moved.client_ids, [2, 0, 1])
    np.testing.assert_array_equal(moved.train.size, [2, 3, 5])
    np.testing.assert_array_equal(moved.test.y[0], federation.test.y[2])
    with pytest.raises(JaxpflError, match=r"each of 0 \.\. 2 once"):
        permute(federation, [0, 0, 1])


def test_batches_larger_than_a_client() -> None:
    federation = stack_clients(clients())
    check_batch_size(federation, 2, strict=True)
    with pytest.warns(JaxpflWarning, match="batch size 4 is larger .* of 2 of 3 clients .*smallest has 2") as seen:
        check_batch_size(federation, 4)
    assert len(seen) == 1
    with pytest.raises(JaxpflError, match="of 2 of 3 clients"):
        check_batch_size(federation, 4, strict=True)
    with pytest.raises(JaxpflError, match="batch size must be at least 1, got 0"):
        check_batch_size(federation, 0)


def test_summary_and_description() -> None:
    federation = pad(stack_clients(clients(), test=clients((1, 0, 4)), client_ids=[5, 6, 9]), train_capacity=8)
    counts = summary(federation, num_classes=4)
    np.testing.assert_array_equal(counts.class_counts, [[1, 1, 1, 0], [2, 2, 1, 0], [1, 1, 0, 0]])
    np.testing.assert_array_equal(counts.classes_held, [3, 3, 2])
    np.testing.assert_array_equal(counts.holders, [3, 3, 2, 0])
    described = describe(counts)
    assert json.loads(json.dumps(described)) == described
    assert described["examples_per_client"]["train"] == {"min": 2, "median": 3.0, "max": 5}
    assert described["capacity"] == {"train": 8, "validation": 0, "test": 4}
    assert described["per_client"][2] == {
        "client_id": 9,
        "train": 2,
        "validation": 0,
        "test": 4,
        "class_counts": [1, 1, 0, 0],
    }
    text = format_description(described, most_clients=2)
    assert "3 clients, 4 classes, inputs 2" in text
    assert "... and 1 more clients" in text


def _rows(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 3)).astype(np.float32), rng.integers(2, size=n)


@pytest.mark.parametrize("copies", [1, 12])
@pytest.mark.parametrize("tree", [False, True])
def test_test_examples_that_are_trained_on_are_counted(copies: int, tree: bool) -> None:
    (x, y), (x_test, y_test) = _rows(40), _rows(12, seed=1)
    places = np.arange(copies)
    x_test[places], y_test[places] = x[places + 7], y[places + 7]
    other = x[:1].copy(), 1 - y[:1]  # of another label: it is no copy
    x_test, y_test = np.concatenate([x_test, other[0]]), np.concatenate([y_test, other[1]])
    of = (lambda a: {"a": a[:, :1], "b": a[:, 1:]}) if tree else (lambda a: a)
    train = [(of(x[:20]), y[:20]), (of(x[20:]), y[20:])]
    said = rf"^{copies} of 13 test examples are training examples too, features and label: give a test set of other"
    with pytest.warns(JaxpflWarning, match=said):
        stack_clients(train, test=[(of(x_test), y_test), (of(x_test[:0]), y_test[:0])])
    users = np.zeros(40, np.int32)
    source = Source("own", of(x), y, of(x_test), y_test, 2, "", users_train=users, users_test=users[:13])
    for partition in ("iid", "natural"):
        with pytest.warns(JaxpflWarning, match=said):
            federate(source, partition=partition, clients=1)


def test_chance_repeats_of_discrete_features_are_no_leak() -> None:
    rng = np.random.default_rng(3)
    parts = [(rng.integers(2, size=(n, 6)).astype(np.float32), rng.integers(2, size=n)) for n in (60, 60)]
    stack_clients(parts[:1], test=parts[1:])
