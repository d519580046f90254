"""Compressors by name with arguments: what they stand for, what is refused, and that feedback makes contractions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.compression import codebook, fixed_width, qsgd, resolve, top_k, total_variation

KEY = jax.random.key(0)
X = jnp.asarray(np.random.default_rng(0).normal(size=40), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("qsgd", lambda: qsgd.compress(KEY, X, 4)),
        ("qsgd:levels=1", lambda: qsgd.compress(KEY, X, 1)),
        ("top-k", lambda: top_k.compress(X, 1)),
        ("top-k:share=0.2", lambda: top_k.compress(X, 8)),
        ("top-k:share=1", lambda: top_k.compress(X, 40)),
        ("sign", lambda: fixed_width.sign(X)),
        ("uniform:bits=3", lambda: fixed_width.uniform(KEY, X, 3)),
        pytest.param("tv:gamma=0.6,decay=false", lambda: total_variation.compress(X, 0.6), marks=pytest.mark.slow),
        ("tv:gamma=0.6", lambda: total_variation.compress(X, 0.3)),  # the fourth round: 0.6 / sqrt(4)
        ("tv:gamma=0.6,codebook=3", lambda: codebook.compress(total_variation.update(X, 0.3).value, 3)),
        ("codebook:size=4", lambda: codebook.compress(X, 4)),
    ],
)
def test_names_and_arguments(text: str, want):
    got, want = jax.jit(lambda: (resolve(text).compress(KEY, jnp.int32(3), X), want()))()
    np.testing.assert_array_equal(got.value, want.value)
    assert int(got.bits) == int(want.bits)


def test_feedback_is_what_is_asked_for():
    assert [resolve(f"sign{more}").feedback for more in ("", ":feedback=true", ":feedback=false")] == [
        None,
        True,
        False,
    ]
    own = resolve("qsgd")
    assert resolve(own) is own


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("qsdg", r"unknown compressor 'qsdg': did you mean 'qsgd'\? \(known: codebook, lossless, qsgd, sign"),
        ("topk", "did you mean 'top-k'"),
        ("qsgd:level=2", "unknown argument of compressor qsgd 'level': did you mean 'levels'"),
        ("sign:bits=2", "unknown argument of compressor sign 'bits'"),
        ("qsgd:", "a compressor is NAME or NAME:argument=value"),
        ("qsgd:levels=2,levels=3", "each once; got"),
        ("qsgd:levels=0", "qsgd:levels must be at least 1, got 0"),
        ("qsgd:levels=1.5", "qsgd:levels must be an int, got '1.5'"),
        ("qsgd:feedback=1", "qsgd:feedback must be a bool, got '1'"),
        ("top-k:share=0", "top-k:share must be > 0 and <= 1, got 0"),
        ("top-k:share=1.1", "top-k:share must be > 0 and <= 1, got 1.1"),
        ("top-k:share=nan", "top-k:share must be a float, got 'nan'"),
        ("uniform:bits=17", "bits must be a whole number between 1 and 16, got 17"),
        ("tv", "compressor tv needs gamma: tv:gamma=..."),
        ("tv:gamma=-1", "tv:gamma must be >= 0 and finite, got -1"),
        ("tv:gamma=1e999", "tv:gamma must be >= 0 and finite, got inf"),
        ("tv:gamma=1,codebook=-2", "tv:codebook must be at least 1, got -2"),
        ("codebook:size=0", "codebook:size must be at least 1, got 0"),
    ],
)
def test_refusals(text: str, message: str):
    with pytest.raises(JaxpflError, match=message) as caught:
        resolve(text)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["qsgd:levels=1", "qsgd:levels=9", "uniform:bits=1", "uniform:bits=3"])
def test_unbiased_ones_are_contractions_under_feedback(text: str):
    """``E |Q(x) / (1 + omega) - x|^2 <= omega / (1 + omega) |x|^2``, over 4000 draws, also of a vector of one large
    entry (where the uniform one's bound is all but reached); for levels = 1 and bits = 1 the message as it is is
    further from x than zero is. A mean of 4000 bounded errors is within 5 % here."""
    compressor = resolve(text)
    assert compressor.omega is not None
    omega = compressor.omega(40)
    keys = jax.random.split(KEY, 4000)
    for x in (X, X.at[0].set(20.0)):

        def left(send, x=x):
            values = jax.jit(jax.vmap(lambda key: send(key, jnp.int32(0), x).value))(keys)
            return float(((np.asarray(values, float) - np.asarray(x, float)) ** 2).sum(axis=1).mean() / (x**2).sum())

        assert left(compressor.fed_back) <= 1.05 * omega / (1 + omega)
        assert left(compressor.compress) <= 1.05 * omega
        if omega > 5 and x is X:
            assert left(compressor.compress) > 1


@pytest.mark.parametrize(
    "text",
    [
        *("sign", "top-k:share=0.05", "codebook:size=2"),
        *(pytest.param(tv, marks=pytest.mark.slow) for tv in ("tv:gamma=2", "tv:gamma=2,codebook=3")),
    ],
)
def test_biased_ones_are_nearer_than_zero(text: str):
    compressor = resolve(text)
    assert compressor.omega is None
    many = jax.random.normal(KEY, (200, 40)) * jnp.exp(2 * jax.random.normal(jax.random.key(1), (200, 40)))
    values = jax.jit(jax.vmap(lambda x: compressor.fed_back(KEY, jnp.int32(0), x).value))(many)
    assert (((values - many) ** 2).sum(axis=1) <= (many**2).sum(axis=1) * (1 + 1e-6)).all()
