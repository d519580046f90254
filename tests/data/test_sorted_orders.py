"""The sorted orders of earlier stored runs: what they were, independent of the capacity."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.data import sorted_orders

KEY = jax.random.key(11)
permutation = jax.jit(sorted_orders.permutation, static_argnums=2)


@pytest.mark.parametrize("capacity", [6, pytest.param(5000, marks=pytest.mark.slow)])
def test_permutations_are_uniform(capacity: int) -> None:
    """Counts of (place, value) over 3000 permutations of 6: each 500, sd 20.4; 6 sd: false alarm < 1e-7."""
    keys = jax.random.split(KEY, 3000)
    order = jax.jit(lambda k: jax.lax.map(lambda one: permutation(one, jnp.int32(6), capacity), k))(keys)[:, :6]
    counts = np.stack([np.bincount(column, minlength=6) for column in np.asarray(order).T])
    assert np.abs(counts - 500).max() < 6 * 20.42
    assert len({tuple(row) for row in np.asarray(order).tolist()}) > 680  # of 720: 11.2 are expected to be missing


@pytest.mark.parametrize("capacity", [37, 4096, 4097])
def test_a_permutation_orders_real_examples_first(capacity: int) -> None:
    order = np.asarray(permutation(KEY, 30, capacity))
    np.testing.assert_array_equal(np.sort(order[:30]), np.arange(30))
    np.testing.assert_array_equal(order[30:], np.arange(30, capacity))
    np.testing.assert_array_equal(order[:30], permutation(KEY, 30, 30))


def test_both_ways_to_sort_agree_where_scores_tie() -> None:
    """4096 examples have about 8 ties in their 20 bits, so the order of ties is seen."""
    short, long = (np.asarray(permutation(KEY, 4096, c))[:4096] for c in (4096, 5000))
    np.testing.assert_array_equal(short, long)
    bits = np.asarray(jax.random.bits(KEY, (4096,), jnp.uint32)) >> 12
    assert len(np.unique(bits)) < 4096
    np.testing.assert_array_equal(short, np.argsort(bits, kind="stable"))


def test_the_orders_are_those_that_were_stored() -> None:
    """As version 0.1 printed them before there were others."""
    assert permutation(KEY, 12, 12).tolist() == [1, 6, 0, 5, 3, 8, 11, 4, 10, 2, 7, 9]
