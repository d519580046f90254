"""Trees as vectors: packing keeps every leaf, its type and its place."""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.core import trees


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
    with trees.leaves_apart():
        packed = trees.pack(tree)
        assert [v.shape for v in packed.vectors] == [(2, 3), (2,)]
        assert not trees.all_finite(tree)
    assert len(trees.pack(tree).vectors) == 1
    assert jax.tree.structure(packed.unpack()) == jax.tree.structure(tree)
