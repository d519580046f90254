r"""Logistic regression with a Gaussian population of coefficients (Ozkara et al. 2023, Algorithm 5).

.. math:: \theta_i^+ = \theta_i - \eta \Big[ \sum_j \nabla CE(\theta_i; x_{ij}, y_{ij}) + \frac{\theta_i - \mu}{s^2}
   \Big], \qquad \mu^+ = \mu - \eta \operatorname{mean}_i \frac{\mu - \theta_i}{s^2}

The paper has mu - theta_i in theta's step, which pushes theta away from mu; ``printed=True`` does the same. As in
linear regression, the variance is fixed: the paper's step on it diverges.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Scalar


@full_precision.products
def objective(theta: Array, mu: Array, s2: Scalar, x: Array, y: Array) -> Array:
    """A client's loss ``sum_j CE + |theta - mu|^2 / (2 s2)``: theta, mu [d], x [n, d], y [n] of zeros and ones.

    Implements: Ozkara et al. 2023, equation (55).
    """
    logits = x @ theta
    return (jnp.logaddexp(0, logits) - y * logits).sum() + ((theta - mu) ** 2).sum() / (2 * s2)


@full_precision.products
def fit(mu: Array, s2: Scalar, x: Array, y: Array, rate: Scalar, steps: int) -> Array:
    """A client's coefficients after gradient steps on its `objective` from mu, with mu fixed, [d].

    At s2 = infinity there is no regularisation; on separable data the steps then do not converge.
    """

    def step(_: Array, theta: Array) -> Array:
        return theta - rate * (x.T @ (jax.nn.sigmoid(x @ theta) - y) + (theta - mu) / s2)

    return jax.lax.fori_loop(0, steps, step, mu)


@full_precision.products
def gradient_descent(
    mu: Array, s2: Scalar, thetas: Array, x: Array, y: Array, rate: Scalar, steps: int, *, printed: bool = False
) -> tuple[Array, Array]:
    """Gradient descent of all clients, with their copies of mu averaged after each step.

    Args:
      mu: [d].
      s2: variance of the coefficients.
      thetas: the clients' coefficients, [m, d].
      x, y: all clients' data, [m, n, d] and [m, n].
      printed: whether the prior's term in theta's step has the paper's sign.

    Returns:
      mu [d] and the coefficients [m, d].
    """
    sign = -1 if printed else 1

    def step(_: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        mu, thetas = at
        errors = jax.nn.sigmoid(jnp.einsum("ijd,id->ij", x, thetas)) - y
        pull = (thetas - mu) / s2
        gradient = jnp.einsum("ijd,ij->id", x, errors) + sign * pull
        return mu + rate * pull.mean(axis=0), thetas - rate * gradient

    return jax.lax.fori_loop(0, steps, step, (mu, thetas))
