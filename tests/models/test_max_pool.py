"""Max-pooling against ``lax.reduce_window``: values, and who gets the gradient when values tie."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpfl.models.convolution import max_pool


def reference(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def check(x):
    cotangent = np.random.default_rng(0).normal(size=reference(x).shape).astype(x.dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def value_and_gradient(pool, x):
        y, pull = jax.vjp(pool, x)
        return y, pull(cotangent)[0]

    ours, theirs = value_and_gradient(max_pool, x), value_and_gradient(reference, x)
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_array_equal(ours[1], theirs[1])


@pytest.mark.parametrize("sides", [(8, 8), (7, 9), (2, 3), (5, 2)])
def test_distinct_values_and_odd_sizes(sides):
    check(jax.random.normal(jax.random.key(0), (3, *sides, 4)))


@pytest.mark.parametrize("sides", [(8, 8), (7, 9)])
def test_planted_ties(sides):
    """Three levels only: every pattern of ties within a window occurs."""
    check(jax.random.randint(jax.random.key(0), (4, *sides, 16), 0, 3).astype(jnp.float32))


@pytest.mark.parametrize("value", [0.0, -1.5])
def test_all_equal(value):
    check(jnp.full((2, 6, 6, 3), value))


def test_blank_borders():
    check(jnp.zeros((2, 10, 10, 3)).at[:, 3:7, 3:7].set(jax.random.normal(jax.random.key(0), (2, 4, 4, 3))))


def test_all_sixteen_patterns_of_ties():
    patterns = (np.arange(16)[:, None] >> np.arange(4)) % 2
    check(jnp.asarray(patterns.T.reshape(1, 2, 2, 16), jnp.float32))


def test_float64():
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(0), (2, 6, 6, 3), jnp.float64)
        check(x)
        assert max_pool(x).dtype == jnp.float64


def test_vmap():
    x = jax.random.randint(jax.random.key(0), (3, 2, 6, 6, 4), 0, 3).astype(jnp.float32)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(max_pool(x) ** 2)))
    np.testing.assert_array_equal(jax.jit(jax.vmap(gradient))(x), jnp.stack([gradient(client) for client in x]))
