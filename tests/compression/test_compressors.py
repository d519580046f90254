"""Compressors: unbiased and of the stated variance where they claim it, messages that carry what they say, names."""

import functools

import jax
import jax.numpy as jnp
import messages
import numpy as np
import pytest

from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.compression import feed_back, quantizers, resolve, total_variation

KEY = jax.random.key(0)
X = jnp.asarray(np.random.default_rng(0).normal(size=40), jnp.float32)
DRAWS = 20_000

qsgd_compress = jax.jit(quantizers.qsgd, static_argnums=2)
uniform = jax.jit(quantizers.uniform, static_argnums=2)
lloyd = jax.jit(quantizers.codebook, static_argnums=1)
top_k = jax.jit(quantizers.top_k, static_argnums=1)
sign = jax.jit(quantizers.sign)


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
    norm, levels = jax.jit(quantizers.quantize_qsgd, static_argnums=2)(KEY, X, 4)
    sent = qsgd_compress(KEY, X, 4)
    message = messages.encode_qsgd(np.asarray(norm), np.asarray(levels))
    np.testing.assert_array_equal(
        quantizers.dequantize_qsgd(*map(jnp.asarray, messages.decode_qsgd(message, 40)), 4), sent.value
    )
    assert len(message) == int(sent.bits)
    assert int(np.abs(levels).max()) <= 4


@pytest.mark.parametrize("bits", [1, 3])
def test_uniform_is_unbiased(bits: int):
    """5 standard errors, 40 x 2 comparisons: false alarm below 5e-5."""
    values, x = drawn(lambda key, x: uniform(key, x, bits)), np.asarray(X, float)
    step = 2 * np.abs(x).max() / (2**bits - 1)
    assert (np.abs(values.mean(axis=0) - x) < 5 * step / 2 / np.sqrt(DRAWS)).all()
    assert len(np.unique(values.astype(np.float32))) <= 2**bits
    assert int(uniform(KEY, X, bits).bits) == 32 + 40 * bits


def test_sign():
    got = sign(jnp.array([1.0, -2.0, 0.0, 5.0]))
    np.testing.assert_array_equal(got.value, [2, -2, 2, 2])
    assert int(got.bits) == 36


def test_top_k_keeps_the_largest():
    got = top_k(jnp.array([1.0, -5.0, 0.5, 5.0, 3.0]), 3)
    np.testing.assert_array_equal(got.value, [0, -5, 0, 5, 3])
    assert int(got.bits) == len(messages.encode_top_k(np.asarray(got.value))) == 5 + 3 + 3 + 1 + 3 * 32


