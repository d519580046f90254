"""Unseen clients: disjoint from the trained ones, everybody in one of the two, the same for a seed."""

import numpy as np
import pytest

from jaxpfl import JaxpflError, data
from jaxpfl.data.federate import set_apart


@pytest.fixture(scope="module")
def federation():
    return data.federate(data.load("digits"), clients=20, classes_per_client=3)


def test_everybody_is_trained_or_unseen(federation):
    trained, unseen = set_apart(federation, 6)
    assert (trained.num_clients, unseen.num_clients) == (14, 6)
    ids = np.concatenate([trained.client_ids, unseen.client_ids])
    np.testing.assert_array_equal(np.sort(ids), federation.client_ids)
    for part in (trained, unseen):
        rows = np.flatnonzero(np.isin(federation.client_ids, part.client_ids))
        for got, whole in zip(part[1:], federation[1:], strict=True):
            assert len(got.examples.y) == got.size.sum()  # nobody's examples are left out of the store
            for own, row in enumerate(rows):
                n = whole.size[row]
                assert got.size[own] == n
                np.testing.assert_array_equal(got.x[own, :n], whole.x[row, :n])
                np.testing.assert_array_equal(got.y[own, :n], whole.y[row, :n])


def test_the_seed_decides(federation):
    first, again, other = (set_apart(federation, 6, seed)[1].client_ids for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert set(first) != set(other)
    # PCG64's raw integers and IEEE operations: the same on every platform.
    assert first.tolist() == [3, 4, 8, 12, 13, 15]


def test_everyone_is_equally_likely(federation):
    """2000 draws of 5 of 20: each client 500 times, at 4.5 standard deviations (false alarm below 2e-4 for all)."""
    ids = federation._replace(**dict.fromkeys(("train", "validation", "test"), federation.train.emptied()))
    drawn = np.concatenate([set_apart(ids, 5, seed)[1].client_ids for seed in range(2000)])
    counts = np.bincount(drawn, minlength=20)
    assert np.abs(counts - 500).max() < 4.5 * np.sqrt(2000 * 0.25 * 0.75)


@pytest.mark.parametrize("unseen", [0, 20, 21, -1])
def test_impossible_numbers(federation, unseen):
    with pytest.raises(JaxpflError, match=f"at least 1 and fewer than all 20, got {unseen}"):
        set_apart(federation, unseen)
