"""The product by columns that narrow layers use equals the plain product, and so do its gradients."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import pytest

from jaxpfl.models.layers import dense


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [1, 2, 4, 5])
@pytest.mark.parametrize("clients", [None, 3])
def test_value_and_gradients_are_those_of_the_plain_product(outputs, clients):
    shape = () if clients is None else (clients,)
    kx, kk, kg = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(kx, (*shape, 7, 6))
    kernel = jax.random.normal(kk, (*shape, 6, outputs))
    g = jax.random.normal(kg, (*shape, 7, outputs))

    def pulled(product):
        def one(x, kernel, g):
            value, pull = jax.vjp(product, x, kernel)
            return value, pull(g)

        return (one if clients is None else jax.vmap(one))(x, kernel, g)

    chex.assert_trees_all_close(pulled(dense), pulled(jnp.matmul), rtol=1e-5, atol=1e-6)


def test_a_gradient_can_be_differentiated_forward():
    x, kernel = jnp.ones((3, 2)), jnp.array([[0.5], [-1.0]])
    gradient = jax.grad(lambda k: jnp.sum(dense(x, k) ** 3))
    direction = jnp.ones_like(kernel)
    product = jax.jit(lambda: jax.jvp(gradient, (kernel,), (direction,))[1])()
    expected = jax.jit(jax.hessian(lambda k: jnp.sum((x @ k) ** 3)))(kernel).reshape(2, 2) @ direction
    chex.assert_trees_all_close(product, expected, rtol=1e-5)
