"""Trees as vectors: packing keeps every leaf, its type and its place."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import trees


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
