"""Passes over all of a client's examples: the same for every chunk, alone, mapped, and mapped within runs."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.core.types import ClientData, Examples
from jaxpfl.data import passes
from jaxpfl.data.passes import MOST, class_of, size_classes, switch_length

SIZES = (3, 0, 17, 1, 8)


def clients(chunk):
    rng = np.random.default_rng(0)
    n = sum(SIZES)
    data = ClientData.stacked(Examples(rng.normal(size=(n, 2)).astype(np.float32), np.arange(n)), SIZES)
    return jax.tree.map(jnp.asarray, replace(data, chunk=chunk))


def own(data, w):
    """Sum over a client's examples of y cos(x w), and their number; and each one's x w."""

    def sums(x, y, valid):
        return {"cos": jnp.where(valid, y * jnp.cos(x @ w), 0).sum(), "count": valid.sum()}

    return passes.total(sums, data), passes.each(lambda x, y, valid: x @ w, data)


def by_hand(data, w):
    for row, size in enumerate(SIZES):
        x, y = data.x[row, :size], data.y[row, :size]
        yield (y * np.cos(x @ w[row])).sum(), size, x @ w[row]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk", "mapped"), [(4, "alone"), (1, "vmap"), (17, "vmap"), (4, "jit within vmap"), (4, "runs"), (16, "runs")]
)
def test_chunks_do_not_matter(chunk, mapped):
    data, w = clients(chunk), np.random.default_rng(1).normal(size=(len(SIZES), 2)).astype(np.float32)
    rows = jnp.arange(len(SIZES))

    def of_row(row, w):
        return own(data.client(row), w)

    if mapped == "alone":
        found = [jax.jit(of_row)(row, w[row]) for row in rows]
        got = jax.tree.map(lambda *parts: jnp.stack(parts), *found)
    elif mapped == "runs":  # another order of the clients in each run
        order = np.array([[0, 1, 2, 3, 4], [4, 2, 0, 1, 3]])
        both = jax.jit(jax.vmap(jax.vmap(of_row)))(order, w[order])
        got = jax.tree.map(lambda a: a[1][np.argsort(order[1])], both)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), jax.tree.map(lambda a: a[0], both), got)
    else:
        one = jax.jit(of_row, inline=True) if "jit" in mapped else of_row
        got = jax.jit(jax.vmap(one))(rows, w)
    for row, (cos, size, products) in enumerate(by_hand(data, w)):
        np.testing.assert_allclose(got[0]["cos"][row], cos, rtol=1e-4, atol=1e-5)
        assert got[0]["count"][row] == size
        np.testing.assert_allclose(got[1][row, :size], products, rtol=1e-5, atol=1e-6)
    assert got[1].shape == (len(SIZES), 17)


@pytest.mark.slow
def test_examples_that_are_mapped_too():
    """Clients with stores of their own, as a method makes of traced arrays."""
    data, w = clients(4), jnp.ones(2)

    def of_row(row):
        one = data.client(row)
        return own(replace(ClientData.padded(2 * one.x, one.y, one.mask), chunk=4), w)[0]["cos"]

    want = [(np.asarray(y) * np.cos(2 * x @ w)).sum() for x, y in zip(data.x, data.y, strict=True)]
    np.testing.assert_allclose(jax.jit(jax.vmap(of_row))(jnp.arange(len(SIZES))), want, rtol=1e-4, atol=1e-5)


def test_the_number_of_chunks_is_that_of_the_clients_together():
    """Loops end after those of one client, and after the chunks of all, not five times those of the longest."""
    data, trips = clients(4), []

    def sums(x, y, valid):
        jax.debug.callback(lambda: trips.append(1))
        return y.sum()

    jax.block_until_ready(jax.jit(lambda row: passes.total(sums, data.client(row)))(2))
    jax.effects_barrier()
    assert len(trips) == 2  # 16 and 1 of 17 examples
    trips.clear()
    jax.block_until_ready(jax.jit(jax.vmap(lambda row: passes.total(sums, data.client(row))))(jnp.arange(5)))
    jax.effects_barrier()
    assert len(trips) == 2  # a long one, of which one is computed at once, and 1 + 0 + 1 + 1 + 2, five at once
    trips.clear()
    many = replace(data, size=data.size * jnp.array([1, 0, 0, 1, 1]), chunk=2)
    jax.block_until_ready(jax.jit(jax.vmap(lambda row: passes.total(sums, many.client(row))))(jnp.arange(5)))
    jax.effects_barrier()
    assert len(trips) == 2  # 3, 1 and 8 examples: one long one of 8, and 2 + 1


def padded(sizes: np.ndarray, lengths: tuple[int, ...]) -> float:
    """Sum of the padded sizes over that of the sizes."""
    classes = class_of(sizes, lengths)
    np.testing.assert_array_equal(np.sort(np.concatenate(classes)), np.arange(len(sizes)))
    return sum(length * len(places) for length, places in zip(lengths, classes, strict=True)) / sizes.sum()


def test_classes_hold_every_size_at_little_more_than_its_own():
    sizes = np.rint(np.random.default_rng(0).lognormal(3, 2, 2000)).clip(1).astype(int)
    lengths = size_classes(sizes)
    assert len(lengths) == MOST
    assert lengths[-1] == sizes.max()
    assert list(lengths) == sorted(set(lengths))
    assert padded(sizes, lengths) < 1.6  # largest over mean: 400
    assert size_classes(np.array([30] * 9 + [1])) == (30,)  # one small client among equals is no class of its own
    assert size_classes(np.array([0, 0])) == (1,)


@pytest.mark.parametrize("lengths", [(40,), (2, 9, 40)])
def test_at_its_own_length_alone_and_mapped(lengths):
    size, scale = jnp.array([2, 40, 3, 9, 0]), jnp.arange(5.0)

    def padded(size, scale):
        return switch_length(lambda length: scale * (jnp.arange(length) < size).sum(), size, lengths)

    want = size * scale
    np.testing.assert_array_equal(jax.jit(jax.vmap(padded))(size, scale), want)
    in_runs = jax.jit(jax.vmap(jax.vmap(padded), (None, 0)))(size, jnp.stack([scale, 2 * scale]))
    np.testing.assert_array_equal(in_runs[1], 2 * want)
    one = jax.jit(padded)
    np.testing.assert_array_equal([one(*pair) for pair in zip(size, scale, strict=True)], want)


def test_many_clients_of_a_length_are_computed_together_and_in_runs_of_other_sizes():
    """Values that a function holds are of all clients or of each; runs have other numbers of clients of a length."""
    rng = np.random.default_rng(0)
    sizes, scale, table = rng.integers(1, 41, size=(3, 70)), jnp.asarray(rng.normal(size=70)), jnp.arange(40.0)

    def weighed(size, scale):
        def of(length):
            return {"sum": scale * (table[:length] * (jnp.arange(length) < size)).sum(), "size": size}

        return switch_length(of, size, (2, 9, 40))

    got = jax.jit(jax.vmap(jax.vmap(weighed), (0, None)))(sizes, scale)
    np.testing.assert_allclose(got["sum"], scale * (sizes * (sizes - 1) / 2), rtol=1e-6)
    np.testing.assert_array_equal(got["size"], sizes)
    shared = jax.jit(jax.vmap(weighed, (0, None)))(sizes[0], 2.0)
    np.testing.assert_allclose(shared["sum"], sizes[0] * (sizes[0] - 1), rtol=1e-6)
