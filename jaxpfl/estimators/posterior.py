"""Posterior mean of a variance given a noisy estimate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core.types import Array

_NODES = 64
_NEGLIGIBLE = 40.0  # in units of the log density, below its maximum


def truncated_mean(mean: Array, stddev: Array, most: Array) -> Array:
    """Mean of N(mean, stddev^2) truncated to [0, most]; the nearer end if ``mean`` is far outside.

    It is the posterior mean of a number in [0, most], with a flat prior, given the estimate ``mean`` of standard error
    ``stddev``.

    It is computed by Gauss quadrature over the distance u from the mode, as far as the density is not negligible. (The
    textbook's ratio of densities and probabilities cancels if stddev >> most or the mean is far outside.)
    """
    mean, stddev, most = jnp.broadcast_arrays(*(jnp.asarray(each, float) for each in (mean, stddev, most)))
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    scale = jnp.where(stddev > 0, stddev, 1)
    likeliest = jnp.clip(mean, 0, most)
    outside = (likeliest - mean) / scale
    reach = scale * 2 * _NEGLIGIBLE / (jnp.abs(outside) + jnp.sqrt(outside**2 + 2 * _NEGLIGIBLE))
    low, high = jnp.maximum(-likeliest, -reach), jnp.minimum(most - likeliest, reach)
    u = low[..., None] + (high - low)[..., None] * ((nodes + 1) / 2)
    z = u / scale[..., None]
    p = jax.nn.softmax(jnp.log(weights) - z * (z / 2 + outside[..., None]))
    return jnp.where(stddev > 0, likeliest + (p * u).sum(axis=-1), likeliest)
