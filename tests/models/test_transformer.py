"""The transformer: its equations, that it sees no later token, and models with a prediction at each position."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.models import build_model
from jaxpfl.models.sequences import rotated
from jaxpfl.support.errors import JaxpflError

V, T, WIDTH, HEADS = 7, 6, 8, 2
NAME = f"transformer:{WIDTH},2,{HEADS}"

# Runs once: compiling is what takes the time.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


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
        model = build_model(NAME, V, (T,), every=True)
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
        np.testing.assert_allclose(jit(model.apply)(moved, x), np.stack(expected), rtol=1e-9, atol=1e-10)


def test_products_of_rotated_vectors_depend_on_distances_alone():
    with jax.enable_x64(True):
        query, key = jax.random.normal(jax.random.key(0), (2, 4), jnp.float64)
        turned_query, turned_key = (rotated(jnp.tile(a, (1, T, 1, 1)))[0, :, 0] for a in (query, key))
        products = turned_query @ turned_key.T
        for distance in range(T):
            np.testing.assert_allclose(jnp.diagonal(products, -distance), products[distance, 0], rtol=1e-10)
        assert len(np.unique(np.round(products[:, 0], 6))) == T


@pytest.mark.parametrize("name", ["gru:5,4", NAME])
def test_a_position_sees_no_later_token_and_the_last_is_the_classification(name):
    every, last = (build_model(name, V, (T,), every=flag) for flag in (True, False))
    x = np.random.default_rng(1).integers(0, V, (2, T)).astype(np.int32)
    params, apply = jit(every.init)(jax.random.key(0), x), jit(every.apply)
    logits = apply(params, x)
    assert logits.shape == (2, T, V)
    np.testing.assert_allclose(logits[:, -1], jit(last.apply)(params, x), rtol=1e-5, atol=1e-6)
    other = x.copy()
    other[:, 3:] = (other[:, 3:] + 1) % V
    changed = apply(params, other)
    np.testing.assert_allclose(changed[:, :3], logits[:, :3], rtol=1e-5, atol=1e-6)
    assert (np.abs(changed[:, 3:] - logits[:, 3:]).max(axis=(1, 2)) > 1e-3).all()


def test_a_token_outside_the_vocabulary_is_not_taken_for_another():
    model = build_model(NAME, V, (2,))
    params = jit(model.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    logits = jit(model.apply)(params, jnp.array([[0, V - 1], [0, V]]))
    np.testing.assert_array_equal(jnp.isfinite(logits).all(axis=1), [True, False])


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("transformer:8", (T,), "width,blocks or width,blocks,heads, .* got 8"),
        ("transformer:8,1,1,1", (T,), "got 8,1,1,1"),
        ("transformer:8,0", (T,), "got 8,0"),
        ("transformer:10,1", (T,), "multiple of twice the heads .4 unless given., got 10,1"),
        ("transformer", (8, 8, 1), r"the model 'transformer' needs sequences of tokens \[T\], got inputs of shape"),
        ("transformer:a", (T,), "takes integers as in 'transformer:64,2'"),
    ],
)
def test_refusals(name, shape, message):
    with pytest.raises(JaxpflError, match=message):
        build_model(name, V, shape)
