r"""A mean histogram made of its noisy release: the posterior mean under the prior that the tokens themselves show.

A noisy value y_x of a token's share p_x is normal about it with a known standard deviation. The shares are taken for
draws of one unknown prior G, and the d values say what it is: G is their nonparametric maximum likelihood estimate on a
grid, by EM, and each token's share the mean of its posterior,

.. math:: G_j \leftarrow \frac1d \sum_x r_{xj}, \qquad r_{xj} \propto G_j \exp\Big(-\frac{(y_x - g_j)^2}{2 v_x}\Big),
   \qquad \hat p_x = \sum_j r_{xj} g_j

Of all estimates the posterior mean of Q has the least expected KL(Q || estimate), and it is positive. Raising what is
negative to the floor instead, as the print does, takes every second token that is hidden in the noise for impossible.
It looks at a release alone, and is free.

References: Kiefer and Wolfowitz 1956; Koenker and Mizera 2014, "Convex optimization, shape constraints, compound
decisions, and empirical Bayes rules".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpfl.estimators.histogram import floored
from jaxpfl.types import Array, Scalar

GRID = 100
"""Values that a share may have, in equal steps of its logarithm from the floor to the largest noisy value."""
STEPS = 200
"""Of EM; five times as many move no result by more than runs differ."""


def denoised(noisy: Array, stddev: Scalar | Array, floor: Scalar) -> Array:
    """The posterior mean of every token's share, [d], floored and of sum one.

    Args:
      noisy: values about the shares, [d].
      stddev: of their noise, one or [d], positive.
      floor: s.
    """
    stddev = jnp.broadcast_to(jnp.asarray(stddev, noisy.dtype), noisy.shape)
    top = jnp.maximum(noisy.max(), 10 * floor)
    values = jnp.exp(jnp.linspace(jnp.log(floor), jnp.log(top), GRID, dtype=noisy.dtype))
    # Against its best value each token's likelihood is at most one and one somewhere, however far off the noise is.
    squares = ((noisy[:, None] - values) / stddev[:, None]) ** 2
    likelihood = jnp.exp(-0.5 * (squares - squares.min(axis=1, keepdims=True)))

    def posterior(prior: Array) -> Array:
        joint = likelihood * prior
        return joint / jnp.maximum(joint.sum(axis=1, keepdims=True), jnp.finfo(noisy.dtype).tiny)

    even = jnp.full(GRID, 1 / GRID, noisy.dtype)
    prior = jax.lax.fori_loop(0, STEPS, lambda _, prior: posterior(prior).mean(axis=0), even)
    return floored(posterior(prior) @ values, floor)
