"""Convolutions and pools of a user's own modules as products: equal to the plain form, named where they stay plain."""

import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxpfl
from jaxpfl import ExecutionPlan, Model, fit, from_equinox, from_nnx
from jaxpfl.engine.tasks import make_task
from jaxpfl.models import from_linen
from jaxpfl.models.rewriting import Exchanged, form, layers
from jaxpfl.support.errors import JaxpflWarning

CLIENTS, BATCH = 3, 2


class Net(nn.Module):
    """One convolution, then what the letters say, then a dense layer."""

    conv: dict
    after: str = ""
    pool: dict | None = None
    outputs: int = 3

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, **self.conv)(x)
        for letter in self.after:
            x = {"r": nn.relu, "t": jnp.tanh, "m": self.halved, "2": lambda x: x + nn.relu(x)}[letter](x)
        if self.pool:
            pool = dict(self.pool)
            x = getattr(nn, pool.pop("kind"))(x, **pool)
        return nn.Dense(self.outputs)(x.reshape(x.shape[0], -1))

    @staticmethod
    def halved(x):
        return nn.max_pool(x, (2,) * (x.ndim - 2), (2,) * (x.ndim - 2))


def values(apply, params, x):
    """Loss and gradients of clients with kernels of their own."""

    def loss(params, x):
        return (apply(params, x) ** 2).sum()

    return jax.jit(jax.vmap(jax.value_and_grad(loss, (0, 1))))(params, x)


def check_equal(module, shape, tolerance=1e-5):
    model = from_linen(module) if isinstance(module, nn.Module) else module
    # Whole and half numbers: sums are exact, so that ties between the places of a window are too.
    x = jnp.round(2 * jax.random.normal(jax.random.key(0), (CLIENTS, BATCH, *shape))) / 2
    params = jax.vmap(lambda key: model.init(key, x[0]))(jax.random.split(jax.random.key(1), CLIENTS))
    params = jax.tree.map(lambda a: jnp.round(4 * a) / 4, params)
    want, got = (values(apply, params, x) for apply in (model.apply, Exchanged(model.apply)))
    for one, other in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(other, one, rtol=tolerance, atol=tolerance * float(jnp.abs(one).max()))
    text = str(jax.make_jaxpr(Exchanged(model.apply))(jax.tree.map(lambda a: a[0], params), x[0]))
    assert "conv_general_dilated" not in text
    assert "reduce_window" not in text


MAX = {"kind": "max_pool", "window_shape": (3, 3), "strides": (2, 2), "padding": "SAME"}
MEAN = {"kind": "avg_pool", "window_shape": (3, 2), "strides": (1, 2), "padding": "SAME", "count_include_pad": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("conv", "after", "pool"),
    [
        ({"kernel_size": (3, 3)}, "rm", None),
        ({"kernel_size": (3, 3)}, "2m", None),
        ({"kernel_size": (3, 2), "strides": (2, 1), "padding": [(1, 2), (0, 1)]}, "r", MAX),
        ({"kernel_size": (3, 3), "feature_group_count": 2, "strides": 2}, "", MEAN),
        ({"kernel_size": (3, 3), "kernel_dilation": 2}, "", MAX | {"strides": (1, 1), "padding": "VALID"}),
        ({"kernel_size": (3, 3), "input_dilation": 2, "padding": [(2, 2), (1, 2)]}, "", None),
    ],
)
def test_equals_the_plain_form(conv, after, pool):
    check_equal(Net(conv, after, pool), (7, 8, 4))


@pytest.mark.slow
def test_one_axis_and_three():
    check_equal(Net({"kernel_size": (3,), "strides": 2}, "m"), (11, 2))
    check_equal(Net({"kernel_size": (2, 2, 2), "padding": "VALID"}, "rm"), (4, 5, 4, 1))


class Nnx(nnx.Module):
    """Convolution, relu, a pool, a transposed convolution, and a dense layer."""

    def __init__(self, rngs):
        self.first = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.second = nnx.ConvTranspose(4, 2, (2, 2), padding="VALID", rngs=rngs)
        self.dense = nnx.Linear(4 * 5 * 2, 3, rngs=rngs)

    def __call__(self, x):
        x = self.second(nnx.max_pool(nnx.relu(self.first(x)), (2, 2), (2, 2)))
        return self.dense(x.reshape(x.shape[0], -1))


