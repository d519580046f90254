"""Models from modules and pairs of functions, tasks that start from given parameters, models cut before their heads.

What no model, task or metric can be made of is refused in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jaxpfl import JaxpflError, from_equinox, from_nnx
from jaxpfl.models import Model, build_model, classification, from_linen, in_bfloat16, lora, rewriting
from jaxpfl.models.base import leaves_by_path, start_from
from jaxpfl.models.features import halves
from jaxpfl.models.images import mlp
from jaxpfl.models.layers import is_head
from jaxpfl.models.metrics import parse_loss, parse_metrics, task_metric


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(x))


X = jnp.arange(20.0).reshape(4, 5)


def test_dropout_follows_train_and_key():
    model = from_linen(Dropped())
    params = model.init(jax.random.key(0), X)
    np.testing.assert_array_equal(model.apply(params, X), model.apply(params, X, key=jax.random.key(1)))
    first, again, other = (model.apply(params, X, key=jax.random.key(k), train=True) for k in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not jnp.allclose(first, other)


def test_any_pair_of_functions_is_a_model():
    model = Model(
        init=lambda key, x: jax.random.normal(key, (x.shape[1], 3)),
        apply=lambda params, x, key=None, train=False: x @ params,
    )
    task = classification(model, (5,), 3)
    params = task.init(jax.random.key(0))
    assert params.shape == (5, 3)
    assert model.head is None
    gradient = jax.jit(jax.grad(lambda p: task.loss(model.apply(p, X), jnp.zeros(4, int)).mean()))(params)
    assert np.isfinite(gradient).all()


TASK = classification(mlp(3, (5,)), (4,), 3)


@pytest.fixture
def given() -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf, np.float64) for path, leaf in leaves_by_path(TASK.init(jax.random.key(7))).items()}


@pytest.mark.parametrize("as_tree", [True, False])
def test_every_key_gives_them_in_the_models_own_type(given, as_tree):
    parameters = TASK.init(jax.random.key(7)) if as_tree else given
    task = start_from(TASK, parameters)
    for seed in (0, 1):
        got = jax.jit(task.init)(jax.random.key(seed))
        jax.tree.map(np.testing.assert_array_equal, got, TASK.init(jax.random.key(7)))
        assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype("float32")}
    x = jnp.ones((2, 4))
    np.testing.assert_array_equal(task.model.apply(got, x), TASK.model.apply(got, x))


def test_a_model_that_is_one_array():
    task = classification(Model(lambda key, x: jnp.zeros((4, 3)), lambda w, x: x @ w), (4,), 3)
    got = start_from(task, {"parameters": np.ones((4, 3))}).init(jax.random.key(0))
    np.testing.assert_array_equal(got, np.ones((4, 3)))


CLASSES, INPUTS = 3, (5,)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.body, self.head = nnx.Linear(5, 4, rngs=rngs), nnx.Linear(4, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.body(x)))


def of_equinox(key):
    class Eqx(eqx.Module):
        body: eqx.nn.Linear
        head: eqx.nn.Linear

        def __call__(self, x):
            return self.head(jax.nn.relu(self.body(x)))

    one, two = jax.random.split(key)
    return Eqx(eqx.nn.Linear(5, 4, key=one), eqx.nn.Linear(4, CLASSES, key=two))


class Jitted(nn.Module):
    """The whole network in a program that its ``apply`` calls, with places instead of features at the end."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8, name="body")(x)).reshape(-1, 2, 4)
        return nn.Dense(CLASSES, name="head")(x.reshape(-1, 8))


def jitted():
    model = from_linen(Jitted(), is_head)
    return model._replace(apply=jax.jit(model.apply, static_argnames="train"))


def task_of(model, shape=INPUTS):
    return classification(model, shape, CLASSES)


def exchanged():
    task = task_of(build_model("cnn", CLASSES, (16, 16)), (16, 16))
    return task._replace(model=task.model._replace(apply=rewriting.Exchanged(task.model.apply)))


