r"""Empirical-Bayes estimate of a mean histogram from its noisy release.

A noisy value y_x of a token's share p_x is normal about it with a known variance v_x. The shares are modelled as draws
from an unknown prior, a mixture of normal distributions with means g_j in steps of h on the logarithmic scale and
standard deviations h g_j; its weights maximise the likelihood, by EM, and the estimate is the posterior mean:

.. math:: w_j \leftarrow \frac1d \sum_x r_{xj}, \qquad r_{xj} \propto w_j N(y_x; g_j, v_x + h^2 g_j^2),
   \qquad \hat p_x = \sum_j r_{xj} \frac{g_j v_x + y_x h^2 g_j^2}{v_x + h^2 g_j^2}

Of all estimates the posterior mean of Q has the least expected KL(Q || estimate). Raising negative values to the floor,
as in the paper, treats every second token that is hidden in the noise as impossible; with little noise, both return the
release. It processes a release only and costs no privacy.

References: Kiefer and Wolfowitz 1956; Koenker and Mizera 2014, "Convex optimization, shape constraints, compound
decisions, and empirical Bayes rules"; normal mixtures on a grid: Stephens 2017, "False discovery rates: a new deal".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array, Scalar
from jaxpfl.estimators.histograms.base import floored

GRID = 60
"""Number of values g, from the floor to the largest noisy value."""
STEPS = 60
"""Steps of EM; three times as many change a loss by less than the spread between runs."""


def denoised(noisy: Array, stddev: Scalar | Array, floor: Scalar) -> Array:
    """Posterior mean of every token's share, [d], floored and normalised.

    Args:
      noisy: noisy shares, [d].
      stddev: of their noise, [] or [d], positive.
      floor: s.
    """
    y = noisy[:, None]
    variance = jnp.broadcast_to(jnp.asarray(stddev, noisy.dtype), noisy.shape)[:, None] ** 2
    logs = jnp.linspace(jnp.log(floor), jnp.log(jnp.maximum(noisy.max(), 10 * floor)), GRID, dtype=noisy.dtype)
    values, own = jnp.exp(logs), (jnp.exp(logs) * (logs[1] - logs[0])) ** 2
    whole = variance + own
    likelihood = jax.nn.softmax(-0.5 * ((y - values) ** 2 / whole + jnp.log(whole)), axis=1)

    def posterior(prior: Array) -> Array:
        joint = likelihood * prior
        return joint / jnp.maximum(joint.sum(axis=1, keepdims=True), jnp.finfo(noisy.dtype).tiny)

    even = jnp.full(GRID, 1 / GRID, noisy.dtype)
    prior = jax.lax.fori_loop(0, STEPS, lambda _, prior: posterior(prior).mean(axis=0), even)
    return floored((posterior(prior) * (values * variance + y * own) / whole).sum(axis=1), floor)
