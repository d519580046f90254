"""Mini-batch draws and the random orders under them: all are equally likely, and padding changes none."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from jaxpfl.core.types import ClientData
from jaxpfl.data import batching, draw_batches, plan_batches, take
from jaxpfl.data.batching import ANY, MAX_CLIENT_EXAMPLES, Batching, Draw, Sizes, _cursor, order_at, orders_at

KEY = jax.random.key(11)
DRAWS = get_args(Draw)
# Integers, drawn once: compiling is what takes the time.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
drawn_batches = jit(draw_batches, static_argnums=0)


def mask_of(n: int, capacity: int) -> np.ndarray:
    return np.arange(capacity) < n


def draw(plan: Batching, n: int, participations: int, key: jax.Array = KEY):
    indices, valid = drawn_batches(plan, key, participations, n)
    return np.asarray(indices), np.asarray(valid)


def sequence(plan: Batching, n: int, rounds: int) -> np.ndarray:
    """The valid draws of one client, in the order of training."""
    indices, valid = jit(jax.vmap(lambda p: draw_batches(plan, KEY, p, jnp.int32(n))))(jnp.arange(rounds))
    return np.asarray(indices)[np.asarray(valid)]


@settings(max_examples=5, deadline=None, derandomize=True)
@given(st.integers(1, 23), st.integers(1, 7), st.integers(1, 9), st.integers(1, 20))
def test_epochs_use_every_example_once_and_rounds_continue_them(n: int, steps: int, batch: int, larger: int) -> None:
    # The other client sets the slots: the one that is looked at may be smaller than a batch.
    plan = plan_batches(np.array([n, n + larger]), steps, batch)
    assert not plan.full or batch >= n + larger
    if plan.full:
        return
    drawn = sequence(plan, n, rounds=6)
    assert len(drawn) == 6 * steps * min(batch, n)
    for start in range(0, len(drawn) - n + 1, n):
        np.testing.assert_array_equal(np.sort(drawn[start : start + n]), np.arange(n))
    rest = drawn[len(drawn) // n * n :]
    assert len(set(rest.tolist())) == len(rest)


@pytest.mark.parametrize(
    ("sizes", "steps", "batch", "epochs"),
    [
        ([1200], 10, 20, 1),  # six rounds are one epoch exactly
        ([1201], 60, 20, 2),
        ([100], 60, 20, 12),
        ([1200, 100], 60, 20, 12),
    ],
)
def test_the_bound_on_epochs_is_the_largest_that_occurs(sizes: list[int], steps: int, batch: int, epochs: int) -> None:
    plan = plan_batches(np.array(sizes), steps, batch)
    used = np.minimum(sizes, batch) * steps
    seen = max(
        (p * u + u - 1) // n - p * u // n + 1 for n, u in zip(sizes, used.tolist(), strict=True) for p in range(n)
    )
    assert plan.max_epochs == seen == epochs


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAWS)
def test_other_clients_change_no_index(kind: Draw) -> None:
    for n, p in ((4, 3), (37, 0), (37, 1000)):
        plain = draw(plan_batches(np.array([4, 37]), steps=5, batch_size=6, draw=kind), n, p)
        for other in (64, 5000):  # the last beyond what is sorted as single words
            plan = plan_batches(np.array([n, other]), steps=5, batch_size=6, draw=kind)
            for a, b in zip(plain, draw(plan, n, p), strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["epoch", "step"])
def test_vmap_map_and_one_by_one_agree(kind: Draw) -> None:
    sizes = np.array([4, 37, 0, 36])  # an empty slot of a cohort among them
    plan = plan_batches(sizes[[0, 1, 3]], steps=9, batch_size=6, draw=kind)
    keys = jax.random.split(KEY, 4)
    participations = jnp.array([0, 5, 2, 70])

    def one(key: jax.Array, p: jax.Array, own: jax.Array) -> tuple[jax.Array, jax.Array]:
        return draw_batches(plan, key, p, own)

    vmapped = jax.jit(jax.vmap(one))(keys, participations, sizes)
    mapped = jax.jit(lambda *a: jax.lax.map(lambda z: one(*z), a))(keys, participations, sizes)
    for i, n in enumerate(sizes):
        alone = draw(plan, n, int(participations[i]), keys[i])
        for a, b, c in zip(vmapped, mapped, alone, strict=True):
            np.testing.assert_array_equal(a[i], c)
            np.testing.assert_array_equal(b[i], c)
    assert not np.asarray(vmapped[1])[2].any()
    assert not np.asarray(vmapped[0])[2].any()


CLASSED = np.concatenate([np.arange(1, 15), [16, 17, 33, 63, 64, 65, 66, 300]])
"""Sizes of every class, up to each bound and beyond it."""


def in_two_runs(plan: Batching) -> np.ndarray:
    """Indices of clients of these sizes and an empty one, several at once, in two runs of other orders."""
    sizes = np.append(CLASSED, 0)
    order = np.random.default_rng(0).permuted(np.tile(np.arange(len(sizes)), (2, 1)), axis=1)
    keys, participations = jax.random.split(KEY, len(sizes)), (jnp.arange(len(sizes)) * 7) % 10

    def one(client: jax.Array) -> jax.Array:
        return draw_batches(plan, keys[client], participations[client], jnp.asarray(sizes)[client])[0]

    rows = np.asarray(jit(jax.vmap(jax.vmap(one)))(order))
    found = np.stack([row[np.argsort(own)] for row, own in zip(rows, order, strict=True)])
    np.testing.assert_array_equal(*found)
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["epoch", pytest.param("step", marks=pytest.mark.slow)])
def test_classes_of_clients_change_no_draw(kind: Draw) -> None:
    plan = plan_batches(CLASSED, steps=5, batch_size=6, draw=kind)
    first, second, last = plan.classes
    assert [(of.largest, of.sizes) for of in plan.classes] == [
        (16, Sizes(16, False)), (64, Sizes(64, False)), (MAX_CLIENT_EXAMPLES, Sizes(0, True))
    ]  # fmt: skip
    assert first.max_epochs == plan.max_epochs >= second.max_epochs >= last.max_epochs
    want = in_two_runs(replace(plan, classes=()))
    np.testing.assert_array_equal(in_two_runs(plan), want)
    wrong = second._replace(max_epochs=1, sizes=Sizes(32, False))  # a planted defect
    missing = (in_two_runs(replace(plan, classes=(first, wrong, last))) != want).any(axis=(1, 2))
    assert set(CLASSED[missing[:-1]]) <= set(CLASSED[(CLASSED > 16) & (CLASSED <= 64)])
    assert missing.any()


@pytest.mark.parametrize(
    ("sizes", "bounds"),
    [
        ([1000, 2000], ()),
        ([9, 10, 64], (16, 64)),
        ([15] + [17] * 9, ()),  # as many epochs, and as little to sort
        ([2] + [60] * 99, (16, 64)),  # ten epochs, where the others touch one
        ([12, 30, 65], (16, 64, MAX_CLIENT_EXAMPLES)),
        ([3, 100], (16, MAX_CLIENT_EXAMPLES)),
    ],
)
def test_clients_are_of_few_classes(sizes: list[int], bounds: tuple[int, ...]) -> None:
    plan = plan_batches(np.array(sizes), steps=10, batch_size=6)
    assert tuple(of.largest for of in plan.classes) == bounds
    for below, of in zip((0, *bounds), plan.classes, strict=False):
        own = [n for n in sizes if below < n <= of.largest]
        assert of.max_epochs == max(plan_batches(np.array([n, 6000]), 10, 6).max_epochs for n in own)


@pytest.mark.parametrize("kind", DRAWS)
def test_ragged_clients_use_their_own_batch_size(kind: Draw) -> None:
    plan = plan_batches(np.array([4, 37]), steps=5, batch_size=6, draw=kind)
    assert plan.ragged
    assert plan.batch_size == 6
    indices, valid = draw(plan, 4, 2)
    np.testing.assert_array_equal(valid, np.tile(np.arange(6) < 4, (5, 1)))
    assert not indices[~valid].any()
    assert indices.max() < 4
    if kind != "replacement":
        np.testing.assert_array_equal(np.sort(indices[:, :4]), np.tile(np.arange(4), (5, 1)))


def test_per_step_draws_are_distinct_and_fresh() -> None:
    plan = plan_batches(np.array([30]), steps=50, batch_size=10, draw="step")
    first, second = draw(plan, 30, 0)[0], draw(plan, 30, 1)[0]
    both = np.concatenate([first, second])
    assert all(len(set(batch)) == 10 for batch in both.tolist())
    assert len({tuple(sorted(batch)) for batch in both.tolist()}) == 100
    # Each example is expected in 1000/30 batches, binomial (100, 1/3): 6 sd of 4.7, false alarm below 1e-7.
    assert np.abs(np.bincount(both.ravel(), minlength=30) - 100 / 3).max() < 6 * 4.72


def test_draws_with_replacement_are_uniform_and_repeat() -> None:
    plan = plan_batches(np.array([8]), steps=400, batch_size=8, draw="replacement")
    assert not plan.full
    indices, valid = draw(plan, 8, 0)
    assert valid.all()
    # 3200 draws over 8 values: sd 18.7, 6 of them: false alarm below 1e-7.
    assert np.abs(np.bincount(indices.ravel(), minlength=8) - 400).max() < 6 * 18.71
    repeats = sum(len(set(batch)) < 8 for batch in indices.tolist())
    assert repeats > 380  # a batch of 8 without repeat has probability 0.0024


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 2**31 - 1), st.integers(1, MAX_CLIENT_EXAMPLES), st.integers(1, 10**4), st.integers(1, 2**17))
def test_the_cursor_is_exact_where_the_product_overflows(p: int, n: int, steps: int, batch: int) -> None:
    per_round = steps * min(batch, n)
    if per_round >= 2**31:
        return
    epoch, offset = _cursor(jnp.uint32(p), jnp.int32(per_round), jnp.int32(n))
    assert int(epoch) == (p * per_round // n) % 2**32
    assert int(offset) == p * per_round % n


@pytest.mark.parametrize("kind", ["epoch", "step"])
def test_full_batches_are_the_whole_data_without_a_draw(kind: Draw) -> None:
    plan = plan_batches(np.array([3, 5]), steps=2, batch_size=100, draw=kind)
    assert plan.full
    assert plan.batch_size == 5
    data = ClientData.padded(jnp.arange(16.0).reshape(8, 2), jnp.arange(8), mask_of(3, 8))
    indices, valid = draw_batches(plan, KEY, jnp.int32(0), data.size)
    assert indices.shape == valid.shape == (2, 0)
    x, y, real = take(data, indices[0], valid[0], plan)
    assert x.shape == (5, 2)
    np.testing.assert_array_equal(real, [True] * 3 + [False] * 2)
    np.testing.assert_array_equal(x, np.where(real[:, None], np.arange(10.0).reshape(5, 2), 0))
    np.testing.assert_array_equal(y, [0, 1, 2, 0, 0])


def test_take_gathers_and_zeroes_what_is_not_valid() -> None:
    plan = plan_batches(np.array([4, 37]), steps=2, batch_size=6)
    x = {"a": np.arange(1.0, 38.0)[:, None] * np.ones((1, 3)), "b": np.arange(100, 137)}
    data = ClientData.padded(jax.tree.map(jnp.asarray, x), np.arange(37) + 1, mask_of(4, 37))
    indices, valid = drawn_batches(plan, KEY, jnp.int32(0), data.size)
    got, y, real = jax.jit(take, static_argnums=3)(data, indices[1], valid[1], plan)
    chosen = np.asarray(indices[1])[:4]
    np.testing.assert_array_equal(real, np.arange(6) < 4)
    np.testing.assert_array_equal(got["a"][:4, 0], chosen + 1.0)
    np.testing.assert_array_equal(got["b"][:4], chosen + 100)
    np.testing.assert_array_equal(y[:4], chosen + 1)
    assert not np.asarray(got["a"])[4:].any()
    assert not np.asarray(got["b"])[4:].any()
    assert not np.asarray(y)[4:].any()


FALSE_ALARM = 1e-6
SIZES = (37, 64, 65, 1000, 4095, 4096, 4097, 60_000, 2**23)
NETWORK = Sizes(0, True)
"""Bounds under which short orders are the network's too."""


