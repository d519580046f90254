"""The recurrent network and the transformer: their equations, and LEAF's text from the file to a score.

Low-rank adapters: of one model, and what every method does with those of tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxpfl
from jaxpfl import METHODS, JaxpflError
from jaxpfl.engine.build import simulation_of
from jaxpfl.engine.spec import RunSpec
from jaxpfl.models import build_model, from_linen, lora
from jaxpfl.models.sequences import Recurrent, rotated

# Runs once: compiling is what takes the time.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def layer(params, xs):
    """States h_1 .. h_T of one example: [T, E] -> [T, H]."""
    (a0, a1, a2), (b0, b1, b2), (c0, c1, c2, c3) = params["input"], params["recurrent"], params["bias"]
    h, states = np.zeros(len(c0)), []
    for x in xs:
        r = sigmoid(x @ a0 + c0 + h @ b0)
        z = sigmoid(x @ a1 + c1 + h @ b1)
        n = np.tanh(x @ a2 + c2 + r * (h @ b2 + c3))
        h = (1 - z) * n + z * h
        states.append(h)
    return np.stack(states)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gru:5,4", "gru:5"])
def test_equals_its_equations_in_float64(name):
    """At every position, which so sees no later token, and at the last, where the others are not asked for."""
    with jax.enable_x64(True):
        model, last = (build_model(name, 7, (6,), every=every) for every in (True, False))
        x = np.random.default_rng(0).integers(0, 7, (3, 6))
        params = jit(model.init)(jax.random.key(0), x)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float64")}
        params = jax.tree.map(np.asarray, params)
        expected = []
        for tokens in x:
            states = params["embedding"]["embedding"][tokens]
            for i in range(name.count(",") + 1):
                states = layer(params[f"gru{i}"], states)
            expected.append(states @ params["head"]["kernel"] + params["head"]["bias"])
        expected = np.stack(expected)
        np.testing.assert_allclose(jit(model.apply)(params, x), expected, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(jit(last.apply)(params, x), expected[:, -1], rtol=1e-10, atol=1e-12)


def to_flax(params):
    """The parameters of `Recurrent` under the names of ``flax.linen.GRUCell``."""
    cell = {"hn": {"kernel": params["recurrent"][2], "bias": params["bias"][3]}}
    for gate, name in enumerate("rzn"):
        cell[f"i{name}"] = {"kernel": params["input"][gate], "bias": params["bias"][gate]}
        cell.setdefault(f"h{name}", {"kernel": params["recurrent"][gate]})
    return cell


@pytest.mark.slow
def test_values_and_gradients_are_those_of_flax():
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(0), (6, 3, 4), jnp.float64)
        params = Recurrent(5).init(jax.random.key(1), x)["params"]
        rnn = nn.RNN(nn.GRUCell(5, param_dtype=jnp.float64), time_major=True)

        def flax(params, x):
            return rnn.apply({"params": {"cell": to_flax(params)}}, x)

        @functools.partial(jax.jit, static_argnums=0)
        def states_and_gradients(apply, params, x):
            states, pull = jax.vjp(apply, params, x)
            return states, pull(jnp.sin(jnp.arange(states.size, dtype=float)).reshape(states.shape))

        ours = states_and_gradients(lambda p, x: Recurrent(5).apply({"params": p}, x), params, x)
        theirs = states_and_gradients(flax, params, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), ours, theirs)


def test_a_token_outside_the_vocabulary_is_not_taken_for_another():
    model = build_model("gru:3", 5, (2,))
    params = jit(model.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    logits = jit(model.apply)(params, jnp.array([[0, 4], [0, 5]]))
    np.testing.assert_array_equal(jnp.isfinite(logits).all(axis=1), [True, False])


V, T, WIDTH, HEADS = 7, 6, 8, 2
NAME = f"transformer:{WIDTH},2,{HEADS}"


def normalised(x, params):
    centered = x - x.mean(axis=-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(axis=-1, keepdims=True) + 1e-5) * params["scale"] + params["bias"]


def affine(x, params):
    return x @ params["kernel"] + params["bias"]


def turned(vector, position):
    """Each pair of entries as a complex number, turned by its angle."""
    half = len(vector) // 2
    pairs = vector[:half] + 1j * vector[half:]
    pairs = pairs * np.exp(1j * position * 10000.0 ** (-np.arange(half) / half))
    return np.concatenate([pairs.real, pairs.imag])


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def block(x, params):
    """One sequence, [T, width], position by position and head by head."""
    normal, size = normalised(x, params["norm0"]), WIDTH // HEADS
    query, key, value = (affine(normal, params[name]) for name in ("query", "key", "value"))
    mixed = np.zeros_like(x)
    for h in range(HEADS):
        own = slice(h * size, (h + 1) * size)
        for t in range(len(x)):
            scores = [turned(query[t, own], t) @ turned(key[s, own], s) / np.sqrt(size) for s in range(t + 1)]
            shares = np.exp(scores) / np.exp(scores).sum()
            mixed[t, own] = shares @ value[: t + 1, own]
    x = x + affine(mixed, params["out"])
    return x + affine(gelu(affine(normalised(x, params["norm1"]), params["wide"])), params["narrow"])


def test_it_equals_its_equations_in_float64():
    with jax.enable_x64(True):
        model, last = (build_model(NAME, V, (T,), every=every) for every in (True, False))
        x = np.random.default_rng(0).integers(0, V, (3, T))
        params = jit(model.init)(jax.random.key(0), x)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float64")}
        # Scales and biases off their first values, which would hide one that is left out.
        rng = np.random.default_rng(2)
        moved = jax.tree.map(lambda leaf: np.asarray(leaf) + rng.normal(size=leaf.shape), params)
        expected = []
        for sequence in x:
            states = moved["embedding"]["embedding"][sequence]
            for name in ("block0", "block1"):
                states = block(states, moved[name])
            expected.append(affine(normalised(states, moved["norm"]), moved["head"]))
        expected = np.stack(expected)
        np.testing.assert_allclose(jit(model.apply)(moved, x), expected, rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(jit(last.apply)(moved, x), expected[:, -1], rtol=1e-9, atol=1e-10)


@pytest.mark.slow
def test_products_of_rotated_vectors_depend_on_distances_alone():
    with jax.enable_x64(True):
        query, key = jax.random.normal(jax.random.key(0), (2, 4), jnp.float64)
        turned_query, turned_key = (rotated(jnp.tile(a, (1, T, 1, 1)))[0, :, 0] for a in (query, key))
        products = turned_query @ turned_key.T
        for distance in range(T):
            np.testing.assert_allclose(jnp.diagonal(products, -distance), products[distance, 0], rtol=1e-10)
        assert len(np.unique(np.round(products[:, 0], 6))) == T


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


LENGTH, RANK = 5, 2
ADAPTED = "block*/query/kernel,block*/value/kernel"
KINDS = ("fedavg", "ditto", "persfl", "network-lasso")
"""Methods that send and keep different things: one model, a second one, a teacher's, a neighbour's."""


@functools.cache
def base():
    model = build_model("transformer:8,1", V, (LENGTH,), every=True)
    return model, jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))


def adapted(personal):
    """Adapters of queries and values beside a head that is trained whole; the adapters are personal or shared."""
    return lora(*base(), rank=RANK, at=ADAPTED, trained="head/*", personal="adapters/*" if personal else "")


@functools.cache
def data():
    rng = np.random.default_rng(0)
    draw = lambda n: tuple(rng.integers(0, V, (2, n, LENGTH)))  # noqa: E731
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