class Eqx(eqx.Module):
    """Convolution in groups, relu, means, a dilated convolution, and a dense layer, channels first."""

    first: Any
    second: Any
    dense: Any

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.first = eqx.nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2, use_bias=False, key=keys[0])
        self.second = eqx.nn.Conv2d(4, 2, 2, padding=1, dilation=2, key=keys[1])
        self.dense = eqx.nn.Linear(2 * 3 * 3, 3, key=keys[2])

    def __call__(self, x):
        pooled = eqx.nn.AvgPool2d((3, 2), 1, padding=((1, 1), (0, 1)))(jax.nn.relu(self.first(x)))
        return self.dense(self.second(pooled).reshape(-1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shape"), [(from_nnx(lambda rngs: Nnx(rngs)), (7, 8, 2)), (from_equinox(Eqx), (4, 6, 6))]
)
def test_modules_of_other_libraries(model, shape):
    check_equal(model, shape)


@pytest.mark.slow
def test_float64_is_closer():
    with jax.enable_x64(True):
        check_equal(Net({"kernel_size": (3, 3), "param_dtype": jnp.float64}, "rm"), (7, 8, 2), 1e-12)


@pytest.mark.slow
def test_any_function_of_ones_own_and_in_loops():
    def init(key, x):
        return {"w": jax.random.normal(key, (3, 3, x.shape[-1], x.shape[-1]))}

    def apply(params, x):
        @jax.checkpoint
        def layer(x, _):
            y = jax.lax.conv_general_dilated(x, params["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return jax.lax.cond(y.sum() > 0, jnp.tanh, lambda y: nn.max_pool(y, (3, 3), padding="SAME"), y), None

        return jax.jit(lambda x: jax.lax.scan(layer, x, None, length=2)[0])(x).sum(axis=(1, 2))

    model = jaxpfl.models.as_model(Model(init, apply))
    check_equal(model, (5, 4, 2))


@pytest.mark.slow
def test_a_derivative_of_the_gradient():
    module = Net({"kernel_size": (3, 3)}, "rm")
    plain, x = from_linen(module), jax.random.normal(jax.random.key(0), (2, 6, 6, 1))
    params = plain.init(jax.random.key(1), x)

    def curvature(apply):
        gradient = jax.grad(lambda params: (apply(params, x) ** 2).sum())
        return jax.jvp(gradient, (params,), (params,))[1]

    want, got = curvature(plain.apply), curvature(Exchanged(plain.apply))
    for one, other in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4)


def test_the_form_is_chosen_where_the_program_is_traced():
    model = from_linen(Net({"kernel_size": (3, 3)}))
    x = jnp.zeros((2, 5, 5, 1))
    params, apply = model.init(jax.random.key(0), x), Exchanged(model.apply)
    with form("plain"):
        assert "conv_general_dilated" in str(jax.make_jaxpr(apply)(params, x))
    assert "conv_general_dilated" not in str(jax.make_jaxpr(apply)(params, x))


@pytest.fixture(scope="module")
def federation():
    return jaxpfl.federate(jaxpfl.load("digits"), clients=4, classes_per_client=3)


@pytest.mark.slow
def test_a_fit_is_the_same_with_and_without(federation):
    given = {"model": Net({"kernel_size": (3, 3)}, "rm", outputs=10), "rounds": 2, "local_steps": 2}
    got, want = (fit("fedavg", federation, **given, plan=ExecutionPlan(convolutions=c)) for c in ("auto", "plain"))
    np.testing.assert_allclose(got.history["train_loss"], want.history["train_loss"], rtol=1e-5)
    np.testing.assert_allclose(got.scores["after"]["loss"], want.scores["after"]["loss"], rtol=1e-5)
    assert got.simulation.digest() != want.simulation.digest()
    texts = [result.simulation.export("cpu").mlir_module() for result in (got, want)]
    assert ["stablehlo.convolution" in text for text in texts] == [False, True]


@pytest.mark.slow
def test_a_layer_that_stays_plain_is_named_once(federation):
    class Wide(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(2, (3, 3), name="small")(nn.Conv(2, (12, 12), name="large")(x))
            return nn.Dense(10)(x.reshape(x.shape[0], -1))

    with pytest.warns(JaxpflWarning, match=r"large \(convolution\): its kernel has 144 places") as seen:
        result = fit("fedavg", federation, model=Wide(), rounds=1, local_steps=1)
    assert len(seen) == 1
    assert "small" not in str(seen[0].message)
    assert np.isfinite(result.history["train_loss"]).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit("fedavg", federation, model=Wide(), rounds=1, local_steps=1, plan=ExecutionPlan(convolutions="plain"))


def test_layers_are_named_by_their_parameters_or_modules():
    model = from_linen(Net({"kernel_size": (3, 3)}, "rm", MAX))
    x = jnp.zeros((1, 8, 8, 1))
    found = layers(model.apply, model.init(jax.random.key(0), x), x, jax.random.key(0))
    assert [(layer.name, layer.what) for layer in found] == [
        ("Conv_0", "convolution"),
        ("Net", "pool"),
        ("Net", "pool"),
    ]


def test_models_without_such_layers_and_registered_ones_are_left_alone(federation):
    class Dense(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(10)(x.reshape(x.shape[0], -1))

    for model in (Dense(), "mlp", "linear"):
        assert not isinstance(make_task(model, federation, 10).model.apply, Exchanged)
