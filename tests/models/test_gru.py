"""The GRU: its equations, what it refuses, and LEAF's text from the file to a score."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxpfl
from jaxpfl.data.sources.leaf import ALL_LETTERS
from jaxpfl.models import build_model, classification, gru
from jaxpfl.models.sequences import Recurrent
from jaxpfl.support.errors import JaxpflError

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


@pytest.mark.parametrize("name", ["gru:5", "gru:5,4"])
def test_equals_its_equations_in_float64(name):
    with jax.enable_x64(True):
        model = build_model(name, 7, (6,))
        x = np.random.default_rng(0).integers(0, 7, (3, 6))
        params = jit(model.init)(jax.random.key(0), x)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float64")}
        params = jax.tree.map(np.asarray, params)
        expected = []
        for tokens in x:
            states = params["embedding"]["embedding"][tokens]
            for i in range(name.count(",") + 1):
                states = layer(params[f"gru{i}"], states)
            expected.append(states[-1] @ params["head"]["kernel"] + params["head"]["bias"])
        np.testing.assert_allclose(jit(model.apply)(params, x), np.stack(expected), rtol=1e-10, atol=1e-12)


def to_flax(params):
    """The parameters of `Recurrent` under the names of ``flax.linen.GRUCell``."""
    cell = {"hn": {"kernel": params["recurrent"][2], "bias": params["bias"][3]}}
    for gate, name in enumerate("rzn"):
        cell[f"i{name}"] = {"kernel": params["input"][gate], "bias": params["bias"][gate]}
        cell.setdefault(f"h{name}", {"kernel": params["recurrent"][gate]})
    return cell


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


def test_the_vocabulary_is_the_classes_unless_given():
    tokens = jnp.zeros((1, 4), jnp.int32)
    for model, size in ((gru(9, (3,)), 9), (gru(2, (3,), vocabulary=20), 20)):
        params = jax.eval_shape(model.init, jax.random.key(0), tokens)
        assert params["embedding"]["embedding"].shape == (size, 8)
        assert model.vocabulary == size
        assert jax.eval_shape(model.apply, params, tokens).shape[1] == params["head"]["bias"].size


def test_a_token_outside_the_vocabulary_is_not_taken_for_another():
    model = build_model("gru:3", 5, (2,))
    params = jit(model.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    logits = jit(model.apply)(params, jnp.array([[0, 4], [0, 5]]))
    np.testing.assert_array_equal(jnp.isfinite(logits).all(axis=1), [True, False])


@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_inputs_that_are_no_tokens_are_refused(dtype):
    with pytest.raises(JaxpflError, match="reads tokens, so inputs must be integers"):
        classification(build_model("gru", 10, (80,)), (80,), 10, dtype)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("gru", (28, 28, 1), r"sequences of tokens \[T\], got inputs of shape \(28, 28, 1\)"),
        ("gru", (0,), r"shape \(0,\)"),
        ("gru:0", (80,), "must be positive"),
        ("gru:a", (80,), "takes integers as in 'gru:256,256', got 'gru:a'"),
        ("cnn", (80,), "needs images"),
    ],
)
def test_refusals(name, shape, message):
    with pytest.raises(JaxpflError, match=message) as error:
        build_model(name, 10, shape)
    assert "\n" not in str(error.value)


def test_images_given_to_the_model_itself_are_refused():
    with pytest.raises(JaxpflError, match="sequences of tokens"):
        gru(10).init(jax.random.key(0), jnp.zeros((1, 8, 8)))


@pytest.mark.slow
def test_shakespeare_from_the_file_to_a_score(tmp_path):
    """A text that repeats "abcd": what follows is certain, and the network learns it."""
    text = "abcd" * 30
    user = {"x": [text[i : i + 12] for i in range(60)], "y": [text[i + 12] for i in range(60)]}
    for part in ("train", "test"):
        (tmp_path / "shakespeare" / part).mkdir(parents=True)
        content = {"users": ["A", "B"], "num_samples": [60, 60], "user_data": {"A": user, "B": user}}
        (tmp_path / "shakespeare" / part / "a.json").write_text(json.dumps(content))
    source = jaxpfl.load("shakespeare", str(tmp_path))
    assert source.num_classes == len(ALL_LETTERS)
    federation = jaxpfl.federate(source, partition="natural", clients=2)
    result = jaxpfl.fit(
        "fedavg",
        federation,
        model="gru:16",
        num_classes=source.num_classes,
        rounds=30,
        local_steps=5,
        hyper={"lr": 2.0, "weight_decay": 0.0},
    )
    assert result.history["diverged"].sum() == 0
    assert result.personalized_accuracy.mean() > 0.9
