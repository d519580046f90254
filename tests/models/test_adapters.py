"""Low-rank adapters: their gradients by hand, what methods exchange of them, and patterns that fit nothing."""

import re
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl
from jaxpfl import METHODS, JaxpflError
from jaxpfl.engine.assembly import simulation_of
from jaxpfl.engine.spec import RunSpec
from jaxpfl.engine.spec_parts import Training, Work
from jaxpfl.models import build_model, from_linen
from jaxpfl.models.adapters import lora

CLASSES, INPUTS, TOKENS, WIDTH = 3, (5,), 4, 8
QUICK = {"rounds": 2, "local_steps": 2, "batch_size": 4}


class Transformer(nn.Module):
    """A block of attention and a perceptron on sequences of vectors."""

    @nn.compact
    def __call__(self, x):
        dense = partial(nn.Dense, param_dtype=x.dtype)
        attention = nn.MultiHeadDotProductAttention(2, param_dtype=x.dtype, name="attention")
        x = dense(WIDTH, name="in")(x)
        x = x + attention(nn.LayerNorm(param_dtype=x.dtype, name="norm")(x))
        x = x + dense(WIDTH, name="out")(nn.gelu(dense(2 * WIDTH, name="wide")(x)))
        return dense(CLASSES, name="head")(x.mean(axis=1))


def based(model, shape, seed=0):
    return model, jax.jit(model.init)(jax.random.key(seed), jnp.zeros((1, *shape)))


def mlp(seed=0):
    return based(build_model("mlp:8", CLASSES, INPUTS), INPUTS, seed)


def federation(shape):
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(6, *shape)).astype(np.float32), rng.integers(CLASSES, size=6)) for _ in range(3)]
    return jaxpfl.stack_clients(clients, test=clients)


@pytest.mark.slow
def test_it_starts_from_the_model_and_its_gradients_are_those_of_the_factors():
    model, base = mlp()
    x = np.random.default_rng(1).normal(size=(4, *INPUTS)).astype(np.float32)
    adapted = lora(model, base, rank=2, alpha=6.0, at="dense0/*")
    params = adapted.init(jax.random.key(3), x)
    np.testing.assert_allclose(adapted.apply(params, x), model.apply(base, x), rtol=1e-6)
    own = params["adapters"]["dense0"]["kernel"]
    own["b"] = jnp.asarray(np.random.default_rng(2).normal(size=own["b"].shape), jnp.float32)
    kernel = base["dense0"]["kernel"] + 6.0 / 2 * own["a"] @ own["b"]
    merged = base | {"dense0": base["dense0"] | {"kernel": kernel}}
    np.testing.assert_allclose(adapted.apply(params, x), model.apply(merged, x), rtol=1e-5)
    of_kernel = jax.grad(lambda p: (model.apply(p, x) ** 2).sum())(merged)["dense0"]["kernel"]
    found = jax.grad(lambda p: (adapted.apply(p, x) ** 2).sum())(params)["adapters"]["dense0"]["kernel"]
    np.testing.assert_allclose(found["a"], 3 * of_kernel @ own["b"].T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["b"], 3 * own["a"].T @ of_kernel, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_kernels_of_attention_are_parted_where_the_factors_are_smallest():
    model, base = based(from_linen(Transformer()), (TOKENS, 3))
    shapes = jax.eval_shape(lora(model, base, rank=2, at="attention/*/kernel").init, jax.random.key(0), None)
    found = jax.tree.map(lambda leaf: leaf.shape, shapes["adapters"]["attention"])
    for name in ("query", "key", "value", "out"):
        assert found[name]["kernel"] == {"a": (WIDTH, 2), "b": (2, WIDTH)}


def made(method, model, shape):
    training, work = Training(model=model, rounds=2), Work(local_steps=2, batch_size=4)
    return simulation_of(RunSpec(method=METHODS[method], training=training, work=work), federation(shape))


@pytest.mark.parametrize(
    ("method", "up"),
    [
        pytest.param("fedavg", ("a", "b", "head"), marks=pytest.mark.slow),
        pytest.param("fedper", ("a", "b"), marks=pytest.mark.slow),
        pytest.param("lg-fedavg", ("head",), marks=pytest.mark.slow),
        pytest.param("ditto", ("a", "b", "head"), marks=pytest.mark.slow),
    ],
)
def test_methods_exchange_adapters_of_a_transformer(method, up):
    shape = TOKENS, 3
    model, base = based(from_linen(Transformer()), shape)
    adapted = lora(model, base, rank=2, at="attention/*/kernel,wide/kernel", trained="head/*", personal="trained/*")
    simulation = made(method, adapted, shape)
    size = {"a": 2 * (4 * WIDTH + WIDTH), "b": 2 * (4 * WIDTH + 2 * WIDTH), "head": CLASSES * (WIDTH + 1)}
    assert simulation.bytes_per_client()[0] == 4 * sum(size[name] for name in up)
    state, history = simulation.advance(simulation.init([0]), 2)
    assert np.isfinite(history["train_loss"]).all()
    models = simulation.personal_models(state)
    assert np.abs(models["adapters"]["wide"]["kernel"]["b"]).max() > 0


@pytest.mark.slow
def test_models_with_other_frozen_parameters_are_other_models():
    def score(seed):
        model = lora(*mlp(seed), at="dense0/*")
        return jaxpfl.fit("fedavg", federation(INPUTS), model=model, seeds=1, **QUICK).mean("loss")

    assert score(0) == score(0) != score(1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 0}, "lora: the rank must be >= 1, got 0"),
        ({"at": "dense1/*"}, "no parameter fits at='dense1/*' (there are dense0/kernel, head/kernel)"),
        ({"at": "dense0/bias"}, "no parameter fits at='dense0/bias'"),
        ({"trained": "tail/*"}, "no parameter fits trained='tail/*'"),
        ({"at": "head/*", "personal": "trained/*"}, "(there are adapters/head/kernel/a, adapters/head/kernel/b)"),
    ],
)
def test_refusals(options, said):
    with pytest.raises(JaxpflError, match=re.escape(said)):
        lora(*mlp(), **options)
