"""Our convolutions, pools and narrow products against lax, and a user's own layers in their form."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import jaxpfl
from jaxpfl import ExecutionPlan, Model, fit, from_equinox, from_nnx
from jaxpfl.engine.build import simulation_of
from jaxpfl.engine.spec import RunSpec
from jaxpfl.engine.tasks import make_task
from jaxpfl.models import build_model, classification, conv_kernel, convolution, from_linen, layers, rewriting
from jaxpfl.models.convolution import form, max_pool
from jaxpfl.models.layers import dense
from jaxpfl.models.rewriting import Exchanged
from jaxpfl.support.errors import JaxpflWarning

SHAPES = [(6, 12, 12, 4, 5, 16), (3, 9, 8, 2, 3, 4), (2, 7, 10, 1, 4, 3)]


STRIDED = [
    ((1, 28, 28, 3, 5, 6), 1, "VALID"),
    ((3, 8, 8, 2, 3, 4), 2, "SAME"),
    ((2, 9, 6, 2, 3, 3), 1, "SAME"),
    ((2, 8, 7, 3, 1, 4), 2, "SAME"),
    ((2, 7, 8, 1, 4, 3), 3, "SAME"),
    ((2, 2, 1, 2, 3, 3), 2, "SAME"),
    ((2, 9, 8, 2, 3, 3), 2, "VALID"),
]


def reference(x, kernel, stride=1, padding="VALID"):
    strides = (stride, stride)
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=("CHWN", "HWIO", "CHWN"))


def reference_pool_last(x, kernel, bias):
    return pool_of_lax(jax.nn.relu(reference(x, kernel) + bias[:, None, None, None]))


def draw(shape, dtype, integers=False):
    channels, height, width, n, k, features = shape
    rng = np.random.default_rng(sum(shape))
    sizes = (channels, height, width, n), (k, k, channels, features), (features,)
    draws = [rng.integers(-2, 3, s) if integers else rng.normal(size=s) for s in sizes]
    return [d.astype(dtype) for d in draws]


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(f, arguments):
    y, pull = jax.vjp(f, *arguments)
    cotangent = jnp.asarray(np.random.default_rng(0).normal(size=y.shape), y.dtype)
    return [y, *pull(cotangent)]


def compare(function, expected, arguments, rtol):
    """Values, and the gradients of <cotangent, output> with respect to every argument."""
    results = value_and_gradients(function, arguments), value_and_gradients(expected, arguments)
    for ours, theirs in zip(*map(jax.tree.leaves, results), strict=True):
        assert ours.dtype == theirs.dtype == jax.tree.leaves(arguments)[0].dtype
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol * np.abs(theirs).max())


@pytest.mark.parametrize(("shape", "stride", "padding"), STRIDED)
def test_strides_and_padding_are_those_of_lax(shape, stride, padding):
    ours, theirs = (functools.partial(f, stride=stride, padding=padding) for f in (convolution.conv, reference))
    with jax.enable_x64(True):
        compare(ours, theirs, draw(shape, jnp.float64)[:2], 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_conv_pool_equals_and_ties_as_pooling_last_in_float64(shape):
    """Small integers: sums are exact, many windows tie, and many maxima are exactly zero before relu."""
    with jax.enable_x64(True):
        for integers in (False, True):
            compare(convolution.conv_pool, reference_pool_last, draw(shape, jnp.float64, integers=integers), 1e-9)


@pytest.mark.parametrize(
    "function",
    [
        convolution.conv_pool,
        lambda x, kernel, bias: convolution.conv(x, kernel),
        lambda x, kernel, bias: convolution.conv(x, kernel, stride=2, padding="SAME"),
    ],
)
def test_vmap_and_map_over_clients_equal_a_loop(function):
    clients = [[leaf + i for leaf in draw((2, 9, 8, 3, 3, 4), jnp.float32)] for i in range(3)]
    stacked = [np.stack(leaves) for leaves in zip(*clients, strict=True)]

    def loop(*arrays):
        return jnp.stack([function(*(leaf[i] for leaf in arrays)) for i in range(3)])

    for batched in (jax.vmap(function), lambda *arrays: lax.map(lambda client: function(*client), arrays)):
        compare(batched, loop, stacked, 1e-5)


def test_no_convolution_and_no_reduce_window_in_the_vmapped_gradient():
    x, kernel, bias = (np.stack([leaf] * 2) for leaf in draw((2, 9, 8, 3, 3, 4), jnp.float32))
    gradient = jax.vmap(jax.grad(lambda k, x, b: convolution.conv_pool(x, k, b).sum()))
    text = jax.jit(gradient).lower(kernel, x, bias).as_text()
    assert [word in text for word in ("dot_general", "convolution", "reduce_window")] == [True, False, False]


def test_hessian_vector_product():
    """Second derivatives (Per-FedAvg needs them) of two clients, forward over reverse and reverse over reverse."""
    with jax.enable_x64(True):
        one = draw((2, 9, 8, 3, 3, 4), jnp.float64)
        clients = [jnp.asarray(np.stack([leaf, 1 - leaf / 2])) for leaf in one]
        directions = jax.tree.map(jnp.cos, clients)

        @functools.partial(jax.jit, static_argnums=0)
        def products(layer):
            def of_client(given, direction):
                slope = jax.grad(lambda given: jnp.sum(jnp.sin(layer(*given))))
                forward = jax.jvp(slope, (given,), (direction,))[1]
                return forward, jax.grad(lambda given: sum(map(jnp.vdot, slope(given), direction)))(given)

            return jax.vmap(of_client)(clients, directions)

        expected = products(reference_pool_last)[1]
        for ours in (*products(convolution.conv_pool), *products(interpreted(conv_kernel.conv_pool))):
            chex.assert_trees_all_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def images():
    rng = np.random.default_rng(0)
    drawn = [(rng.normal(size=(8, 16, 16, 1)).astype(np.float32), rng.integers(10, size=8)) for _ in range(2)]
    return jaxpfl.stack_clients(drawn, test=drawn)


def interpreted(layer):
    def in_form(*arguments):
        with form("interpreted"):
            return layer(*arguments)

    return in_form


IN_KERNELS = [
    *((shape, None) for shape in [(1, 28, 28, 20, 5, 6), (1, 27, 23, 3, 5, 6), SHAPES[0], SHAPES[2]]),  # as in the CNN
    *((shape, 1) for shape in [(3, 32, 32, 2, 3, 16), (16, 32, 32, 1, 3, 16), (64, 8, 8, 2, 3, 64)]),  # as in ResNet-8
    *((shape, 2) for shape in [(32, 16, 16, 1, 3, 64), (16, 32, 32, 1, 1, 32)]),
    ((1, 5, 6, 1, 3, 70), 1),
]
"""Shapes and strides of layers; with a pool if the stride is None."""


@pytest.mark.parametrize(
    ("shape", "stride", "dtype"),
    [
        (SHAPES[1], None, jnp.float32),
        pytest.param(SHAPES[1], 2, jnp.float32, marks=pytest.mark.slow),
        *(pytest.param(*case, jnp.float64, marks=pytest.mark.slow) for case in IN_KERNELS),
    ],
)
def test_kernels_have_the_numbers_of_products_for_one_client_and_several(shape, stride, dtype):
    """Other shapes for several clients alone, whose kernels are those of one with one more axis of the grid."""
    conv = functools.partial(conv_kernel.conv, stride=stride, padding="SAME")
    layer = conv_kernel.conv_pool if stride is None else conv
    with jax.enable_x64(dtype == jnp.float64):
        one = draw(shape, dtype)[: 3 if stride is None else 2]
        several = [np.stack([leaf, 1 - leaf / 2, leaf * leaf]) for leaf in one]
        compare(interpreted(jax.vmap(layer)), jax.vmap(layer), several, 1e-5 if dtype == jnp.float32 else 1e-10)
        if dtype == jnp.float32:
            compare(interpreted(layer), layer, one, 1e-5)


def simulated(federation, model="cnn", convolutions="kernel", local_steps=1):
    plan = ExecutionPlan(devices=1, convolutions=convolutions, clients="vmap")
    given = {"model": model, "local_steps": local_steps, "batch_size": 4, "num_classes": 10, "plan": plan}
    return simulation_of(RunSpec(method=jaxpfl.METHODS["fedavg"], **given), federation)


def test_the_plan_says_whether_layers_run_in_kernels(images):
    rows = [simulated(images, model).explained[-1][1:] for model in ("cnn", "mlp")]
    assert rows[0] == ("in interpreted kernels", "as given; a cpu has no such kernels")
    assert rows[1] == ("as products", "no layer of the model runs in such kernels")


@pytest.mark.skipif(
    jax.__version_info__ > (0, 10, 2) and jax.default_backend() == "cpu", reason="JAX needs a GPU to lower the kernel"
)
@pytest.mark.parametrize(("convolutions", "kernels"), [("kernel", 5), ("products", 0)])
def test_a_gpu_runs_two_layers_forward_and_back_in_five_kernels_without_patches(images, convolutions, kernels):
    """The gradient of the first layer's input is not needed."""
    text = simulated(images, convolutions=convolutions).export("cuda").mlir_module()
    assert (text.count("@__gpu$xla.gpu.triton"), "tensor<2x36x144xf32>" in text) == (kernels, kernels == 0)


