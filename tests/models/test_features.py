"""Models cut before their heads."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jaxpfl import JaxpflError, Model, classification, from_equinox, from_linen, from_nnx
from jaxpfl.models import build_model, in_bfloat16, rewriting
from jaxpfl.models.features import halves
from jaxpfl.models.layers import is_head

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
QUICK = ("mlp", "a call of a program")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in TASKS])
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
    "none": (from_linen(Jitted()), "it needs a model that names its head (Model.head): this one names none"),
    "whole": (
        build_model("linear", CLASSES, INPUTS),
        "it needs a model with a body: this one's head is the whole model",
    ),
    "two": (from_linen(Twice(), is_head), "whose head reads one array of its body: this one's reads 2 arrays"),
    "no rows": (of_pair(pooled), "it needs a model whose head reads a row for each example: this one's reads (4,)"),
    "unused": (of_pair(lambda params, x: x @ params["body"][:, :CLASSES]), "this one's reads nothing of it"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_model_that_cannot_be_cut_is_refused(name):
    model, said = REFUSED[name]
    with pytest.raises(JaxpflError, match=re.escape(said)):
        halves("it", task_of(model))


def test_a_head_that_reads_the_inputs_is_refused():
    model = of_pair(lambda params, x: x @ (params["body"] @ params["head"]))
    with pytest.raises(JaxpflError, match="this one's reads the inputs"):
        halves("it", task_of(model))