TASKS = {
    "mlp": (lambda: task_of(build_model("mlp:6,3", CLASSES, INPUTS)), 3),
    "nnx": (lambda: task_of(from_nnx(lambda rngs: Net(rngs), is_head)), 4),
    "equinox": (lambda: task_of(from_equinox(of_equinox, is_head)), 4),
    "a call of a program": (lambda: task_of(jitted()), 8),
    "half precision": (lambda: in_bfloat16(task_of(build_model("mlp:6", CLASSES, INPUTS))), 6),
    "exchanged layers": (exchanged, 84),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_the_head_of_the_features_is_the_model(name):
    task, width = TASKS[name][0](), TASKS[name][1]
    made = halves("it", task)
    assert made.width == width
    x = np.random.default_rng(0).normal(size=(7, *task.input_shape)).astype(np.float32)

    def split(params, x):
        rows = made.features(params, x)
        assert rows.shape == (7, width)
        assert rows.dtype == jnp.float32
        return made.head(params, rows)

    params = jax.jit(task.init)(jax.random.key(1))

    @jax.jit
    def both(params, x):
        of = [
            jax.value_and_grad(lambda p, one=one: (one(p, x) ** 2).sum())(params) for one in (split, task.model.apply)
        ]
        return of, jax.vmap(split, in_axes=(None, 0))(params, x[None]), task.model.apply(params, x)

    (got, want), together, plain = both(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    np.testing.assert_allclose(together[0], plain, rtol=1e-5, atol=1e-6)


class Twice(nn.Module):
    @nn.compact
    def __call__(self, x):
        head = nn.Dense(CLASSES, name="head")
        return head(nn.Dense(5, name="body")(x)) + head(x)


def pooled(params, x):
    return jnp.zeros((len(x), CLASSES)) + (x @ params["body"]).mean(axis=0) @ params["head"]


def of_pair(apply):
    def init(key, x):
        return {"body": jnp.ones((5, 4)), "head": jnp.ones((4, CLASSES))}

    return Model(init, apply, is_head)


REFUSED = {
    "none": (from_linen(Jitted()), "it requires a model that names its head, got one without Model.head"),
    "whole": (
        build_model("linear", CLASSES, INPUTS),
        "it requires a model with a body, got one whose head is the whole model",
    ),
    "two": (from_linen(Twice(), is_head), "a head that reads one array of the body, got one that reads 2 arrays"),
    "no rows": (
        of_pair(pooled),
        "it requires a head that reads one row per example, got one that reads the shape (4,)",
    ),
    "unused": (of_pair(lambda params, x: x @ params["body"][:, :CLASSES]), "got one that reads nothing of it"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_model_that_cannot_be_cut_is_refused(name):
    model, said = REFUSED[name]
    with pytest.raises(JaxpflError, match=re.escape(said)):
        halves("it", task_of(model))


def test_a_head_that_reads_the_inputs_is_refused():
    model = of_pair(lambda params, x: x @ (params["body"] @ params["head"]))
    with pytest.raises(JaxpflError, match="got one that reads the inputs"):
        halves("it", task_of(model))


def test_equinox_function_that_makes_integers_is_refused():
    class Numbered(eqx.Module):
        order: jax.Array

    with pytest.raises(JaxpflError, match=r"^Numbered.order is an array of int32, .*: pass an instance of the module"):
        from_equinox(lambda key: Numbered(jnp.arange(2)))


MLP = build_model("mlp:5", 3, (4,))


def built(name: str, *shape: int) -> Callable[[], Any]:
    return lambda: build_model(name, 10, shape)


def started(**change: Any) -> Callable[[], Any]:
    def start() -> Any:
        task = classification(MLP, (4,), 3)
        given = leaves_by_path(task.init(jax.random.key(0))) | {path.replace("_", "/"): a for path, a in change.items()}
        return start_from(task, {path: value for path, value in given.items() if value is not None})

    return start


def adapted(**options: Any) -> Callable[[], Any]:
    return lambda: lora(MLP, MLP.init(jax.random.key(0), jnp.zeros((1, 4))), **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (built("cn", 28, 28), "did you mean 'cnn'"),
        (built("mlp:a", 28, 28), "takes integers as in 'mlp:128,64', got 'mlp:a'"),
        (built("mlp:12,-3", 28, 28), "hidden widths must be one or more positive"),
        (built("mlp-ln:0", 28, 28), "hidden widths must be one or more positive"),
        (built("cnn:3", 28, 28), "model 'cnn' takes no numbers, got 'cnn:3'"),
        (built("cnn", 8, 8), r"16 x 16, got \(8, 8\)"),
        (lambda: build_model("cnn", 10, (16, 16)).init(jax.random.key(0), jnp.zeros((1, 15, 16))), r"got \(15, 16\)"),
        (built("resnet", 80), r"requires images .* 4 x 4, got \(80,\)"),
        (built("resnet18", 7, 8, 3), r"8 x 8, got \(7, 8, 3\)"),
        (built("resnet:18", 8, 8), r"6 n \+ 2.*, got 18: or use resnet18"),
        (built("resnet:8,8", 8, 8), "one number, its depth, got 8,8"),
        (built("gru", 28, 28, 1), r"sequences of tokens \[T\], got inputs of shape \(28, 28, 1\)"),
        (built("gru", 0), r"shape \(0,\)"),
        (built("gru:0", 80), "must be one or more positive"),
        (built("transformer:8", 6), "width,blocks or width,blocks,heads, .* got 8"),
        (built("transformer:8,0", 6), "got 8,0"),
        (built("transformer:10,1", 6), "multiple of twice the heads .by default 4., got 10,1"),
        (lambda: build_model("mlp", 10, (6,), every=True), "the task 'next-token' requires .*, got 'mlp': use gru or"),
        (lambda: classification(build_model("gru", 10, (80,)), (80,), 10), "inputs must be integers for a model of"),
        (started(dense0_kernel=np.zeros((4, 6))), r"'dense0/kernel' must be \(4, 5\), got \(4, 6\)"),
        (started(head_scale=np.zeros(3)), r"'head/scale' must be absent, got \(3,\)"),
        (started(head_bias=None), r"'head/bias' must be \(3,\), got absent"),
        (started(head_bias=np.full(3, 1e300)), "must be finite, got a NaN or infinite value in 'head/bias'"),
        (started(head_bias=np.array(list("abc"))), "must be numbers, got <U1 for 'head/bias'"),
        (adapted(rank=0), "rank must be at least 1, got 0"),
        (adapted(at="dense1/*"), r"lora.at: no parameter matches 'dense1/\*' \(parameters: dense0/kernel, head/k"),
        (adapted(trained="tail/*"), r"lora.trained: no parameter matches 'tail/\*'"),
        (adapted(at="head/*", personal="trained/*"), "parameters: adapters/head/kernel/a, adapters/head/kernel/b"),
        (lambda: parse_loss("huber:delta=0"), "huber:delta must be > 0, got 0"),
        (lambda: parse_loss("quantile:q=1"), "quantile:q must be > 0 and < 1, got 1"),
        (lambda: parse_loss("quantile:p=0.5"), "unknown argument of loss quantile 'p'"),
        (lambda: parse_loss("squared:q=0.5"), "unknown argument of loss squared 'q' .known: none"),
        (lambda: parse_loss("squarred"), "unknown loss 'squarred': did you mean 'squared'"),
        (lambda: parse_metrics("acuracy"), "unknown metric 'acuracy': did you mean 'accuracy'"),
        (lambda: parse_metrics("auc,"), "metrics must be names separated by commas, got 'auc,'"),
        (lambda: task_metric("auc", "regression", "ab"), r"classes, or labels 0 and 1 \(task .*: use a, b"),
        (lambda: task_metric("rmse", "binary", "ab"), r"rmse requires numeric labels \(task regression\), got task"),
        (
            lambda: task_metric("perplexity", "classification", "ab"),
            r"requires a label at each position \(task next-token\)",
        ),
    ],
)
def test_refusals(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(JaxpflError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
