"""The whole CNN against the same network written with ``lax`` in the usual order and layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpfl.models import build_model, classification

CASES = [
    ("cnn", (28, 28, 1), 10),
    pytest.param("cnn", (32, 32, 3), 10, marks=pytest.mark.slow),
    pytest.param("cnn-cifar100", (32, 32, 3), 20, marks=pytest.mark.slow),
    pytest.param("cnn", (19, 21, 2), 5, marks=pytest.mark.slow),
]


def reference(params, x):
    """conv - bias - relu - pool in NHWC; the dense layers see channels first, as PyTorch flattens."""
    for name in ("conv0", "conv1"):
        kernel, bias = params[name]["kernel"], params[name]["bias"]
        x = lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = lax.reduce_window(jax.nn.relu(x + bias), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1)
    for name in ("dense0", "dense1"):
        x = jax.nn.relu(x @ params[name]["kernel"] + params[name]["bias"])
    return x @ params["head"]["kernel"] + params["head"]["bias"]


@pytest.mark.parametrize(("name", "shape", "classes"), CASES)
def test_logits_and_gradients_in_float64(name, shape, classes):
    with jax.enable_x64(True):
        task = classification(build_model(name, classes, shape), shape, classes)
        params = jax.jit(task.init)(jax.random.key(0))
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float64")}
        x = jax.random.normal(jax.random.key(1), (3, *shape), jnp.float64)
        y = jnp.arange(3) % classes

        @functools.partial(jax.jit, static_argnums=0)
        def logits_and_gradients(apply, params, x):
            def loss(params, x):
                logits = apply(params, x)
                return task.loss(logits, y).mean(), logits

            return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

        ours = logits_and_gradients(task.model.apply, params, x)
        theirs = logits_and_gradients(reference, params, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), ours, theirs)


def test_missing_channel_axis_is_added():
    model = build_model("cnn", 10, (28, 28))
    x = jax.random.normal(jax.random.key(1), (2, 28, 28))
    params, apply = jax.jit(model.init)(jax.random.key(0), x), jax.jit(model.apply)
    np.testing.assert_array_equal(apply(params, x), apply(params, x[..., None]))


def test_integer_images_are_converted():
    model = build_model("cnn", 10, (28, 28))
    x = jax.random.randint(jax.random.key(1), (2, 28, 28), 0, 256).astype(jnp.uint8)
    params, apply = jax.jit(model.init)(jax.random.key(0), x), jax.jit(model.apply)
    np.testing.assert_array_equal(apply(params, x), apply(params, x.astype(jnp.float32)))
