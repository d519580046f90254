"""Mini-batch draws: what an epoch is, and that padding, vmap and lax.map change nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpfl.core.types import ClientData
from jaxpfl.data import draw_batches, plan_batches, take
from jaxpfl.data.batching import MAX_CLIENT_EXAMPLES, Batching, Draw, Sizes, _cursor

KEY = jax.random.key(11)
DRAWS = get_args(Draw)
drawn_batches = jax.jit(draw_batches, static_argnums=0)


def mask_of(n: int, capacity: int) -> np.ndarray:
    return np.arange(capacity) < n


def draw(plan: Batching, n: int, participations: int, key: jax.Array = KEY):
    indices, valid = drawn_batches(plan, key, participations, n)
    return np.asarray(indices), np.asarray(valid)


def sequence(plan: Batching, n: int, rounds: int) -> np.ndarray:
    """The valid draws of one client, in the order of training."""
    indices, valid = jax.jit(jax.vmap(lambda p: draw_batches(plan, KEY, p, jnp.int32(n))))(jnp.arange(rounds))
    return np.asarray(indices)[np.asarray(valid)]


@settings(max_examples=8, deadline=None, derandomize=True)
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
        ([1200], 60, 20, 1),
        ([1201], 60, 20, 2),
        ([100], 60, 20, 12),
        ([1200, 1146], 60, 20, 3),
        ([1200, 100], 60, 20, 12),
        ([7], 1, 3, 2),
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

    rows = np.asarray(jax.jit(jax.vmap(jax.vmap(one)))(order))
    found = np.stack([row[np.argsort(own)] for row, own in zip(rows, order, strict=True)])
    np.testing.assert_array_equal(*found)
    return found[0]


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
        ([60] * 10, ()),
        ([1000, 2000], ()),
        ([9, 10, 64], (16, 64)),
        ([20, 64], ()),
        ([15] + [17] * 9, ()),  # as many epochs, and as little to sort
        ([2] + [60] * 99, (16, 64)),  # ten epochs, where the others touch one
        ([12, 30, 65], (16, 64, MAX_CLIENT_EXAMPLES)),
        ([15] + [17] * 9 + [65], (64, MAX_CLIENT_EXAMPLES)),
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
@given(
    st.integers(0, 2**31 - 1),
    st.integers(1, MAX_CLIENT_EXAMPLES),
    st.integers(1, 10**4),
    st.integers(1, 2**17),
)
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
