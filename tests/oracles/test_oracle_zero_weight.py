"""``mean = sum_i w_i d_i / sum_i w_i``, and 0 where nobody has weight: adding it changes no server."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.core import trees
from jaxpfl.core.protocol import Reduced


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def server() -> dict[str, jax.Array]:
    return {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(2)}


def test_no_weight_leaves_the_server_unchanged():
    nothing = jax.tree.map(jnp.zeros_like, server())
    mean = Reduced(nothing, jnp.zeros(()), jnp.int32(3)).mean()
    after = jax.tree.map(jnp.add, server(), mean)
    jax.tree.map(np.testing.assert_array_equal, after, server())


def test_a_client_of_weight_zero_counts_for_nothing():
    """``(2 d_1 + 0 d_2 + 3 d_3) / (2 + 0 + 3)``."""
    rng = np.random.default_rng(0)
    d, w = rng.normal(size=(3, 2, 3)), np.array([2.0, 0, 3])
    total = jnp.asarray(np.einsum("i,ijk->jk", w, d))
    mean = Reduced({"w": total}, jnp.asarray(w.sum()), jnp.int32(3)).mean()
    np.testing.assert_allclose(mean["w"], (2 * d[0] + 3 * d[2]) / 5, rtol=1e-14)


def test_the_mean_is_by_weight_not_by_count():
    for count in (0, 1, 7):
        mean = Reduced(jnp.array([6.0]), jnp.array(4.0), jnp.int32(count)).mean()
        np.testing.assert_array_equal(mean, [1.5])


def test_prefix_weights():
    """A weight [k] divides the leading axis of every leaf below it (IFCA: an empty cluster stays)."""
    total = {"centers": {"w": jnp.ones((3, 2, 2)), "b": 6 * jnp.ones(3)}, "psi": jnp.array(5.0)}
    weight = {"centers": jnp.array([2.0, 0, 4]), "psi": jnp.array(0.0)}
    got = trees.prefix_divide(total, weight)
    expected = np.array([0.5, 0, 0.25])
    np.testing.assert_array_equal(got["centers"]["w"], np.broadcast_to(expected[:, None, None], (3, 2, 2)))
    np.testing.assert_array_equal(got["centers"]["b"], 6 * expected)
    assert got["psi"] == 0


def test_prefix_weights_keep_the_leaf_type():
    total = {"w": jnp.ones((2, 3), jnp.float32)}
    assert trees.prefix_divide(total, jnp.float64(3.0))["w"].dtype == jnp.float32


def test_no_upload_at_all():
    assert Reduced((), (), jnp.int32(2)).mean() == ()


def test_zero_weight_has_a_zero_gradient():
    """``d mean / d total = 0`` at weight 0, not NaN (the division is guarded in front, not behind)."""
    gradient = jax.grad(lambda w: trees.prefix_divide(jnp.zeros(2), w).sum())(0.0)
    assert gradient == 0
