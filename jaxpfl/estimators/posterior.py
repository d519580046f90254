"""What is believed of a variance that an estimate with a known error was seen of."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpfl.types import Array


def truncated_mean(mean: Array, stddev: Array, most: Array) -> Array:
    """The mean of N(mean, stddev^2) truncated to [0, most]: the posterior mean of a number in [0, most], with a flat
    prior, of which ``mean`` was seen with the error ``stddev``. The nearer end far outside."""
    scale = jnp.where(stddev > 0, stddev, 1)
    low, high = -mean / scale, (most - mean) / scale
    log_pdf, log_cdf = jax.scipy.stats.norm.logpdf, jax.scipy.stats.norm.logcdf
    # In the tail that holds the mass, so that neither difference cancels.
    flipped = low > 0
    a, b = jnp.where(flipped, -high, low), jnp.where(flipped, -low, high)
    log_mass = log_cdf(b) + jnp.log1p(-jnp.exp(jnp.minimum(log_cdf(a) - log_cdf(b), -1e-6)))
    shift = jnp.exp(log_pdf(a) - log_mass) - jnp.exp(log_pdf(b) - log_mass)
    inside = mean + scale * jnp.where(flipped, -shift, shift)
    return jnp.clip(jnp.where(stddev > 0, inside, mean), 0, most)
