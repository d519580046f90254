"""Random orders: each is one, all are equally likely, and none depends on anything but its key and size.

Every statistic is compared with a bound that a uniform order exceeds with probability below 1e-6 (six standard
deviations of a sum, or the chi2 quantile); the keys are fixed, so a test that passes once passes always.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxpfl.data import orders
from jaxpfl.data.orders import order_at, orders_at

FALSE_ALARM = 1e-6
SIZES = (37, 64, 65, 1000, 4095, 4096, 4097, 60_000, 2**23)
NETWORK = orders.Sizes(0, True)
"""Bounds under which short orders are the network's too."""


@partial(jax.jit, static_argnums=(1, 3, 4))
def drawn(first: jax.Array, keys: int, size: jax.Array, places: int, sizes: orders.Sizes) -> jax.Array:
    """Examples at the first places of as many orders, [keys, places]."""
    own = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(5), first + jnp.arange(keys))
    return jax.vmap(lambda key: order_at(key, size, jnp.arange(places), sizes))(own)


def some(keys: int, size: int, places: int, first: int = 0, sizes: orders.Sizes | None = None) -> np.ndarray:
    return np.asarray(
        drawn(jnp.int32(first), keys, jnp.int32(size), places, sizes or orders.Sizes.of(np.array([size])))
    )


def is_uniform(counts: np.ndarray) -> bool:
    """Whether counts are those of equally likely values, by chi2."""
    expected = counts.sum() / counts.size
    return bool(((counts - expected) ** 2 / expected).sum() < stats.chi2.isf(FALSE_ALARM, counts.size - 1))


def order_counts(rows: np.ndarray) -> np.ndarray:
    """Counts of each of the n! orders among the rows."""
    n = rows.shape[1]
    number = np.zeros(len(rows), int)
    for i in range(n):
        number = number * (n - i) + (rows[:, i + 1 :] < rows[:, i : i + 1]).sum(1)
    return np.bincount(number, minlength=math.factorial(n))


def test_every_order_has_all_examples_once() -> None:
    @jax.jit
    def sorted_order(key: jax.Array, size: jax.Array) -> jax.Array:
        place = jnp.arange(130)
        return jnp.sort(jnp.where(place < size, order_at(key, size, jnp.minimum(place, size - 1)), place))

    sizes = jnp.arange(1, 131)
    rows = jax.vmap(sorted_order)(jax.random.split(jax.random.key(1), 130), sizes)
    np.testing.assert_array_equal(rows, np.tile(np.arange(130), (130, 1)))


@pytest.mark.parametrize("size", [1000, 1023, 1024, 1025, 4097, 60_000])
def test_large_orders_have_all_examples_once(size: int) -> None:
    np.testing.assert_array_equal(np.sort(some(2, size, size)), np.tile(np.arange(size), (2, 1)))


def test_the_largest_client_has_all_examples_once() -> None:
    largest = 2**23
    order = order_at(jax.random.key(0), jnp.int32(largest), jnp.arange(largest))
    assert (np.bincount(np.asarray(order), minlength=largest) == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [None, NETWORK])
@pytest.mark.parametrize("size", [3, 7])
def test_all_orders_of_a_small_client_are_equally_likely_in_a_million(size: int, sizes: orders.Sizes | None) -> None:
    counts = [order_counts(some(250_000, size, size, k, sizes)) for k in range(0, 10**6, 250_000)]
    assert is_uniform(np.sum(counts, axis=0))


