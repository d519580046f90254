"""Operations counted in traced programs, against counts by hand."""

import jax
import jax.numpy as jnp
import pytest

from jaxpfl.benchmarks.cost_model.count import Product, work_of

A, B = jax.ShapeDtypeStruct((3, 5), "float32"), jax.ShapeDtypeStruct((5, 7), "float32")


def test_products_count_their_multiplications_and_additions() -> None:
    assert work_of(lambda a, b: a @ b, A, B).products == {Product(1, 3, 5, 7): 1}
    assert work_of(lambda a, b: a @ b, A, B).flops == 2 * 3 * 5 * 7
    many = jax.ShapeDtypeStruct((4, 3, 5), "float32"), jax.ShapeDtypeStruct((4, 5, 7), "float32")
    assert work_of(jnp.matmul, *many).products == {Product(4, 3, 5, 7): 1}
    turned = jnp.zeros((5, 3)), jnp.zeros((7, 5))
    assert work_of(lambda a, b: a.T @ b.T, *turned).products == {Product(1, 3, 5, 7): 1}  # a transpose is a copy
    summed = (((0,), (1,)), ((), ()))
    assert work_of(lambda a, b: jax.lax.dot_general(a, b, summed), *turned).products == {
        Product(1, 3, 5, 7, True, True): 1
    }


def test_a_loop_counts_as_often_as_it_runs() -> None:
    def loop(a, b):
        return jax.lax.fori_loop(0, 6, lambda _, b: b + a.T @ (a @ b), b)

    assert work_of(loop, A, B).flops == 6 * 2 * (2 * 3 * 5 * 7)
    assert work_of(jax.jit(jax.vmap(loop, (None, None), axis_size=2)), A, B).flops == 6 * 2 * (2 * 3 * 5 * 7)


def test_a_choice_counts_as_its_dearest_branch() -> None:
    def choose(which, a, b):
        return jax.lax.cond(which, lambda: a @ b, lambda: jnp.zeros((3, 7)))

    assert work_of(choose, jax.ShapeDtypeStruct((), "bool"), A, B).flops == 2 * 3 * 5 * 7


def test_results_that_nobody_reads_do_not_count() -> None:
    def gradient_of_weights(a, b):
        return jax.grad(lambda a, b: (a @ b).sum(), argnums=1)(a, b)

    assert work_of(gradient_of_weights, A, B).flops == 2 * 3 * 5 * 7  # neither a's gradient nor the product itself

    @jax.jit
    def both(a, b):
        return a @ b, a.T @ (a @ b)

    assert work_of(lambda a, b: both(a, b)[0], A, B).flops == 2 * 3 * 5 * 7


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_counts_as_the_product_with_its_patches(groups: int) -> None:
    x, kernel = jax.ShapeDtypeStruct((8, 12, 12, 4), "float32"), jax.ShapeDtypeStruct((3, 3, 4 // groups, 6), "float32")

    def conv(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
        )

    assert work_of(conv, x, kernel).flops == 2 * (8 * 10 * 10 * 6) * (3 * 3 * 4 // groups)
