"""The noise of a release: its map from bits, its tails out to 1e-12, its lattice."""

import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from scipy import stats

from jaxpfl.privacy import noise

KEY = jax.random.key(7)
HALF = 1 << 31


def with_words(patch: pytest.MonkeyPatch, *words: np.ndarray) -> None:
    """Replace the generator's words by these, one array for each call, then by ones."""
    left = [jnp.asarray(word, jnp.uint32) for word in words]
    patch.setattr(
        noise, "bits", lambda key, shape: jnp.broadcast_to(left.pop(0), shape) if left else jnp.ones(shape, jnp.uint32)
    )


BITS = np.array(
    [1, 2, 3, 0x1234, HALF - 1, HALF, HALF + 1, 2**32 - 0x4321, 2**32 - 2, 2**32 - 1], np.uint64
)  # near 0, about one half, near 1


@pytest.mark.parametrize("low", [0, 1, 12345, HALF, 2**32 - 1])
def test_exponential_is_minus_the_logarithm_of_64_bits(monkeypatch, low):
    with_words(monkeypatch, BITS, np.full(len(BITS), low))
    got = np.asarray(noise.exponential(KEY, (len(BITS),)), np.float64)
    with mpmath.workdps(40):
        u = [(mpmath.mpf(int(high)) * 2**32 + low + 0.5) / mpmath.mpf(2) ** 64 for high in BITS]
        want = np.array([float(-mpmath.log(each)) for each in u])
    np.testing.assert_allclose(got, want, rtol=4e-7)


def test_bits_of_zero_are_drawn_again_without_end(monkeypatch):
    """Three zero words and then 5: U is (5 2^32 + low) 2^-160, beyond the reach of any fixed number of words."""
    with monkeypatch.context() as patch, jax.disable_jit():  # a loop that is traced once would see one word only
        with_words(patch, np.zeros(1), np.full(1, 9), np.zeros(1), np.zeros(1), np.full(1, 5))
        got = float(noise.exponential(KEY, (1,))[0])
    assert got == pytest.approx(-math.log(5 + 9.5 / 2**32) + 4 * 32 * math.log(2), rel=4e-7)


@pytest.mark.parametrize(("deviations", "mass"), [(5.42, 2.98e-8), (7.034, 1e-12), (9.0, 1.13e-19)])
def test_the_mass_of_a_tail(monkeypatch, deviations, mass):
    r"""A share :math:`\arccos(t / \sqrt{2E}) / \pi` of all points with :math:`E > t^2/2` lies beyond t.

    The integral over E, with the radius that the code makes of the bits of :math:`e^{-E}` and the cosines of a million
    angles, against SciPy's; the integral is right to 1e-4.
    """
    assert stats.norm.sf(deviations) == pytest.approx(mass, rel=2e-2)
    edges = np.linspace(deviations**2 / 2, deviations**2 / 2 + 14, 20_001)
    middle = (edges[1:] + edges[:-1]) / 2
    u = np.array([int(mpmath.exp(-mpmath.mpf(e)) * mpmath.mpf(2) ** 96) for e in middle], object)
    # 96 bits: where the upper 32 are zero, the code draws again and takes the next 32.
    deep = u < 2**64
    high = np.array([(x >> 32) if d else (x >> 64) for x, d in zip(u, deep, strict=True)], np.uint64)
    low = np.array([x & 0xFFFFFFFF if d else (x >> 32) & 0xFFFFFFFF for x, d in zip(u, deep, strict=True)], np.uint64)
    with monkeypatch.context() as patch:
        with_words(patch, np.maximum(high, 1), low)
        size = np.asarray(noise.exponential(KEY, (len(middle),)), np.float64) + deep * 32 * math.log(2)
    ratio = np.minimum(deviations / np.sqrt(2 * size), 1)
    total = (-np.diff(np.exp(-edges)) * np.arccos(ratio) / np.pi).sum()
    assert total == pytest.approx(stats.norm.sf(deviations), rel=1e-3)


def test_draws_from_the_far_tail(monkeypatch):
    """Given that the first word is zero, once in 2^32 draws, the share of draws beyond t is 2^32 times the tail.

    10^6 such draws through the code's own loop; 5 standard errors of a binomial count, false alarms 6e-7 each.
    """
    n, words, first = 1_000_000, noise.bits, []

    def zero_first(key, shape):
        first.append(None)
        return jnp.zeros(shape, jnp.uint32) if len(first) == 1 else words(key, shape)

    with monkeypatch.context() as patch:
        patch.setattr(noise, "bits", zero_first)
        drawn = np.abs(np.asarray(jax.jit(lambda: noise.standard_normal(KEY, (n,)))()))
    for beyond in (6.7, 7.034):
        share = 2 * stats.norm.sf(beyond) * 2**32
        assert abs((drawn > beyond).sum() - n * share) < 5 * math.sqrt(n * share)