@pytest.mark.slow
def test_a_run_in_kernels_has_the_numbers_of_products(images):
    ours, plain = (simulated(images, convolutions=form, local_steps=2) for form in ("kernel", "auto"))
    assert (ours.execution.form, plain.execution.form) == ("interpreted", None)
    got, want = (one.advance(one.init([0]), 2)[0].server for one in (ours, plain))
    chex.assert_trees_all_close(got, want, rtol=1e-7, atol=1e-5)


@pytest.mark.parametrize("layer", [convolution.conv_pool, interpreted(conv_kernel.conv_pool)])
def test_nan_reaches_the_gradient(layer):
    """A diverged client must be seen, not look stuck at a zero gradient."""
    x, kernel, bias = draw((1, 6, 6, 1, 3, 2), jnp.float32)
    gradient = jax.jit(jax.grad(lambda k: layer(x * jnp.nan, k, bias).sum()))(kernel)
    assert not jnp.isfinite(gradient).any()


@pytest.mark.parametrize(("stride", "padding", "bias"), [(1, "VALID", True), (2, "SAME", False)])
def test_conv_module_takes_the_parameters_of_flax(stride, padding, bias):
    module = layers.Conv(4, size=3, stride=stride, padding=padding, bias=bias)
    flax_module = nn.Conv(4, (3, 3), stride, padding=padding, use_bias=bias)
    x = jax.random.normal(jax.random.key(0), (5, 9, 8, 2))
    variables = jax.jit(module.init)(jax.random.key(1), x.transpose(3, 1, 2, 0))
    assert jax.tree.structure(variables) == jax.tree.structure(jax.eval_shape(flax_module.init, jax.random.key(1), x))
    expected = jax.jit(flax_module.apply)(variables, x)
    got = jax.jit(module.apply)(variables, x.transpose(3, 1, 2, 0))
    np.testing.assert_allclose(got.transpose(3, 1, 2, 0), expected, atol=1e-5)


