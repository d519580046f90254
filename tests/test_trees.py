"""Trees as vectors, which keep every leaf, its type and its place, and sums over many clients, against float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.core import trees
from jaxpfl.core.full_precision import RunningSum
from jaxpfl.engine.cohort import Outcome, run_cohort
from jaxpfl.engine.state import Counts, whole
from jaxpfl.estimators.histograms import base as histograms


def tree():
    return {
        "w": jnp.arange(6.0).reshape(2, 3),
        "count": jnp.int32(2**24 + 1),  # lost if it went through a float32
        "nested": (jnp.array(True), jnp.float32(7), jnp.zeros((0, 4))),
    }


def test_unpack_inverts_pack():
    packed = trees.pack(tree())
    chex.assert_trees_all_equal(packed.unpack(), tree())
    chex.assert_trees_all_equal_shapes_and_dtypes(packed.unpack(), tree())
    assert len(packed.vectors) == len({leaf.dtype for leaf in jax.tree.leaves(tree())})


def test_packed_trees_add_like_trees():
    double = jax.jit(lambda packed: jax.tree.map(jnp.add, packed, packed))(trees.pack(tree()))
    assert int(double.unpack()["count"]) == 2 * (2**24 + 1)
    np.testing.assert_array_equal(double.unpack()["w"], 2 * tree()["w"])


def test_packing_works_for_many_clients_at_once():
    stacked = jax.tree.map(lambda a: jnp.stack([a, a + a]), tree())
    packed = jax.vmap(trees.pack)(stacked)
    chex.assert_trees_all_equal(jax.vmap(lambda p: p.unpack())(packed), stacked)


def test_nothing_packs_to_nothing():
    assert trees.pack(()).vectors == ()
    assert trees.pack(()).unpack() == ()


class Pair(NamedTuple):
    first: Any
    second: Any


def parameters():
    return {
        "body": {"kernel": jnp.ones((2, 3)), "scale": jnp.arange(2.0)},
        "more": Pair([jnp.zeros(1), jnp.ones(1)], ()),
    }


def test_a_tree_is_split_by_the_paths_of_its_leaves():
    seen = []
    trees.split_by_path(parameters(), lambda path: bool(seen.append(path)))
    assert set(seen) == {("body", "kernel"), ("body", "scale"), ("more", "first", "0"), ("more", "first", "1")}
    chosen, rest = trees.split_by_path(parameters(), lambda path: path[-1] in ("scale", "1"))
    chex.assert_trees_all_equal(jax.tree.leaves(chosen), [jnp.arange(2.0), jnp.ones(1)])
    chex.assert_trees_all_equal(jax.tree.leaves(rest), [jnp.ones((2, 3)), jnp.zeros(1)])


@pytest.mark.parametrize("accept", [lambda path: path[-1] == "scale", lambda path: True, lambda path: False])
def test_merging_inverts_splitting(accept):
    chosen, rest = jax.jit(lambda tree: trees.split_by_path(tree, accept))(parameters())
    for part in (trees.merge(chosen, rest), trees.merge(rest, chosen)):
        chex.assert_trees_all_equal(part, parameters())
    doubled = jax.tree.map(jnp.add, chosen, chosen)
    assert len(jax.tree.leaves(doubled)) == len(jax.tree.leaves(chosen))


def test_a_tree_that_is_one_leaf_has_an_empty_path():
    chosen, rest = trees.split_by_path(jnp.ones(3), lambda path: path == ())
    assert rest is None
    chex.assert_trees_all_equal(trees.merge(chosen, rest), jnp.ones(3))


def test_leaves_that_are_kept_apart_are_not_concatenated():
    tree = {"a": jnp.ones((2, 3)), "b": jnp.array([1.0, jnp.inf])}
    with trees.leaves_apart(True):
        packed = trees.pack(tree)
        assert [v.shape for v in packed.vectors] == [(2, 3), (2,)]
        assert not trees.all_finite(tree)
    assert len(trees.pack(tree).vectors) == 1
    assert jax.tree.structure(packed.unpack()) == jax.tree.structure(tree)


CLIENTS = 100_000
NUMBERS = (CLIENTS, pytest.param(1_000_000, marks=pytest.mark.slow))
ACCURATE = 1e-6


def values(kind: str, columns: int = 3, clients: int = CLIENTS) -> np.ndarray:
    """One row of float32 for each client."""
    if kind == "equal":
        return np.full((clients, columns), 0.1, np.float32)
    return np.random.default_rng(0).lognormal(sigma=2, size=(clients, columns)).astype(np.float32)


def error(found: Any, terms: np.ndarray) -> float:
    want = terms.astype(np.float64).sum(axis=0)
    return float(np.abs(np.asarray(found, np.float64) / want - 1).max())


@pytest.mark.parametrize(("kind", "block"), [("equal", 1), ("equal", 128), ("lognormal", 128), ("equal", CLIENTS)])
@pytest.mark.parametrize("clients", NUMBERS)
def test_a_cohort_s_sums_are_accurate(kind: str, block: int, clients: int):
    data = values(kind, clients=clients)

    def one(shared: None, present: jax.Array, state: tuple[()], row: jax.Array) -> Outcome:
        return Outcome((), (jnp.where(present, row, 0), present.astype(jnp.int32)), ())

    @jax.jit
    def summed(data: jax.Array) -> Any:
        rows = jnp.arange(clients, dtype=jnp.int32)
        return run_cohort(one, None, rows, (), data, num_clients=clients, block=block, everyone=True).summed

    total, number = summed(data)
    assert total.dtype == jnp.float32
    assert error(total, data) < ACCURATE
    assert number == clients


def test_a_plain_loop_is_not_accurate():
    data = values("equal")
    total = jax.jit(lambda data: jax.lax.fori_loop(0, CLIENTS, lambda i, s: s + data[i], jnp.zeros(3)))(data)
    assert error(total, data) > 100 * ACCURATE


@pytest.mark.parametrize("last", [np.inf, -np.inf, np.nan])
def test_a_running_sum_that_is_not_finite_stays_so(last: float):
    terms = jnp.array([1.0, last, 2.0, 3.0], jnp.float32)
    sums = RunningSum.zero(terms[0])
    for term in terms:
        sums = sums.plus(term)
    np.testing.assert_equal(np.asarray(sums.total), np.float32(last))


@pytest.mark.parametrize(
    ("kind", "k", "d"), [("equal", None, 3), ("equal", 1, 3), ("lognormal", 2, 2), ("lognormal", 8, 50)]
)
@pytest.mark.parametrize("clients", NUMBERS)
def test_products_over_clients_are_accurate(kind: str, k: int | None, d: int, clients: int):
    weights = values(kind, k or 1, clients)
    rows = np.random.default_rng(1).uniform(size=(clients, d)).astype(np.float32)
    found = jax.jit(trees.sum_products)(jnp.asarray(weights[:, 0] if k is None else weights), jnp.asarray(rows))
    want = weights.astype(np.float64).T @ rows.astype(np.float64)
    want = want[0] if k is None else want
    assert found.shape == want.shape
    assert np.abs(found / want - 1).max() < ACCURATE


@pytest.mark.parametrize("m", [1, 31, 32, 33, 100])
def test_products_of_any_number_of_rows(m: int):
    rng = np.random.default_rng(m)
    weights, rows = rng.normal(size=(m, 2)).astype(np.float32), rng.normal(size=(m, 3)).astype(np.float32)
    found = trees.sum_products(jnp.asarray(weights), jnp.asarray(rows))
    np.testing.assert_allclose(found, weights.T @ rows, rtol=1e-4, atol=1e-5)


def test_the_mean_of_many_users_histograms_is_accurate():
    rng = np.random.default_rng(0)
    tokens = np.stack([np.zeros(CLIENTS, int), rng.integers(1, 4, CLIENTS)], axis=1)
    counts = rng.integers(1, 9, (CLIENTS, 2))
    users = histograms.from_sparse(np.arange(CLIENTS + 1) * 2, tokens.ravel(), counts.ravel(), 4, 8)
    want = np.zeros((CLIENTS, 4))
    np.put_along_axis(want, tokens, counts / counts.sum(axis=1, keepdims=True), axis=1)
    assert np.abs(jax.jit(histograms.mean)(users) / want.mean(axis=0) - 1).max() < ACCURATE


def test_bits_of_many_uploads_are_counted_exactly():
    clients = 600_000  # the sum of their low parts is beyond int32
    before = Counts.zeros(clients)
    bits = np.full(clients, 4095 + 12 * 4096, np.int32)
    plus = jax.jit(lambda counts, bits: counts.plus(jax.vmap(lambda b: Counts.row(upload_bits=b))(bits)))
    after = plus(before, bits)
    assert whole(*after.upload_bits_since(before)) == bits.sum(dtype=np.int64)
    again = plus(after, bits - 4000)
    assert whole(*again.upload_bits_since(after)) == (bits - 4000).sum(dtype=np.int64)
