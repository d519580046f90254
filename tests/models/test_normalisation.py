"""Group and layer normalisation against flax's: values, gradients, names of parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxpfl.models.layers import EPSILON, GroupNorm, LayerNorm, group_norm

CHANNELS = 6


class FeaturesFirst(nn.Module):
    """`GroupNorm` on [N, ..., C], to be held against flax's."""

    groups: int

    @nn.compact
    def __call__(self, x):
        return jnp.moveaxis(GroupNorm(self.groups, name="norm")(jnp.moveaxis(x, (0, -1), (-1, 0))), (0, -1), (-1, 0))


class Flax(nn.Module):
    groups: int

    @nn.compact
    def __call__(self, x):
        return nn.GroupNorm(self.groups, epsilon=EPSILON, name="norm")(x)


def close(ours, theirs, rtol):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * jnp.abs(b).max()), ours, theirs)


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(module, variables, x, cotangent):
    y, pull = jax.vjp(module.apply, variables, x)
    return y, pull(cotangent)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("places", "groups", "dtype", "rtol"),
    [((4, 5), 2, "float64", 1e-9), ((), 6, "float64", 1e-9), ((4, 5), 1, "float32", 1e-5)],
)
def test_group_norm_equals_flax(places, groups, dtype, rtol):
    with jax.enable_x64(dtype == "float64"):
        rng = np.random.default_rng(0)
        x, cotangent = (jnp.asarray(rng.normal(2, 3, (3, *places, CHANNELS)), dtype) for _ in range(2))
        variables = {"params": {"norm": {n: jnp.asarray(rng.normal(size=CHANNELS), dtype) for n in ("scale", "bias")}}}
        started = FeaturesFirst(groups).init(jax.random.key(0), x)
        close(started, Flax(groups).init(jax.random.key(0), x), 0)
        assert {leaf.dtype for leaf in jax.tree.leaves(started)} == {jnp.dtype(dtype)}
        ours, theirs = (value_and_gradients(m, variables, x, cotangent) for m in (FeaturesFirst(groups), Flax(groups)))
        close(ours, theirs, rtol)


def test_layer_norm_equals_flax():
    x = jax.random.normal(jax.random.key(0), (4, CHANNELS)) * 3 + 1
    modules = LayerNorm(), nn.LayerNorm(epsilon=EPSILON)
    ours, theirs = (module.init(jax.random.key(0), x) for module in modules)
    close(ours, theirs, 0)
    variables = {"params": {"scale": jnp.arange(1.0, 7.0), "bias": jnp.arange(6.0)}}
    cotangent = jnp.sin(jnp.arange(24.0)).reshape(x.shape)
    ours, theirs = (value_and_gradients(module, variables, x, cotangent) for module in modules)
    close(ours, theirs, 1e-5)


def test_a_large_common_value_does_not_drown_the_variance():
    """By the difference of two moments the variance would be lost: 1e4 squared has no room for 1 in float32."""
    x = np.random.default_rng(0).normal(size=(CHANNELS, 8, 8, 2)).astype(np.float32)
    plain, shifted = (group_norm(jnp.asarray(z), jnp.ones(CHANNELS), jnp.zeros(CHANNELS), 2) for z in (x, x + 1e4))
    np.testing.assert_allclose(shifted, plain, atol=1e-2)


def test_an_example_of_equal_values_has_a_finite_gradient():
    gradient = jax.grad(lambda x: jnp.sum(group_norm(x, jnp.ones(4), jnp.zeros(4), 2) ** 3))(jnp.ones((4, 3, 3, 2)))
    assert jnp.isfinite(gradient).all()