def test_the_body_is_normal():
    """Level 1e-6 each: the distribution, and the counts beyond 3 and 4, of 10^6 draws; other scales are refused."""
    drawn = np.asarray(jax.jit(lambda: noise.standard_normal(KEY, (1_000_001,)))(), np.float64)
    assert stats.kstest(drawn, "norm").pvalue > 1e-6
    assert stats.kstest(drawn / 1.02, "norm").pvalue < 1e-6
    for beyond in (3.0, 4.0):
        assert stats.binomtest((np.abs(drawn) > beyond).sum(), drawn.size, 2 * stats.norm.sf(beyond)).pvalue > 1e-6
    # The two of a pair share a radius: neither they nor their squares are correlated.
    one, other = drawn[:500_000], drawn[500_001:]
    assert len(np.unique(np.float32(other / one))) > 400_000  # as many angles
    for a, b in ((one, other), (one**2, other**2)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(len(a))


def test_laplace():
    drawn = np.asarray(jax.jit(lambda: noise.add_laplace(KEY, jnp.zeros(300_000), 2.0, "a test"))(), np.float64)
    assert stats.kstest(drawn / 2, "laplace").pvalue > 1e-6
    assert stats.kstest(drawn / 2.1, "laplace").pvalue < 1e-6
    np.testing.assert_array_equal(drawn * 2**9, np.round(drawn * 2**9))


@pytest.mark.parametrize(
    ("dtype", "power", "stddev"),
    [
        (jnp.float32, 9, 0.75),
        pytest.param(jnp.float32, 9, 3e-20, marks=pytest.mark.slow),
        pytest.param(jnp.float64, 24, 1.0, marks=pytest.mark.slow),
    ],
)
def test_results_are_on_one_lattice_whatever_was_added(dtype, power, stddev):
    """Without it, sums near zero have last bits that depend on the summands (Mironov 2012)."""
    with jax.enable_x64(dtype == jnp.float64):
        x = stddev * jnp.asarray([0.0, 0.3, 1e-6, -7.7, 100.1], dtype)[:, None] * jnp.ones((5, 2000), dtype)
        got = np.asarray(noise.add_gaussian(KEY, x, stddev, "a test"))
        assert got.dtype == dtype
        step = 2.0 ** (math.floor(math.log2(stddev)) - power)
        steps = got / step
        np.testing.assert_array_equal(steps, np.round(steps))
        assert (steps % 2 == 1).any()  # and on no coarser one
        # Rounding moves by half a step at most.
        raw = np.asarray(x + noise.gaussian(KEY, x, stddev, "a test"))
        assert np.abs(got - raw).max() <= step / 2 * (1 + 1e-6)


def test_without_noise_nothing_changes():
    x = {"a": jnp.asarray([0.1, 3e38, -1e-30]), "b": jnp.asarray(7.7)}
    got = jax.jit(lambda s: noise.add_gaussian(KEY, x, s, "a test"))(0.0)
    assert all((got[name] == x[name]).all() for name in x)
    added = jax.jit(lambda s: noise.add_gaussian(KEY, jnp.asarray([3e38]), s, "a test"))(1e-3)
    assert added[0] == np.float32(3e38)  # no overflow on the way
    assert noise.add_gaussian(KEY, (), 1.0, "a test") == ()


def test_narrow_types_are_widened():
    for dtype in (jnp.bfloat16, jnp.float16):
        got = jax.jit(lambda x: noise.add_gaussian(KEY, x, 1.0, "a test"))(jnp.ones(10_000, dtype))
        assert got.dtype == jnp.float32
        assert len(np.unique(got)) > 2000  # bfloat16 has some 250 values between 1 and 3


@pytest.mark.slow
def test_vmap_draws_what_each_would(monkeypatch):
    """Also where the loop runs for some and not for others: words of one bit are zero half of the time."""
    words = noise.bits
    monkeypatch.setattr(noise, "bits", lambda key, shape: words(key, shape) & 1)
    keys = jax.random.split(KEY, 5)
    together = jax.vmap(lambda key: noise.exponential(key, (3,)))(keys)
    apart = jnp.stack([noise.exponential(key, (3,)) for key in keys])
    np.testing.assert_allclose(together, apart, rtol=1e-6)
    assert float(apart.max()) > 2 * 32 * math.log(2)
