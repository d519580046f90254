"""Residual networks against the same networks of flax's layers in the usual layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxpfl.models import ResNet, build_model, from_linen
from jaxpfl.models.layers import EPSILON
from jaxpfl.support.errors import JaxpflError

# Runs once: compiling is what takes the time.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
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
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(2), len(leaves))
        noise = [jax.random.normal(key, leaf.shape) / 4 for key, leaf in zip(keys, leaves, strict=True)]
        params = jax.tree.unflatten(structure, [leaf + more for leaf, more in zip(leaves, noise, strict=True)])

        def logits_and_gradients(model):
            def loss(params, x):
                logits = model.apply(params, x)
                return jnp.sum(jnp.sin(logits)), logits

            return jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)

        results = (logits_and_gradients(model) for model in (ours, usual))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9), *results)


def test_depth_is_the_number_of_layers():
    """Convolutions of the main path and the dense layer: 6 n + 2."""
    for depth in (8, 14):
        model = build_model(f"resnet:{depth}", 10, (8, 8, 3))
        params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8, 8, 3)))
        kernels = [p for p, _ in jax.tree.leaves_with_path(params) if p[-1].key == "kernel" and p[-2].key != "shortcut"]
        assert len(kernels) == depth


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("resnet", (80,), r"needs images .* 4 x 4, got \(80,\)"),
        ("resnet18", (7, 8, 3), r"8 x 8, got \(7, 8, 3\)"),
        ("resnet:18", (8, 8), r"6 n \+ 2 layers .* got 18; see also 'resnet18'"),
        ("resnet:2", (8, 8), "got 2"),
        ("resnet:8,8", (8, 8), "one number, its depth, got 8,8"),
        ("resnet:x", (8, 8), "takes integers as in 'resnet:20'"),
        ("resnet18:2", (8, 8), "takes no numbers"),
        ("resnet8", (8, 8), "did you mean 'resnet18'|did you mean 'resnet'"),
    ],
)
def test_refusals(name, shape, message):
    with pytest.raises(JaxpflError, match=message) as error:
        build_model(name, 10, shape)
    assert "\n" not in str(error.value)
