"""Model and Task: the user's own functions and modules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxpfl.models import Model, build_model, classification, from_linen
from jaxpfl.support.errors import JaxpflError


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


def test_batch_norm_has_its_statistics_among_the_parameters():
    model = from_linen(Normalised("batch"))
    params = model.init(jax.random.key(0), X)
    assert set(params) == {"Dense_0", "BatchNorm_0", "Dense_1", "batch_stats"}
    assert model.apply(params, X).shape == (4, 3)


class Remembering(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.variable("memory", "last", lambda: jnp.zeros(()))
        return nn.Dense(3)(x)


def test_other_collections_are_refused_in_one_line():
    with pytest.raises(JaxpflError, match="mutable collection 'memory': only 'params'") as error:
        from_linen(Remembering()).init(jax.random.key(0), X)
    assert "\n" not in str(error.value)


def test_group_norm_is_accepted():
    model = from_linen(Normalised("group"))
    params = model.init(jax.random.key(0), X)
    assert set(params) == {"Dense_0", "GroupNorm_0", "Dense_1"}
    assert model.apply(params, X).shape == (4, 3)


def test_dropout_follows_train_and_key():
    model = from_linen(Dropped())
    params = model.init(jax.random.key(0), X)
    np.testing.assert_array_equal(model.apply(params, X), model.apply(params, X, key=jax.random.key(1)))
    first, again, other = (model.apply(params, X, key=jax.random.key(k), train=True) for k in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not jnp.allclose(first, other)


def test_train_is_harmless_where_the_module_does_not_take_it():
    model = build_model("linear", 3, (5,))
    params = model.init(jax.random.key(0), X)
    np.testing.assert_array_equal(model.apply(params, X), model.apply(params, X, jax.random.key(1), True))


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


def test_clients_initialise_apart_under_vmap():
    task = classification(build_model("mlp:4", 3, (5,)), (5,), 3)
    stacked = jax.vmap(task.init)(jax.random.split(jax.random.key(0), 2))
    assert all(not jnp.array_equal(leaf[0], leaf[1]) for leaf in jax.tree.leaves(stacked))
