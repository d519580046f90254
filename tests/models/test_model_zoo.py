"""The registry: sizes of the papers' networks, initialisation, heads, refusals."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.errors import JaxpflError
from jaxpfl.models import available, build_model, classification

PARAMETERS = [
    ("linear", (28, 28, 1), 10, 7_850),
    ("mlp", (8, 8), 10, 64 * 64 + 64 + 650),
    ("mlp:128,64", (8, 8), 10, 64 * 128 + 128 + 128 * 64 + 64 + 650),
    ("mlp-persfl", (28, 28), 10, 79_510),
    ("cnn", (28, 28, 1), 10, 44_426),
    ("cnn", (32, 32, 3), 10, 62_006),
    ("cnn-cifar100", (32, 32, 3), 100, 4_864 + 102_464 + 1600 * 384 + 384 + 384 * 192 + 192 + 19_300),
]
EXAMPLES = {name: (shape, classes) for name, shape, classes, _ in PARAMETERS}


@functools.cache
def initialised(name):
    shape, classes = EXAMPLES[name]
    model = build_model(name, classes, shape)
    return model, jax.jit(classification(model, shape, classes).init)(jax.random.key(0))


def paths(params):
    return [tuple(str(entry.key) for entry in path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def test_every_name_is_covered_here():
    assert set(available()) <= set(EXAMPLES)


@pytest.mark.parametrize(("name", "shape", "classes", "count"), PARAMETERS)
def test_parameter_count(name, shape, classes, count):
    task = classification(build_model(name, classes, shape), shape, classes)
    params = jax.eval_shape(task.init, jax.random.key(0))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == count


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_logits_under_jit_and_vmap(name):
    shape, classes = EXAMPLES[name]
    model, params = initialised(name)
    x = jnp.ones((3, *shape))
    clients = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), params)
    logits = jax.jit(jax.vmap(model.apply))(clients, np.stack([x, x]))
    assert logits.shape == (2, 3, classes)
    np.testing.assert_allclose(logits[1], jax.jit(model.apply)(params, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_head_is_exactly_the_last_layer(name):
    model, params = initialised(name)
    assert model.head is not None
    assert {path for path in paths(params) if model.head(path)} == {("head", "kernel"), ("head", "bias")}


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_initialisation_fills_its_bounds(name):
    _, params = initialised(name)
    for layer in params.values():
        bound = math.prod(layer["kernel"].shape[:-1]) ** -0.5
        for leaf in layer.values():
            assert np.abs(leaf).max() <= bound
        kernel = np.asarray(layer["kernel"]).ravel()
        # Uniform on (-b, b): variance b^2 / 3; the mean of n squares has standard error b^2 sqrt(4 / 45 n).
        assert abs(np.mean(kernel**2) - bound**2 / 3) < 5 * bound**2 * math.sqrt(4 / (45 * kernel.size))


@pytest.mark.parametrize(("name", "expected"), [("mlp", (64,)), ("mlp:7,3", (7, 3)), ("mlp-persfl", (100,))])
def test_hidden_widths(name, expected):
    params = build_model(name, 4, (5,)).init(jax.random.key(0), jnp.zeros((1, 5)))
    assert tuple(params[f"dense{i}"]["bias"].size for i in range(len(expected))) == expected


def test_mlp_equals_the_formula():
    model = build_model("mlp:7,3", 4, (2, 5))
    x = jax.random.normal(jax.random.key(1), (6, 2, 5))
    params = model.init(jax.random.key(0), x)
    h = x.reshape(6, 10)
    for name in ("dense0", "dense1"):
        h = jnp.maximum(h @ params[name]["kernel"] + params[name]["bias"], 0)
    expected = h @ params["head"]["kernel"] + params["head"]["bias"]
    np.testing.assert_allclose(model.apply(params, x), expected, rtol=1e-6)


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(JaxpflError, match="did you mean 'cnn'"):
        build_model("cn", 10, (28, 28))


@pytest.mark.parametrize("name", ["mlp:", "mlp:a", "mlp:12,-3", "mlp:0", "cnn:3"])
def test_bad_argument(name):
    with pytest.raises(JaxpflError):
        build_model(name, 10, (28, 28))


def test_too_small_an_image_names_shape_and_minimum():
    with pytest.raises(JaxpflError, match=r"16 x 16, got \(8, 8\)"):
        build_model("cnn", 10, (8, 8))
    model = build_model("cnn", 10, (16, 16))
    jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 16, 16)))
    with pytest.raises(JaxpflError, match=r"got \(15, 16\)"):
        model.init(jax.random.key(0), jnp.zeros((1, 15, 16)))