@partial(jax.jit, static_argnums=(1, 3, 4))
def drawn(first: jax.Array, keys: int, size: jax.Array, places: int, sizes: Sizes) -> jax.Array:
    """Examples at the first places of as many orders, [keys, places]."""
    own = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(5), first + jnp.arange(keys))
    return jax.vmap(lambda key: order_at(key, size, jnp.arange(places), sizes))(own)


def some(keys: int, size: int, places: int, first: int = 0, sizes: Sizes | None = None) -> np.ndarray:
    return np.asarray(drawn(jnp.int32(first), keys, jnp.int32(size), places, sizes or Sizes.cover(np.array([size]))))


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


@pytest.mark.slow
def test_the_largest_client_has_all_examples_once() -> None:
    largest = 2**23
    order = order_at(jax.random.key(0), jnp.int32(largest), jnp.arange(largest))
    assert (np.bincount(np.asarray(order), minlength=largest) == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [None, NETWORK])
@pytest.mark.parametrize("size", [3, 7])
def test_all_orders_of_a_small_client_are_equally_likely_in_a_million(size: int, sizes: Sizes | None) -> None:
    counts = [order_counts(some(250_000, size, size, k, sizes)) for k in range(0, 10**6, 250_000)]
    assert is_uniform(np.sum(counts, axis=0))


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 37, 65])
def test_bounds_of_sizes_change_no_order(size: int) -> None:
    keys, place = jax.random.split(jax.random.key(4), 3), jnp.arange(size)
    bounds = {ANY, Sizes.cover(np.array([size])), Sizes.cover(np.array([size, 50]))}
    found = [[order_at(key, jnp.int32(size), place, sizes) for key in keys] for sizes in bounds]
    several = orders_at(keys, jnp.int32(size), jnp.repeat(jnp.arange(3), size), jnp.tile(place, 3))
    for rows in found:
        np.testing.assert_array_equal(rows, found[0])
        np.testing.assert_array_equal(np.reshape(several, (3, size)), rows)


@pytest.mark.parametrize("rounds", [3, 6])
def test_too_few_rounds_are_found(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted defect: the tests above would see it."""
    monkeypatch.setattr(batching, "ROUNDS", rounds)
    keys = jax.random.split(jax.random.key(5), 60_000)
    rows = jax.jit(jax.vmap(lambda key: order_at(key, jnp.int32(5), jnp.arange(5), NETWORK)))(keys)
    assert not is_uniform(order_counts(np.asarray(rows)))


def test_a_bit_that_is_not_the_partners_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted defect: bits that the place alone decides lose examples."""

    def wrong(place: jax.Array, shift: jax.Array, salt: jax.Array, size: jax.Array) -> jax.Array:
        bits = (place.astype(jnp.uint32) ^ salt) * np.uint32(0x7FEB352D)
        return jnp.where(bits >> 31 == 1, (shift - place) % size, place)

    monkeypatch.setattr(batching, "_swap_or_not", wrong)
    order = order_at(jax.random.key(0), jnp.int32(100), jnp.arange(100))
    assert len(np.unique(order)) < 100
