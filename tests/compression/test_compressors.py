"""Compressors: unbiased and of the stated variance where they claim it, messages that carry what they say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.compression import codebook, error_feedback, fixed_width, qsgd, run_length, top_k

KEY = jax.random.key(0)
X = jnp.asarray(np.random.default_rng(0).normal(size=40), jnp.float32)
DRAWS = 20_000

qsgd_compress = jax.jit(qsgd.compress, static_argnums=2)
uniform = jax.jit(fixed_width.uniform, static_argnums=2)
lloyd = jax.jit(codebook.compress, static_argnums=1)


def drawn(compress) -> np.ndarray:
    """[DRAWS, d]."""
    return np.asarray(jax.vmap(lambda key: compress(key, X).value)(jax.random.split(KEY, DRAWS)), float)


@pytest.mark.parametrize("s", [1, 4])
def test_qsgd_is_unbiased_and_of_the_stated_variance(s: int):
    """Each entry's mean within 5 standard errors (40 x 2 comparisons: false alarm below 5e-5), its second moment is
    that of the two levels, and the sum of variances is within the paper's bound."""
    values, x = drawn(lambda key, x: qsgd_compress(key, x, s)), np.asarray(X, float)
    step = np.linalg.norm(x) / s
    f = np.abs(x) / step - np.floor(np.abs(x) / step)
    variance = step**2 * f * (1 - f)
    assert (np.abs(values.mean(axis=0) - x) < 5 * np.sqrt(variance / DRAWS)).all()
    # The variance of the squared error of a two-valued variable: f (1 - f) (1 - 2 f)^2 step^4.
    error = 5 * step**2 * np.sqrt(f * (1 - f) * (1 - 2 * f) ** 2 / DRAWS) + 1e-5
    assert (np.abs(((values - x) ** 2).mean(axis=0) - variance) < error).all()
    assert variance.sum() <= min(len(x) / s**2, np.sqrt(len(x)) / s) * (x**2).sum()


def test_qsgds_message_is_what_is_read():
    norm, levels = jax.jit(qsgd.quantize, static_argnums=2)(KEY, X, 4)
    sent = qsgd_compress(KEY, X, 4)
    message = qsgd.encode(np.asarray(norm), np.asarray(levels))
    np.testing.assert_array_equal(qsgd.dequantize(*map(jnp.asarray, qsgd.decode(message, 40)), 4), sent.value)
    assert len(message) == int(sent.bits)
    assert int(np.abs(levels).max()) <= 4


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_qsgd_of_tiny_and_huge_numbers(scale: float):
    want = qsgd_compress(KEY, X, 4).value * scale
    np.testing.assert_allclose(qsgd_compress(KEY, X * scale, 4).value, want, rtol=1e-5)


@pytest.mark.parametrize("bits", [1, 3])
def test_uniform_is_unbiased(bits: int):
    """5 standard errors, 40 x 2 comparisons: false alarm below 5e-5."""
    values, x = drawn(lambda key, x: uniform(key, x, bits)), np.asarray(X, float)
    step = 2 * np.abs(x).max() / (2**bits - 1)
    assert (np.abs(values.mean(axis=0) - x) < 5 * step / 2 / np.sqrt(DRAWS)).all()
    assert len(np.unique(values.astype(np.float32))) <= 2**bits
    assert int(uniform(KEY, X, bits).bits) == 32 + 40 * bits


def test_sign():
    got = fixed_width.sign(jnp.array([1.0, -2.0, 0.0, 5.0]))
    np.testing.assert_array_equal(got.value, [2, -2, 2, 2])
    assert int(got.bits) == 36


def test_top_k_keeps_the_largest():
    got = top_k.compress(jnp.array([1.0, -5.0, 0.5, 5.0, 3.0]), 3)
    np.testing.assert_array_equal(got.value, [0, -5, 0, 5, 3])
    assert int(got.bits) == len(top_k.encode(np.asarray(got.value))) == 5 + 3 + 3 + 1 + 3 * 32


COMPRESSORS = {
    "qsgd": lambda x: qsgd_compress(KEY, x, 2),
    "uniform": lambda x: uniform(KEY, x, 2),
    "sign": jax.jit(fixed_width.sign),
    "top_k": jax.jit(lambda x: top_k.compress(x, 3)),
    "codebook": lambda x: lloyd(x, 3),
}


@pytest.mark.parametrize("name", COMPRESSORS)
def test_zeros_stay_zeros_and_what_is_no_number_shows(name: str):
    compress = COMPRESSORS[name]
    np.testing.assert_array_equal(compress(jnp.zeros(40)).value, np.zeros(40))
    assert not np.isfinite(np.asarray(compress(X.at[3].set(jnp.nan)).value)).all()
    assert not np.isfinite(np.asarray(compress(X.at[3].set(jnp.inf)).value)).all()


@pytest.mark.parametrize("name", COMPRESSORS)
def test_clients_side_by_side_are_clients_alone(name: str):
    batch = jnp.stack([X, -2 * X[::-1]])
    together = jax.vmap(COMPRESSORS[name])(batch)
    for i, x in enumerate(batch):
        alone = COMPRESSORS[name](x)
        np.testing.assert_allclose(together.value[i], alone.value, rtol=1e-6)
        assert int(together.bits[i]) == int(alone.bits)


