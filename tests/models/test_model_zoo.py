"""Every registered model: parameters, logits, heads, norms; the residual network against its equations."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from jaxpfl.models import available, build_model, classification, from_linen
from jaxpfl.models.images import ResNet
from jaxpfl.models.layers import EPSILON

PARAMETERS = [
    ("linear", (28, 28, 1), 10, 7_850),
    ("mlp", (8, 8), 10, 64 * 64 + 64 + 650),
    ("mlp:128,64", (8, 8), 10, 64 * 128 + 128 + 128 * 64 + 64 + 650),
    ("mlp-persfl", (28, 28), 10, 79_510),
    ("cnn", (28, 28, 1), 10, 44_426),
    ("cnn", (32, 32, 3), 10, 62_006),
    ("cnn-cifar100", (32, 32, 3), 100, 4_864 + 102_464 + 1600 * 384 + 384 + 384 * 192 + 192 + 19_300),
    ("mlp-ln", (8, 8), 10, 64 * 64 + 64 + 2 * 64 + 650),
    ("cnn-fedavg", (28, 28, 1), 10, 582_026),
    ("cnn-gn", (28, 28, 1), 10, 44_426 - 22 + 2 * 22),
    ("cnn-bn", (28, 28, 1), 10, 44_426 - 22 + 2 * 22 + 2 * 22),
    ("mlp-bn", (8, 8), 10, 64 * 64 + 64 + 2 * 64 + 2 * 64 + 650),
    ("resnet-bn", (32, 32, 3), 10, 78_042 + 2 * (16 + 2 * 16 + 3 * 32 + 3 * 64)),
    ("resnet", (32, 32, 3), 10, 78_042),
    ("resnet:20", (32, 32, 3), 10, 272_474),
    ("resnet18", (32, 32, 3), 10, 11_173_962),
    ("gru", (80,), 80, 80 * 8 + 3 * (8 + 128) * 128 + 4 * 128 + 129 * 80),
    ("transformer", (80,), 80, 80 * 64 + 2 * (4 * 64 * 65 + 65 * 256 + 257 * 64 + 4 * 64) + 2 * 64 + 65 * 80),
]
# What is run here, not only counted, is run on small images.
SMALL = {"cnn": (16, 16, 1), "cnn-gn": (16, 16, 1), "resnet": (8, 8, 3), "transformer": (5,)}
TOKENS = {"gru", "transformer"}
NORMALISED = {"mlp-ln", "mlp-bn", "cnn-gn", "cnn-bn", "resnet", "resnet:20", "resnet-bn", "resnet18", "transformer"}
EXAMPLES = {name: (SMALL.get(name, shape), classes) for name, shape, classes, _ in PARAMETERS}
EXAMPLES |= {"mlp-bn:8": ((8,), 10), "transformer:8,1,2": ((5,), 10)}
RUN = ("cnn", "cnn-gn", "mlp-bn:8", "resnet", "transformer:8,1,2")
"""Models whose parameters are drawn here: every kind of layer is in one of them."""


# Runs once: compiling is what takes the time.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def input_dtype(name):
    return jnp.int32 if name.partition(":")[0] in TOKENS else None


@functools.cache
def initialised(name):
    shape, classes = EXAMPLES[name]
    model = build_model(name, classes, shape)
    return model, jit(classification(model, shape, classes, input_dtype(name)).init)(jax.random.key(0))


def leaves(params):
    """Each parameter by its path."""
    return {tuple(str(entry.key) for entry in path): leaf for path, leaf in jax.tree.leaves_with_path(params)}


def test_every_name_is_covered_here():
    assert set(available()) <= set(EXAMPLES)


def norm_parameters(model, params):
    return {path: leaf for path, leaf in leaves(params).items() if model.norm(path) and path[0] != "batch_stats"}


@pytest.mark.parametrize(("name", "shape", "classes", "count"), PARAMETERS)
def test_parameters_with_the_last_layer_as_head(name, shape, classes, count):
    model = build_model(name, classes, shape)
    params = jax.eval_shape(classification(model, shape, classes, input_dtype(name)).init, jax.random.key(0))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == count
    assert model.head is not None
    assert {path for path in leaves(params) if model.head(path)} == {("head", "kernel"), ("head", "bias")}
    scales = {path[:-1] for path in leaves(params) if path[-1] == "scale"}
    assert (model.norm is not None) == bool(scales) == (name in NORMALISED)
    if model.norm is not None:
        assert norm_parameters(model, params).keys() == {(*p, which) for p in scales for which in ("scale", "bias")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_logits_under_jit_and_vmap(name):
    shape, classes = EXAMPLES[name]
    model, params = initialised(name)
    x = jnp.ones((3, *shape), input_dtype(name))
    clients = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), params)
    logits = jit(jax.vmap(model.apply))(clients, np.stack([x, x]))
    assert logits.shape == (2, 3, classes)
    np.testing.assert_allclose(logits[1], jit(model.apply)(params, x), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_initialisation_fills_its_bounds_and_norms_start_at_one_and_zero(name):
    model, params = initialised(name)
    for path, leaf in norm_parameters(model, params).items() if model.norm else ():
        np.testing.assert_array_equal(leaf, 1.0 if path[-1] == "scale" else 0.0)
    for path, kernel in leaves(params).items():
        if path[-1] != "kernel":
            continue
        bound = math.prod(kernel.shape[:-1]) ** -0.5
        bias = leaves(params).get((*path[:-1], "bias"), np.zeros(()))
        assert max(np.abs(kernel).max(), np.abs(bias).max()) <= bound
        # Uniform on (-b, b): variance b^2 / 3; the mean of n squares has standard error b^2 sqrt(4 / 45 n).
        squares = np.mean(np.square(kernel, dtype=float))
        assert abs(squares - bound**2 / 3) < 5 * bound**2 * math.sqrt(4 / (45 * kernel.size))


def test_mlp_equals_the_formula():
    model = build_model("mlp:7,3", 4, (2, 5))
    x = jax.random.normal(jax.random.key(1), (6, 2, 5))
    params = jax.tree.map(np.asarray, jit(model.init)(jax.random.key(0), x))
    h = np.asarray(x).reshape(6, 10)
    for name in ("dense0", "dense1"):
        h = np.maximum(h @ params[name]["kernel"] + params[name]["bias"], 0)
    expected = h @ params["head"]["kernel"] + params["head"]["bias"]
    np.testing.assert_allclose(jit(model.apply)(params, x), expected, rtol=1e-6)


Conv = functools.partial(nn.Conv, use_bias=False, padding="SAME")
Norm = functools.partial(nn.GroupNorm, 2, epsilon=EPSILON)


class UsualBlock(nn.Module):
    features: int
    stride: int

    @nn.compact
    def __call__(self, x):
        y = nn.relu(Norm(name="norm0")(Conv(self.features, (3, 3), self.stride, name="conv0")(x)))
        y = Norm(name="norm1")(Conv(self.features, (3, 3), name="conv1")(y))
        if self.stride > 1 or x.shape[-1] != self.features:
            x = Norm(name="norm_shortcut")(Conv(self.features, (1, 1), self.stride, name="shortcut")(x))
        return nn.relu(y + x)


class Usual(nn.Module):
    """[N, H, W, C] throughout; parameters of the same names."""

    num_classes: int
    widths: tuple[int, ...]
    blocks: int

    @nn.compact
    def __call__(self, x):
        x = nn.relu(Norm(name="norm0")(Conv(self.widths[0], (3, 3), name="conv0")(x)))
        for stage, width in enumerate(self.widths):
            for i in range(self.blocks):
                x = UsualBlock(width, 2 if stage > 0 and i == 0 else 1, name=f"stage{stage}_block{i}")(x)
        return nn.Dense(self.num_classes, name="head")(x.mean(axis=(1, 2)))


@pytest.mark.slow
def test_logits_and_gradients_in_float64():
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(1), (2, 5, 4, 2), jnp.float64)
        ours, usual = (from_linen(module(5, (2, 4), 2)) for module in (ResNet, Usual))
        params = jit(ours.init)(jax.random.key(0), x)
        # Scales and biases that are all alike would hide one taken for another.
        noise = optax.tree.random_like(jax.random.key(2), params)
        params = jax.tree.map(lambda leaf, more: leaf + more / 4, params, noise)

        def loss(params, x, model):
            logits = model.apply(params, x)
            return jnp.sum(jnp.sin(logits)), logits

        gradients = jit(jax.grad(loss, argnums=(0, 1), has_aux=True), static_argnums=2)
        results = (gradients(params, x, model) for model in (ours, usual))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9), *results)
