"""Models from modules and pairs of functions, and tasks that start from given parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxpfl.models import Model, build_model, classification, from_linen
from jaxpfl.models.base import by_path, start_from
from jaxpfl.models.images import mlp


class Normalised(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=not train)(x) if self.kind == "batch" else nn.GroupNorm(4)(x)
        return nn.Dense(3)(x)


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
    assert jnp.isfinite(jax.grad(lambda p: task.loss(model.apply(p, X), jnp.zeros(4, int)).mean())(params)).all()


def test_loss_and_metrics_are_per_example():
    task = classification(build_model("linear", 3, (5,)), (5,), 3)
    logits, y = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])), jnp.array([0, 2])
    np.testing.assert_allclose(task.loss(logits, y), -np.log([0.5, 0.1]), rtol=1e-6)
    np.testing.assert_array_equal(task.metrics["accuracy"](logits, y), [1.0, 0.0])
    np.testing.assert_array_equal(task.metrics["loss"](logits, y), task.loss(logits, y))


TASK = classification(mlp(3, (5,)), (4,), 3)


@pytest.fixture
def given() -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf, np.float64) for path, leaf in by_path(TASK.init(jax.random.key(7))).items()}


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