COMPRESSORS = {
    "qsgd": lambda x: qsgd_compress(KEY, x, 2),
    "uniform": lambda x: uniform(KEY, x, 2),
    "sign": sign,
    "top_k": lambda x: top_k(x, 3),
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
    assert int(got.bits) == len(messages.encode_runs(x))


def test_the_codebook_is_a_fixed_point_of_lloyds_algorithm():
    """Each center is the mean of the entries nearest to it, which in one dimension are those between two middles."""
    x = np.asarray(jax.random.normal(KEY, (500,)))
    centers = np.asarray(jax.jit(quantizers.codebook_centers, static_argnums=(1, 2))(x, 4, 200))
    place = np.abs(x[:, None] - centers).argmin(axis=1)
    np.testing.assert_allclose(centers, [x[place == j].mean() for j in range(4)], atol=1e-5)
    np.testing.assert_array_equal(jax.jit(quantizers.nearest)(x, centers), centers[place])


@pytest.mark.parametrize("name", ["sign", "top_k", "codebook"])
def test_error_feedback_sends_all_in_the_end(name: str):
    """The sum of 400 messages of a constant x is 400 x up to the memory, which stays bounded."""
    step = jax.jit(functools.partial(feed_back, COMPRESSORS[name]))
    memory, total = jnp.zeros(40), np.zeros(40)
    for _ in range(400):
        sent, memory = step(memory, X)
        total += np.asarray(sent.value, float)
    np.testing.assert_allclose(total + np.asarray(memory), 400 * np.asarray(X, float), atol=0.02)
    assert np.abs(total / 400 - np.asarray(X)).max() < 0.2
    # Without it the same messages are off by what each leaves out.
    assert np.abs(np.asarray(COMPRESSORS[name](X).value) - np.asarray(X)).max() > 0.2


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

    np.testing.assert_array_equal(top_k(x, 4).value, x)
    value = np.asarray(lloyd(x, 1).value, float)
    np.testing.assert_allclose(value, len(numbers) * [wide.mean()], rtol=1e-6)


@pytest.mark.parametrize(("compress", "rtol"), [(qsgd_compress, 1e-5), (uniform, 1e-4)], ids=["qsgd", "uniform"])
@pytest.mark.parametrize("scale", [1e-30, 1e30, 2.0**126])
def test_messages_do_not_depend_on_the_unit(compress, rtol: float, scale: float):
    x = np.asarray(X) / 4
    want = np.asarray(compress(KEY, x, 4).value, float) * scale
    np.testing.assert_allclose(compress(KEY, x * np.float32(scale), 4).value, want, rtol=rtol)


def test_few_distinct_subnormal_numbers_come_back_to_the_bit():
    """Zero and minus zero are two numbers, as they are to the run-length code; XLA compares all of these as equal."""
    x = np.array([1e-42, 2e-42, 1.0, -0.0, 0.0, -1e-45, 2e-42], np.float32)
    got = lloyd(x, 6)
    np.testing.assert_array_equal(np.asarray(got.value).view(np.int32), x.view(np.int32))
    assert int(got.bits) == len(messages.encode_runs(x))


def test_a_codebook_shows_what_is_no_number_whatever_its_sign():
    for wrong in (np.nan, -np.nan, np.inf, -np.inf):
        assert not np.isfinite(np.asarray(lloyd(X.at[3].set(wrong), 2).value)).any()


def draws(x: np.ndarray, b: float, bits: int) -> np.ndarray:
    keys = jax.random.split(jax.random.key(0), DRAWS)
    draw = jax.jit(jax.vmap(lambda key: quantizers.quantize(key, jnp.asarray(x, jnp.float32), b, bits)))
    return np.asarray(draw(keys), float)


@pytest.mark.parametrize("bits", [1, 2, 5])
def test_unbiased_inside_and_of_the_stated_variance(bits: int):
    """At each x: |mean - x| within 4.5 standard errors (7 x 3 comparisons: false alarm below 2e-4), and the variance is
    (2b/L)^2 f (1 - f), at most b^2/L^2."""
    b, x = 1.7, np.array([-1.7, -1.2, -0.31, 0.0, 0.4, 1.5, 1.7])
    step = 2 * b / (2**bits - 1)
    z = (x + b) / step
    f = z - np.floor(z)
    f = np.where(np.isclose(f, 1) | np.isclose(f, 0), 0, f)
    got = draws(x, b, bits)
    exact = step**2 * f * (1 - f)
    assert (np.abs(got.mean(axis=0) - x) <= 4.5 * np.sqrt(exact / DRAWS) + 1e-6).all()
    # The fourth moment of a two-valued variable gives the error of its variance.
    error = step**2 * np.sqrt(np.maximum(f * (1 - f) * (1 - 2 * f) ** 2, 0) / DRAWS) + step**2 * 2 / DRAWS
    assert (np.abs(got.var(axis=0) - exact) <= 4.5 * error + 1e-6).all()
    assert (exact <= float(quantizers.variance_bound(b, bits)) * (1 + 1e-6)).all()


def test_levels_are_k_bit_numbers_and_what_is_outside_is_clipped():
    x = jnp.array([-np.inf, -9.0, 0.3, 9.0, np.inf])
    sent = jax.jit(quantizers.levels, static_argnums=3)(jax.random.key(1), x, 2.0, 3)
    assert sent.dtype == jnp.int32
    assert np.asarray(sent)[[0, 1, 3, 4]].tolist() == [0, 0, 7, 7]
    assert 0 <= int(sent[2]) <= 7
    np.testing.assert_allclose(quantizers.values(jnp.array([0, 7]), 2.0, 3), [-2.0, 2.0], rtol=1e-6)


@pytest.mark.parametrize(("mean", "variance", "bits"), [(0.0, 0.02, 1), (0.3, 0.5, 2), (-0.7, 0.01, 4), (0.1, 0.3, 8)])
def test_expected_variance_over_a_normal_population(mean: float, variance: float, bits: int):
    """The Fourier series against quadrature of f (1 - f)."""
    b = 4.0
    step = 2 * b / (2**bits - 1)
    x = mean + np.sqrt(variance) * np.linspace(-9, 9, 400_001)
    density = np.exp(-((x - mean) ** 2) / (2 * variance))
    f = np.mod((x + b) / step, 1)
    exact = step**2 * (density * f * (1 - f)).sum() / density.sum()
    with jax.enable_x64(True):
        got = float(quantizers.normal_variance(mean, variance, b, bits))
    assert got == pytest.approx(exact, rel=1e-6)
    assert got <= float(quantizers.variance_bound(b, bits))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("qsgd", lambda: quantizers.qsgd(KEY, X, 4)),
        ("top-k:share=0.2", lambda: quantizers.top_k(X, 8)),
        ("top-k", lambda: quantizers.top_k(X, 1)),
        ("sign", lambda: quantizers.sign(X)),
        ("uniform:bits=3", lambda: quantizers.uniform(KEY, X, 3)),
        ("tv:gamma=0.6,codebook=3", lambda: quantizers.codebook(total_variation.update(X, 0.3).value, 3)),
        ("codebook:size=4", lambda: quantizers.codebook(X, 4)),
    ],
)
def test_names_and_arguments(text: str, want):
    got, want = jax.jit(lambda: (resolve(text).compress(KEY, jnp.int32(3), X), want()))()
    np.testing.assert_array_equal(got.value, want.value)
    assert int(got.bits) == int(want.bits)


