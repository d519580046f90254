"""The k-bit quantiser: unbiased inside its range, variance as stated, levels that fit into k bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.compression import quantizers

DRAWS = 40_000


def draws(x: np.ndarray, b: float, bits: int) -> np.ndarray:
    keys = jax.random.split(jax.random.key(0), DRAWS)
    return np.asarray(jax.vmap(lambda key: quantizers.quantize(key, jnp.asarray(x, jnp.float32), b, bits))(keys), float)


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
    sent = quantizers.levels(jax.random.key(1), x, 2.0, 3)
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


@pytest.mark.parametrize("bits", [0, -1, 17])
def test_bits_are_refused_in_one_line(bits: int):
    with pytest.raises(JaxpflError, match=f"bits must be a whole number between 1 and 16, got {bits}"):
        quantizers.quantize(jax.random.key(0), jnp.zeros(2), 1.0, bits)