@pytest.mark.parametrize("size", SIZES)
def test_first_places_and_pairs_are_uniform(size: int) -> None:
    """The examples at the first two places by sixteenths, alone, as pairs, and their distance, in 20,000 orders."""
    first, second = (some(20_000, size, 3) * 16 // size)[:, :2].T
    if size % 16 == 0:  # else the sixteenths differ
        assert is_uniform(np.bincount(first, minlength=16))
        assert is_uniform(np.bincount(second, minlength=16))
    rows = some(20_000, size, 3).astype(float)
    # A place's mean is (n - 1)/2 and its variance (n^2 - 1)/12; two places correlate by -1/(n - 1).
    centred = (rows - (size - 1) / 2) / math.sqrt((size**2 - 1) / 12)
    assert np.abs(centred.mean(0)).max() < 6 / math.sqrt(20_000)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert abs((centred[:, a] * centred[:, b]).mean() + 1 / (size - 1)) < 6 / math.sqrt(20_000)
        assert abs((rows[:, a] < rows[:, b]).mean() - 0.5) < 6 * 0.5 / math.sqrt(20_000)
    steps = (rows[:, 1] - rows[:, 0]) % size  # uniform over 1 .. n - 1
    assert abs(steps.mean() / size - 0.5) < 6 * math.sqrt(1 / 12 / 20_000)


@pytest.mark.parametrize(("size", "places"), [(37, 37), (1000, 100), (4097, 100)])
def test_neighbours_and_fixed_points_are_as_rare_as_in_a_random_order(size: int, places: int) -> None:
    """Places x with example x, and next places with next examples: each has probability 1/n."""
    rows = some(20_000, size, places)
    fixed = (rows == np.arange(places)).sum()
    neighbours = ((rows[:, 1:] - rows[:, :-1]) % size == 1).sum()
    for seen, expected in ((fixed, 20_000 * places / size), (neighbours, 20_000 * (places - 1) / (size - 1))):
        assert abs(seen - expected) < 6 * math.sqrt(expected)


def test_consecutive_keys_give_independent_orders() -> None:
    """Pairs of orders of 4 from keys folded with e and e + 1: all 576 are equally likely."""
    numbers = [np.unique(some(100_000, 4, 4, first), axis=0, return_inverse=True)[1].ravel() for first in (0, 1)]
    assert is_uniform(np.bincount(numbers[0] * 24 + numbers[1], minlength=576))
    rows = some(2_001, 1000, 100).astype(float)
    same = sum(int((a == b).sum()) for a, b in pairwise(rows))
    assert abs(same - 200) < 6 * math.sqrt(200)


def test_several_orders_are_those_of_their_keys() -> None:
    keys = jax.random.split(jax.random.key(2), 5)
    nth, place = jnp.array([[4, 0, 0], [2, 1, 3]]), jnp.array([[9, 0, 5], [10, 0, 5]])
    several = orders_at(keys, jnp.int32(11), nth, place)
    for e, p, found in zip(nth.ravel(), place.ravel(), several.ravel(), strict=True):
        assert int(found) == int(order_at(keys[e], jnp.int32(11), p))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 37, 65])
def test_bounds_of_sizes_change_no_order(size: int) -> None:
    keys, place = jax.random.split(jax.random.key(4), 3), jnp.arange(size)
    bounds = {orders.ANY, orders.Sizes.of(np.array([size])), orders.Sizes.of(np.array([size, 50]))}
    found = [[order_at(key, jnp.int32(size), place, sizes) for key in keys] for sizes in bounds]
    several = orders_at(keys, jnp.int32(size), jnp.repeat(jnp.arange(3), size), jnp.tile(place, 3))
    for rows in found:
        np.testing.assert_array_equal(rows, found[0])
        np.testing.assert_array_equal(np.reshape(several, (3, size)), rows)


@pytest.mark.parametrize("rounds", [3, 6])
def test_too_few_rounds_are_found(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted defect: the tests above would see it."""
    monkeypatch.setattr(orders, "ROUNDS", rounds)
    keys = jax.random.split(jax.random.key(5), 60_000)
    rows = jax.jit(jax.vmap(lambda key: order_at(key, jnp.int32(5), jnp.arange(5), NETWORK)))(keys)
    assert not is_uniform(order_counts(np.asarray(rows)))


def test_a_bit_that_is_not_the_partners_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted defect: bits that the place alone decides lose examples."""

    def wrong(place: jax.Array, shift: jax.Array, salt: jax.Array, size: jax.Array) -> jax.Array:
        bits = (place.astype(jnp.uint32) ^ salt) * np.uint32(0x7FEB352D)
        return jnp.where(bits >> 31 == 1, (shift - place) % size, place)

    monkeypatch.setattr(orders, "_swap_or_not", wrong)
    order = order_at(jax.random.key(0), jnp.int32(100), jnp.arange(100))
    assert len(np.unique(order)) < 100