def test_an_entry_in_the_middle_of_two_centers_goes_to_the_lower():
    low, middle, high = (jnp.float32(1 + i * 2.0**-23) for i in range(3))
    assert quantizers.nearest(jnp.array([middle]), jnp.array([low, high])) == low


def test_feedback_is_what_is_asked_for():
    found = [resolve(f"sign{more}").feedback for more in ("", ":feedback=true", ":feedback=false")]
    assert found == [None, True, False]
    own = resolve("qsgd")
    assert resolve(own) is own


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("qsdg", r"unknown compressor 'qsdg': did you mean 'qsgd'\? \(known: codebook, lossless, qsgd, sign"),
        ("qsgd:level=2", "unknown argument of compressor qsgd 'level': did you mean 'levels'"),
        ("qsgd:levels=2,levels=3", "with each argument once, got"),
        ("qsgd:levels=0", "qsgd:levels must be a whole number >= 1, got 0"),
        ("qsgd:feedback=1", "qsgd:feedback must be a bool, got '1'"),
        ("top-k:share=0", "top-k:share must be > 0 and <= 1, got 0"),
        ("uniform:bits=17", "bits must be a whole number between 1 and 16, got 17"),
        ("tv", "compressor tv requires gamma: write tv:gamma=..."),
        ("tv:gamma=-1", "tv:gamma must be >= 0 and finite, got -1"),
        ("tv:gamma=1,codebook=-2", "tv:codebook must be a whole number >= 1, got -2"),
    ],
)
def test_refusals(text: str, message: str):
    with pytest.raises(JaxpflError, match=message) as caught:
        resolve(text)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["qsgd:levels=1", "uniform:bits=3"])
def test_unbiased_ones_are_contractions_under_feedback(text: str):
    """``E |Q(x) / (1 + omega) - x|^2 <= omega / (1 + omega) |x|^2``, over 4000 draws, also of a vector of one large
    entry (where the uniform one's bound is all but reached); for levels = 1 and bits = 1 the message as it is is
    further from x than zero is. A mean of 4000 bounded errors is within 5 % here."""
    compressor = resolve(text)
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
    [*("sign", "top-k:share=0.05", "codebook:size=2"), pytest.param("tv:gamma=2,codebook=3", marks=pytest.mark.slow)],
)
def test_biased_ones_are_nearer_than_zero(text: str):
    compressor = resolve(text)
    assert compressor.omega is None
    many = jax.random.normal(KEY, (200, 40)) * jnp.exp(2 * jax.random.normal(jax.random.key(1), (200, 40)))
    values = jax.jit(jax.vmap(lambda x: compressor.fed_back(KEY, jnp.int32(0), x).value))(many)
    assert (((values - many) ** 2).sum(axis=1) <= (many**2).sum(axis=1) * (1 + 1e-6)).all()
