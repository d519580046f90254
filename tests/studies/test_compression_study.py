"""The study of compressed updates against NumPy in float64, and the text's demo against its closed form."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

from jaxpfl.benchmarks.studies import compression
from jaxpfl.benchmarks.studies.compression import CompressionSettings
from jaxpfl.data import federate, load
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.compression import total_variation

SMALL = CompressionSettings(
    data="planted:clients=4,clusters=2,examples=30,dim=5,seed=3",
    compressors=("lossless", "sign", "qsgd:levels=2"),
    steps=40,
    rates=(0.3, 1.0),
    targets=(1e-2, 1e-9),
)


@pytest.fixture(scope="module")
def result() -> dict:
    return compression.run(SMALL)


@pytest.mark.slow
def test_the_demo_stalls_crawls_or_arrives():
    """With eta = 1, x_{t+1} - x* = g - u has the cumulative sums w with |w| <= gamma_t: the update of an alternating
    gradient larger than twice gamma takes gamma off its first entry and twice gamma off all others."""
    demo = compression.demo()
    optimum, shown = np.array(compression.OPTIMUM), compression.SHOWN
    for t in shown:
        gamma = 0.6 / np.sqrt(t)
        expected = optimum * (1 - np.array([1, 2, 2, 2]) * gamma)
        assert demo["points"]["constant"][str(t)] == pytest.approx([0.4, 0, 0, 0], abs=1e-6)
        if t > 1:
            assert demo["points"]["decaying"][str(t)] == pytest.approx(expected.tolist(), abs=1e-5)
        if t > 2:
            assert demo["points"]["error feedback"][str(t)] == pytest.approx(optimum.tolist(), abs=1e-5)
    assert demo["points"]["error feedback"]["2"] == pytest.approx([1, -0.8, 0.8, -0.8], abs=1e-5)


@pytest.mark.slow
def test_no_update_is_the_one_that_the_text_prints():
    """u^T g = |u|^2 + gamma TV(u) > 0 for every update but zero, and the printed one has u^T g = 0."""
    printed = compression.demo()["printed"]
    assert printed == {"update_times_gradient": 0.0, "square_distances": [4.0, 8.0, 4.0, 0.0]}
    g, gammas = -jnp.array(compression.OPTIMUM), jnp.linspace(0.01, 1.2, 50)
    updates = np.asarray(jax.jit(jax.vmap(lambda gamma: total_variation.update(g, gamma).value))(gammas), float)
    variation = np.abs(np.diff(updates, append=0)).sum(axis=1)
    np.testing.assert_allclose(updates @ np.asarray(g), (updates**2).sum(axis=1) + gammas * variation, atol=1e-5)
    assert (np.abs(updates).max(axis=1) > 0).tolist() == (gammas < 1).tolist()


def pooled() -> tuple[np.ndarray, np.ndarray]:
    source = load(SMALL.data)
    x = np.concatenate([source.x_train, np.ones((len(source.x_train), 1))], axis=1)
    return x.astype(float), 2.0 * source.y_train - 1


def objective(at: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    return float(np.logaddexp(0, -y * (x @ at)).mean() + SMALL.l2 / 2 * at @ at)


@pytest.mark.slow
def test_the_optimum_is_that_of_another_solver(result: dict):
    x, y = pooled()
    found = minimize(objective, np.zeros(6), args=(x, y), method="BFGS", options={"gtol": 1e-9})
    at, curvature = compression.optimum(x, y, SMALL.l2)
    np.testing.assert_allclose(at, found.x, atol=1e-5)
    assert result["optimum"] == pytest.approx(objective(at, x, y), abs=1e-6)
    assert curvature == pytest.approx(np.linalg.norm(x, 2) ** 2 / len(y) / 4 + SMALL.l2)


@pytest.mark.slow
def test_lossless_is_gradient_descent(result: dict):
    x, y = pooled()
    best, curvature = compression.optimum(x, y, SMALL.l2)
    at, gaps = np.zeros(6), []
    row = result["compressors"]["lossless"]
    for _ in range(SMALL.steps + 1):
        gaps.append(objective(at, x, y) - objective(best, x, y))
        p = 1 / (1 + np.exp(y * (x @ at)))
        at = at - row["rate"] / curvature * (-(y * p) @ x / len(y) + SMALL.l2 * at)
    np.testing.assert_allclose(row["curve"]["gap"], np.maximum(gaps, compression.RESOLUTION), rtol=1e-2, atol=3e-7)
    assert row["curve"]["bits"] == [32 * 6 * t for t in range(SMALL.steps + 1)]
    assert row["bits"] == 32 * 6 * SMALL.steps
    reached = min(t for t, gap in enumerate(row["curve"]["gap"]) if gap <= 1e-2)
    assert row["bits_to"]["0.01"] == 32 * 6 * reached
    assert row["bits_to"]["1e-09"] is None


@pytest.mark.slow
def test_the_bits_are_those_of_the_code(result: dict):
    assert result["compressors"]["sign"]["bits"] == (32 + 6) * SMALL.steps
    assert 32 * SMALL.steps < result["compressors"]["qsgd:levels=2"]["bits"] < 32 * 6 * SMALL.steps


def test_clients_of_unequal_sizes_are_weighed_by_them():
    """Lossless descent on padded clients follows that of the pooled data, whoever holds what."""
    given = replace(SMALL, data="digits-of-two", compressors=("lossless",))
    source = load(SMALL.data)._replace(users_train=None, users_test=None)
    split = federate(source, partition="lognormal", sigma=1.0, clients=4, test_share=0.0).train
    assert len(set(split.size.tolist())) > 1
    mask = np.asarray(split.mask)
    x = np.concatenate([split.x, np.ones((*mask.shape, 1), np.float32)], axis=-1) * mask[..., None]
    y = np.where(split.y > 0, 1.0, -1.0) * mask
    found, curvature = compression.optimum(x[mask].astype(float), y[mask], given.l2)
    problem = compression.Problem(*map(jnp.asarray, (x, y.astype(np.float32), mask)), 0.0, curvature)
    run = compression.measured(given, problem)["lossless"]
    px, py = pooled()
    at = np.zeros(6)
    for _ in range(given.steps):
        p = 1 / (1 + np.exp(py * (px @ at)))
        at = at - given.rates[0] / curvature * (-(py * p) @ px / len(py) + given.l2 * at)
    assert run.gap[0, -1] == pytest.approx(objective(at, px, py), abs=1e-6)
    assert objective(found, px, py) < run.gap[0, -1]


def test_mini_batches_are_of_the_client_and_unbiased():
    """One step from zero along gradients of single examples: its mean over 4000 keys is that along the full gradient,
    within 4.5 standard errors in each of 6 coordinates (a false alarm in 25 000 runs)."""
    given = replace(SMALL, batch=1, steps=1)
    problem = compression.load(given)
    lossless = compression.resolve("lossless")

    def change(key: jax.Array, given: CompressionSettings) -> jax.Array:
        # The loss after a step is nearly linear in a small step: its mean is that along the mean gradient.
        return compression.descend(key, jnp.float32(0.02), problem, lossless, given)[0][1]

    noisy = np.asarray(jax.jit(jax.vmap(lambda key: change(key, given)))(jax.random.split(jax.random.key(0), 4000)))
    full = float(jax.jit(lambda key: change(key, replace(given, batch=0)))(jax.random.key(0)))
    assert noisy.std() > 0
    assert abs(noisy.mean() - full) < 4.5 * noisy.std() / 4000**0.5 + 2e-5  # curvature: 0.02^2 L |noise|^2 / 2


def test_data_of_more_classes_are_refused():
    with pytest.raises(JaxpflError, match="data set 'digits' must have 2 classes and inputs in one array, got 10"):
        compression.run(replace(SMALL, data="digits"))