def pool_of_lax(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def test_planted_ties():
    """Three levels only: every pattern of ties within a window occurs. The last row and column are in no window."""
    x = jax.random.randint(jax.random.key(0), (4, 7, 9, 16), 0, 3).astype(jnp.float32)
    chex.assert_trees_all_equal(value_and_gradients(max_pool, (x,)), value_and_gradients(pool_of_lax, (x,)))


@pytest.mark.parametrize(("outputs", "clients"), [(1, None), (4, 3), (5, 3)])
def test_value_and_gradients_are_those_of_the_plain_product(outputs, clients):
    shape, each = ((), lambda function: function) if clients is None else ((clients,), jax.vmap)
    kx, kk = jax.random.split(jax.random.key(0))
    arguments = jax.random.normal(kx, (*shape, 7, 6)), jax.random.normal(kk, (*shape, 6, outputs))
    compare(each(dense), each(jnp.matmul), arguments, 1e-6)


def test_a_gradient_can_be_differentiated_forward():
    x, kernel = jnp.ones((3, 2)), jnp.array([[0.5], [-1.0]])
    gradient = jax.grad(lambda k: jnp.sum(dense(x, k) ** 3))
    product = jax.jit(lambda: jax.jvp(gradient, (kernel,), (jnp.ones_like(kernel),))[1])()
    expected = jax.jit(jax.hessian(lambda k: jnp.sum((x @ k) ** 3)))(kernel).reshape(2, 2).sum(axis=1, keepdims=True)
    chex.assert_trees_all_close(product, expected, rtol=1e-5)


def network_of_lax(params, x):
    """conv - bias - relu - pool; the dense layers see channels first, as PyTorch flattens."""
    x = x.transpose(3, 1, 2, 0)
    for name in ("conv0", "conv1"):
        x = reference_pool_last(x, params[name]["kernel"], params[name]["bias"])
    x = x.reshape(-1, x.shape[-1]).T
    for name in ("dense0", "dense1"):
        x = jax.nn.relu(x @ params[name]["kernel"] + params[name]["bias"])
    return x @ params["head"]["kernel"] + params["head"]["bias"]


@pytest.mark.parametrize("shape", [(28, 28, 1), pytest.param((19, 21, 2), marks=pytest.mark.slow)])
def test_logits_and_gradients_in_float64(shape):
    with jax.enable_x64(True):
        task = classification(build_model("cnn", 10, shape), shape, 10)
        params = jax.jit(task.init)(jax.random.key(0))
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float64")}
        x = jax.random.normal(jax.random.key(1), (3, *shape), jnp.float64)
        compare(task.model.apply, network_of_lax, (params, x), 1e-12)


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
        return nn.Dense(self.outputs, param_dtype=self.conv.get("param_dtype", jnp.float32))(x.reshape(x.shape[0], -1))

    @staticmethod
    def halved(x):
        return nn.max_pool(x, (2,) * (x.ndim - 2), (2,) * (x.ndim - 2))


def check_equal(module, shape, tolerance=1e-5):
    model = from_linen(module) if isinstance(module, nn.Module) else module
    # Whole and half numbers: sums are exact, so that ties between the places of a window are too.
    x = (np.round(2 * np.random.default_rng(0).normal(size=(3, 2, *shape))) / 2).astype(jnp.result_type(float))
    params = jax.jit(jax.vmap(lambda key: model.init(key, x[0])))(jax.random.split(jax.random.key(1), 3))
    params = jax.tree.map(lambda a: np.round(4 * np.asarray(a)) / 4, params)
    compare(jax.vmap(Exchanged(model.apply)), jax.vmap(model.apply), (params, x), tolerance)
    text = str(jax.make_jaxpr(Exchanged(model.apply))(jax.tree.map(lambda a: a[0], params), x[0]))
    assert not any(name in text for name in ("conv_general_dilated", "reduce_window"))


SHAPE = (7, 8, 4)
MAX = {"kind": "max_pool", "window_shape": (3, 3), "strides": (2, 2), "padding": "SAME"}
MEAN = {"kind": "avg_pool", "window_shape": (3, 2), "strides": (1, 2), "padding": "SAME", "count_include_pad": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("conv", "after", "pool", "shape"),
    [
        ({"kernel_size": (3, 3)}, "rm", None, SHAPE),
        ({"kernel_size": (3, 3)}, "2m", None, SHAPE),
        ({"kernel_size": (3, 2), "strides": (2, 1), "padding": [(1, 2), (0, 1)]}, "r", MAX, SHAPE),
        ({"kernel_size": (3, 3), "feature_group_count": 2, "strides": 2}, "", MEAN, SHAPE),
        ({"kernel_size": (3, 3), "kernel_dilation": 2}, "", MAX | {"strides": (1, 1), "padding": "VALID"}, SHAPE),
        ({"kernel_size": (3, 3), "input_dilation": 2, "padding": [(2, 2), (1, 2)]}, "", None, SHAPE),
        ({"kernel_size": (3,), "strides": 2}, "m", None, (11, 2)),
        ({"kernel_size": (2, 2, 2), "padding": "VALID"}, "rm", None, (4, 5, 4, 1)),
        ({"kernel_size": (3, 3), "param_dtype": jnp.float64}, "rm", None, (7, 8, 2)),
    ],
)
def test_equals_the_plain_form(conv, after, pool, shape):
    with jax.enable_x64("param_dtype" in conv):
        check_equal(Net(conv, after, pool), shape, 1e-12 if "param_dtype" in conv else 1e-5)


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

    @functools.partial(jax.jit, static_argnums=0)
    def curvature(apply):
        gradient = jax.grad(lambda params: (apply(params, x) ** 2).sum())
        return jax.jvp(gradient, (params,), (params,))[1]

    chex.assert_trees_all_close(curvature(Exchanged(plain.apply)), curvature(plain.apply), rtol=1e-4, atol=1e-4)


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

    with pytest.warns(JaxpflWarning, match=r"large \(convolution\): its kernel has 144 positions") as seen:
        result = fit("fedavg", federation, model=Wide(), rounds=1, local_steps=1)
    assert len(seen) == 1
    assert "small" not in str(seen[0].message)
    assert np.isfinite(result.history["train_loss"]).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = {"model": Wide(), "local_steps": 1, "plan": ExecutionPlan(convolutions="plain")}
        simulation_of(RunSpec(method=jaxpfl.METHODS["fedavg"], **plain), federation)


def test_layers_of_two_functions_run_as_products_too(federation):
    def apply(kernel, x):
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    task = make_task(Model(lambda key, x: jnp.ones((3, 3, 1, 10)), apply), federation, 10)
    assert isinstance(task.model.apply, Exchanged)


def test_layers_are_named_by_their_parameters_or_modules():
    model = from_linen(Net({"kernel_size": (3, 3)}, "rm", MAX))
    x = jnp.zeros((1, 8, 8, 1))
    found = rewriting.layers(model.apply, model.init(jax.random.key(0), x), x, jax.random.key(0))
    assert [(layer.name, layer.what) for layer in found] == [("Conv_0", "convolution"), *[("Net", "pool")] * 2]


def test_models_without_such_layers_and_registered_ones_are_left_alone(federation):
    class Dense(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(10)(x.reshape(x.shape[0], -1))

    for model in (Dense(), "mlp", "linear"):
        assert not isinstance(make_task(model, federation, 10).model.apply, Exchanged)
