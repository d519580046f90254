"""Single precision at the edges: one client with several samples, and errors much larger than what is estimated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.estimators import base, bernoulli

truncated_mean = jax.jit(base.truncated_mean)


@pytest.mark.parametrize("m", [3, 7, 10, 11, 50, 99, 1000])
def test_of_single_samples_no_variance_is_learned(m: int):
    """All others of the one client with five samples have one: its estimate is their mean, whatever they round to."""
    rng = np.random.default_rng(m)
    clients = [np.array([1.0, 0, 0, 1, 1]), *rng.integers(0, 2, size=(m - 1, 1)).astype(float)]
    estimates = jax.jit(lambda clients: base.estimate(bernoulli.personalized(), jax.random.key(0), clients).estimates)
    made = estimates(base.stack(clients))
    assert made.dtype == jnp.float32
    assert float(made[0]) == pytest.approx(np.mean(clients[1:]), abs=1e-5)


@pytest.mark.parametrize("stddev", [1e-3, 0.05, 1.0, 60.0, 1e3, 1e6])
@pytest.mark.parametrize("mean", [-30.0, -0.01, 0.1, 0.25, 0.3, 5.0])
def test_truncated_posterior_mean_in_single_precision(mean: float, stddev: float):
    """Against a fine sum, about the likeliest value, in double precision."""
    most = 0.25
    nearest = min(max(mean, 0), most)
    reach = min(most, 40 * stddev, 100 * stddev**2 / max(abs(nearest - mean), 1e-9))
    low, high = max(0, nearest - reach), min(most, nearest + reach)
    x = low + (high - low) * (np.arange(200_000) + 0.5) / 200_000
    log_p = -((x - mean) ** 2 - (nearest - mean) ** 2) / (2 * stddev**2)
    p = np.exp(log_p - log_p.max())
    found = truncated_mean(jnp.asarray(mean), jnp.asarray(stddev), jnp.asarray(most))
    assert found.dtype == jnp.float32
    assert float(found) == pytest.approx((p * x).sum() / p.sum(), abs=1e-6, rel=1e-4)


def test_a_number_seen_without_error_is_itself():
    found = truncated_mean(jnp.array([-1.0, 0.1, 1.0]), jnp.zeros(3), jnp.full(3, 0.25))
    np.testing.assert_allclose(found, [0, 0.1, 0.25])
