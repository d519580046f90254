"""Low-rank adapters: of one model, and what every method does with those of tokens."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl
from jaxpfl import METHODS, JaxpflError
from jaxpfl.engine.build import simulation_of
from jaxpfl.engine.spec import RunSpec
from jaxpfl.models import build_model, from_linen, lora

CLASSES, INPUTS, TOKENS, WIDTH = 3, (5,), 4, 8
QUICK = {"rounds": 2, "local_steps": 2, "batch_size": 4}


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
    model, base = based(from_linen(nn.MultiHeadDotProductAttention(2)), (TOKENS, WIDTH))
    shapes = jax.eval_shape(lora(model, base, rank=2, at="*/kernel").init, jax.random.key(0), None)
    found = jax.tree.map(lambda leaf: leaf.shape, shapes["adapters"])
    for name in ("query", "key", "value", "out"):
        assert found[name]["kernel"] == {"a": (WIDTH, 2), "b": (2, WIDTH)}


@pytest.mark.slow
def test_models_with_other_frozen_parameters_are_other_models():
    def score(seed):
        model = lora(*mlp(seed), at="dense0/*")
        return jaxpfl.fit("fedavg", federation(INPUTS), model=model, seeds=1, **QUICK).mean("loss")

    assert score(0) != score(1)


V, T, RANK = 7, 5, 2
ADAPTED = "block*/query/kernel,block*/value/kernel"
KINDS = ("fedavg", "ditto", "persfl", "network-lasso")
"""Methods that send and keep different things: one model, a second one, a teacher's, a neighbour's."""


@functools.cache
def base():
    model = build_model("transformer:8,1", V, (T,), every=True)
    return model, jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, T), jnp.int32))


def adapted(personal):
    """Adapters of queries and values beside a head that is trained whole; the adapters are personal or shared."""
    return lora(*base(), rank=RANK, at=ADAPTED, trained="head/*", personal="adapters/*" if personal else "")


@functools.cache
def data():
    rng = np.random.default_rng(0)
    draw = lambda n: tuple(rng.integers(0, V, (2, n, T)))  # noqa: E731
    return jaxpfl.stack_clients(*([draw(n) for n in (5, 6, 7)] for _ in range(3)))


def simulation(method, personal):
    method = METHODS[method]
    return simulation_of(
        RunSpec(
            method=method,
            options={"distill_steps": 2} if method.name == "persfl" else {},
            model=adapted(personal),
            task="next-token",
            rounds=1,
            cohort=1 if method.asynchronous else None,
            local_steps=2,
            batch_size=4,
            graph="models" if method.graph else None,
            neighbours=1 if method.graph else None,
        ),
        data(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", KINDS)
def test_methods_trace_them_and_exchange_no_frozen_parameter(method):
    made = simulation(method, personal=False)
    assert made.program("cpu").eqns
    assert made.bytes_per_client()[0] < 4 * sum(leaf.size for leaf in jax.tree.leaves(base()[1]))


@pytest.mark.parametrize(
    ("method", "personal", "reason"),
    [
        ("fedbn", True, "fedbn .* normaliz"),
        *((name, False, "requires a model that names its head") for name in ("fedper", "fedala", "lg-fedavg")),
    ],
)
def test_methods_with_a_personal_part_refuse_adapters_without_one(method, personal, reason):
    with pytest.raises(JaxpflError, match=reason):
        simulation(method, personal)


ADAPTERS, HEAD = 4 * 2 * RANK * (8 + 8), 4 * (8 * V + V)
"""Bytes of both adapters, and of the head."""


@pytest.mark.parametrize(
    ("method", "personal", "up"),
    [("fedavg", False, ADAPTERS + HEAD), ("fedper", True, HEAD), ("local", False, 0), ("lg-fedavg", True, ADAPTERS)],
)
def test_the_shared_part_alone_is_exchanged(method, personal, up):
    assert simulation(method, personal).bytes_per_client()[0] == up


@pytest.mark.slow
def test_personal_adapters_differ_and_the_frozen_parameters_stay():
    model = adapted(personal=True)
    given = {"task": "next-token", "rounds": 1, "local_steps": 2, "batch_size": 4, "lr": 0.5, "num_classes": V}
    result = jaxpfl.fit("fedper", data(), model=model, **given)
    own = result.state.clients[0]
    (b,) = (leaf for path, leaf in jax.tree.leaves_with_path(own) if "query" in str(path) and "'b'" in str(path))
    assert b.shape[-2:] == (RANK, 8)
    of_clients = np.asarray(b)[0, :3].reshape(3, -1)
    assert len(np.unique(np.round(of_clients, 6), axis=0)) == 3
    assert not [path for path, _ in jax.tree.leaves_with_path(result.state.server) if "adapters" in str(path)]
