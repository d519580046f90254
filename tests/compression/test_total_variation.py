"""The total-variation update against Johnson's dynamic programme, its KKT conditions, and what is known of it."""

import jax
import jax.numpy as jnp
import messages
import numpy as np
import pytest
from tv_reference import dynamic_programme, kkt_residual

from jaxpfl.uploads.compression import feed_back, total_variation

BATCH, D = 50, 61706

update = jax.jit(total_variation.update)
many = jax.jit(jax.vmap(total_variation.update))
residuals = jax.jit(jax.vmap(kkt_residual))


def gradients(d: int) -> tuple[np.ndarray, np.ndarray]:
    """Fifty vectors [50, d] and their gammas: noise, walks, and what could trip a method up."""
    rng = np.random.default_rng(0)
    i = np.arange(d)
    shapes = [
        *rng.normal(size=(14, d)),
        *(0.1 * np.cumsum(rng.normal(size=(10, d)), axis=1)),
        *(np.sin(i / (10 + d / 20)) + 0.1 * rng.normal(size=(8, d))),
        *rng.integers(-2, 3, size=(8, d)).astype(float),  # ties
        np.zeros(d),
        np.ones(d),
        np.linspace(-1, 1, d),
        (-1.0) ** i,
        2.0 ** -(i % 60),  # each cut at the mean takes one off
        np.where(i == d // 2, 1e4, 0),
        np.where(i < d // 2, 1e-4, 1e4),
        np.where(rng.random(d) < 0.01, 1e3, 1e-3) * rng.normal(size=d),
        -np.sqrt(i),
        np.repeat(rng.normal(size=d // 5 + 1), 5)[:d],
    ]
    return np.stack(shapes), np.resize([1.0, 0.1, 10.0, 0.0, 300.0, 0.6, 1e-3], BATCH)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "most"), [(np.float32, 1e-5), (np.float64, 1e-9)])
def test_kkt_residual_of_fifty_long_vectors(dtype, most):
    with jax.enable_x64(dtype == np.float64):
        g, gamma = (jnp.asarray(a, dtype) for a in gradients(D))
        found = many(g, gamma)
        assert found.value.dtype == dtype
        got = np.asarray(residuals(g, gamma, found))
    assert got.max() <= most, (got.argmax(), got.max())
    if dtype == np.float32:
        return
    # The primal numbers too, against another algorithm (entry 46, 47 and 1: spikes, scales, noise).
    for row in (1, 14, 25, 34, 46, 47):
        want = dynamic_programme(np.asarray(g[row]), float(gamma[row]))
        np.testing.assert_allclose(found.value[row], want, atol=1e-9 * max(1, np.abs(want).max()))


@pytest.mark.parametrize("d", [1, *(pytest.param(d, marks=pytest.mark.slow) for d in (2, 3, 10)), 97])
def test_it_is_the_dynamic_programmes(d):
    with jax.enable_x64(True):
        g, gamma = gradients(d)
        found = many(jnp.asarray(g), jnp.asarray(gamma))
        assert float(residuals(g, gamma, found).max()) <= 1e-12
        for row in range(BATCH):
            want = dynamic_programme(g[row], gamma[row])
            scale = max(1, np.abs(g[row]).max())
            np.testing.assert_allclose(found.value[row], want, atol=1e-12 * scale)


def test_the_residual_sees_what_is_not_optimal():
    with jax.enable_x64(True):
        g, gamma = jnp.asarray(np.random.default_rng(1).normal(size=97)), 0.5
        found = update(g, gamma)
        size = float(jnp.abs(g).max())
        for entry in (0, 7, 96):
            moved = found._replace(value=found.value.at[entry].add(1e-3))
            assert float(kkt_residual(g, gamma, moved)) > 0.9e-3 / size
            moved = found._replace(dual=found.dual.at[entry].add(1e-3))
            assert float(kkt_residual(g, gamma, moved)) > 0.9e-3 / size
        # A pair that balances, but whose dual is not at its bound where neighbours differ: u = g, w = 0.
        assert float(kkt_residual(g, gamma, total_variation.Update(g, 0 * g))) > 0.1


def test_zero_exactly_where_no_cumulative_sum_exceeds_gamma():
    """Whole numbers have exact sums: gamma equal to the largest gives zero, a thousandth less does not."""
    rng = np.random.default_rng(2)
    g = jnp.asarray(rng.integers(-3, 4, size=(50, 97)), jnp.float32)
    largest = jnp.abs(jnp.cumsum(g, axis=1)).max(axis=1)
    assert not np.asarray(many(g, largest).value).any()
    assert (np.abs(np.asarray(many(g, largest * 0.999).value)).max(axis=1) > 0).all()


@pytest.mark.slow
def test_the_texts_example_stalls_and_both_cures():
    """x* = (1, -1, 1, -1), gamma = 0.6, eta = 1 rests at (0.4, 0, 0, 0). A decaying gamma is never farther off than
    neighbouring cumulative sums of size gamma allow, 2 gamma; error feedback arrives although gamma stays."""
    best = jnp.array([1.0, -1, 1, -1])

    def constant(_, at):
        return at[0] - total_variation.compress(at[0] - best, 0.6).value, at[1]

    def decaying(t, at):
        return at[0] - total_variation.compress(at[0] - best, total_variation.decayed(0.6, t)).value, at[1]

    def remembered(_, at):
        sent, memory = feed_back(lambda g: total_variation.compress(g, 0.6), at[1], at[0] - best)
        return at[0] - sent.value, memory

    @jax.jit
    def after(steps):
        start = jnp.zeros(4), jnp.zeros(4)
        return [jax.lax.fori_loop(0, steps, one, start)[0] for one in (constant, decaying, remembered)]

    for steps in (50, 500):
        stalled, near, arrived = after(steps)
        np.testing.assert_allclose(stalled, [0.4, 0, 0, 0], atol=1e-6)
        assert np.abs(near - best).max() <= 2 * 0.6 / np.sqrt(steps) + 1e-6
        np.testing.assert_allclose(arrived, best, atol=1e-6)


def test_the_bits_are_the_run_length_messages():
    g = jnp.asarray(np.random.default_rng(4).normal(size=97), jnp.float32)
    sent = jax.jit(total_variation.compress)(g, 1.0)
    message = messages.encode_runs(np.asarray(sent.value))
    np.testing.assert_array_equal(messages.decode_runs(message, 97), sent.value)
    assert int(sent.bits) == len(message) < 32 * 97


def test_equal_neighbours_are_equal_to_the_bit():
    """A constant stretch is one number, which a run-length code then sends once."""
    noise = 0.05 * np.random.default_rng(3).normal(size=(4, 250))
    g = jnp.asarray(np.repeat([[3.0], [-1.0], [5.0], [2.0]], 250, axis=1) + noise, jnp.float32).reshape(-1)
    u, exact = np.asarray(update(g, 20.0).value), dynamic_programme(np.asarray(g, float), 20.0)
    np.testing.assert_array_equal(np.diff(u) != 0, np.abs(np.diff(exact)) > 1e-5)
    assert 3 <= (np.diff(u) != 0).sum() < 20


def test_not_a_number_stays_one():
    for bad in (np.nan, np.inf):
        g = jnp.zeros(97).at[3].set(bad)
        assert np.isnan(np.asarray(update(g, 1.0).value)).all()


@pytest.mark.parametrize("gamma", [0.1, 1e37])
@pytest.mark.parametrize("numbers", [[3e38] * 3 + [-3e38], [3.4e38] * 4, [1e38, 3e38, 2e38, 3e38]])
def test_huge_numbers_have_the_update_of_their_shares(numbers: list[float], gamma: float):
    """Their cumulative sums are above the largest float. Scaled by a power of two, the update scales with them."""
    g = np.asarray(numbers, np.float32)
    got, small = update(g, gamma), update(g / 2.0**64, gamma / 2.0**64)
    np.testing.assert_array_equal(got.value, np.asarray(small.value) * np.float32(2.0**64))
    np.testing.assert_array_equal(got.dual, np.asarray(small.dual) * np.float32(2.0**64))
    assert np.isfinite(got.value).all()
