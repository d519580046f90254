"""Sums over devices as one vector: those of each array, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpfl.core import trees
from jaxpfl.engine.cohort import all_summed

pytestmark = pytest.mark.usefixtures("two_devices")

LARGE = np.array([[2**31 - 1, -(2**31), 2**24 + 1, -1, 0, 2**22], [1, -1, 2**24 + 1, 2**30 + 7, -5, 2**22]], np.int32)
"""Numbers that no float32 holds, also beyond int32 together."""


def summed(how, tree):
    mesh = Mesh(np.array(jax.devices()[:2]), ("clients",))
    spread = jax.shard_map(lambda t: how(t, "clients"), mesh=mesh, in_specs=P("clients"), out_specs=P())
    program = jax.jit(spread)
    return program(tree), str(jax.make_jaxpr(spread)(tree)).count("psum")


@pytest.mark.parametrize("doubles", [False, True])
def test_one_vector_gives_the_sums_of_all_arrays(doubles):
    rng = np.random.default_rng(0)
    with jax.enable_x64(doubles):
        tree = {
            "counts": jnp.asarray(LARGE),
            "upload": jnp.asarray(rng.normal(size=(2, 3, 4)), jnp.float64 if doubles else jnp.float32),
            "count": jnp.array([3, 4], jnp.int32),
            "not a number": jnp.array([np.nan, np.inf], jnp.float32),
        }
        got, vectors = summed(all_summed, tree)
        want, _ = summed(jax.lax.psum, tree)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert vectors == 1 + doubles  # one of each type


def test_leaves_in_parts_and_whole_numbers_alone_are_not_joined():
    counts = {"counts": jnp.asarray(LARGE), "count": jnp.array([3, 4], jnp.int32)}
    np.testing.assert_array_equal(
        summed(all_summed, counts)[0]["counts"], LARGE.sum(axis=0, keepdims=True, dtype=np.int32)
    )
    with trees.leaves_apart():
        found, _ = summed(all_summed, counts | {"upload": jnp.ones((2, 3))})
    np.testing.assert_array_equal(found["upload"], 2 * np.ones((1, 3)))