@pytest.mark.parametrize("k", [1, 3, 4, 7])
def test_few_distinct_numbers_come_back_to_the_bit(k: int):
    rng = np.random.default_rng(k)
    numbers = np.array([0.1, np.nextafter(np.float32(0.1), 1, dtype=np.float32), -3.3, 7e5, -1e-8, 3.0, 2.9])[:k]
    x = rng.permutation(np.concatenate([numbers, rng.choice(numbers, 207 - k)])).astype(np.float32)
    got = lloyd(jnp.asarray(x), 7)
    np.testing.assert_array_equal(got.value, x)
    assert int(got.bits) == len(run_length.encode(x))


def test_the_codebook_is_a_fixed_point_of_lloyds_algorithm():
    """Each center is the mean of the entries nearest to it, which in one dimension are those between two middles."""
    x = np.asarray(jax.random.normal(KEY, (500,)))
    centers = np.asarray(jax.jit(codebook.centers, static_argnums=(1, 2))(x, 4, 200))
    place = np.abs(x[:, None] - centers).argmin(axis=1)
    np.testing.assert_allclose(centers, [x[place == j].mean() for j in range(4)], atol=1e-5)
    np.testing.assert_array_equal(jax.jit(codebook.nearest)(x, centers), centers[place])


@pytest.mark.parametrize("name", ["sign", "top_k", "codebook"])
def test_error_feedback_sends_all_in_the_end(name: str):
    """The sum of 400 messages of a constant x is 400 x up to the memory, which stays bounded."""
    step = jax.jit(functools.partial(error_feedback.compress, COMPRESSORS[name]))
    memory, total = jnp.zeros(40), np.zeros(40)
    for _ in range(400):
        sent, memory = step(memory, X)
        total += np.asarray(sent.value, float)
    np.testing.assert_allclose(total + np.asarray(memory), 400 * np.asarray(X, float), atol=0.02)
    assert np.abs(total / 400 - np.asarray(X)).max() < 0.2
    # Without it the same messages are off by what each leaves out.
    assert np.abs(np.asarray(COMPRESSORS[name](X).value) - np.asarray(X)).max() > 0.2


def test_refusals():
    for call, message in (
        (lambda: qsgd.compress(KEY, X, 0), "s must be at least 1, got 0"),
        (lambda: top_k.compress(X, 41), "k must be between 1 and the 40 entries of the vector, got 41"),
        (lambda: codebook.compress(X, 0), "k must be at least 1, got 0"),
        (lambda: fixed_width.uniform(KEY, X, 17), "bits must be a whole number between 1 and 16, got 17"),
    ):
        with pytest.raises(JaxpflError, match=f"^{message}$"):
            call()


LARGEST = float(np.finfo(np.float32).max)
EXTREMES = {
    "huge": [3e38, -3e38, 1e38, 2e38],
    "the largest": [LARGEST] * 4,
    "huge and small": [3e38, 1.0, -2e38, 0.0],
    "near the smallest": [2e-37, -2.5e-37, 3e-37, 1e-37],
}


@pytest.mark.parametrize("numbers", EXTREMES.values(), ids=EXTREMES)
def test_numbers_at_the_ends_of_the_range(numbers: list[float]):
    """Messages equal a float64 computation, or are not finite if their own scale overflows."""
    x, wide = jnp.asarray(numbers, jnp.float32), np.asarray(numbers, np.float32).astype(float)
    sign = np.abs(wide).mean() * np.where(wide < 0, -1, 1)
    np.testing.assert_allclose(COMPRESSORS["sign"](x).value, sign, rtol=1e-6)

    value = np.asarray(uniform(KEY, x, 4).value, float)
    step = 2 * np.abs(wide).max() / 15
    assert (np.abs(value - wide) <= step * (1 + 1e-6)).all()
    place = (value + np.abs(wide).max()) / step
    np.testing.assert_allclose(place, np.round(place), atol=1e-4)

    norm = np.linalg.norm(wide)
    value = np.asarray(qsgd_compress(KEY, x, 1).value, float)
    if norm > LARGEST:
        assert not np.isfinite(value).any()
    else:
        np.testing.assert_allclose(value[value != 0], norm * np.sign(wide[value != 0]), rtol=1e-6)
        assert (value != 0).any()

    np.testing.assert_array_equal(jax.jit(lambda x: top_k.compress(x, 4).value)(x), x)
    value = np.asarray(lloyd(x, 1).value, float)
    np.testing.assert_allclose(value, len(numbers) * [wide.mean()], rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e30, 2.0**126])
def test_uniform_does_not_depend_on_the_unit(scale: float):
    x = np.asarray(X) / 4
    want = np.asarray(uniform(KEY, x, 4).value, float) * scale
    np.testing.assert_allclose(uniform(KEY, x * np.float32(scale), 4).value, want, rtol=1e-4)


def test_few_distinct_subnormal_numbers_come_back_to_the_bit():
    """Zero and minus zero are two numbers, as they are to the run-length code; XLA compares all of these as equal."""
    x = np.array([1e-42, 2e-42, 1.0, -0.0, 0.0, -1e-45, 2e-42], np.float32)
    got = lloyd(x, 6)
    np.testing.assert_array_equal(np.asarray(got.value).view(np.int32), x.view(np.int32))
    assert int(got.bits) == len(run_length.encode(x))


def test_a_codebook_shows_what_is_no_number_whatever_its_sign():
    for wrong in (np.nan, -np.nan, np.inf, -np.inf):
        assert not np.isfinite(np.asarray(lloyd(X.at[3].set(wrong), 2).value)).any()
