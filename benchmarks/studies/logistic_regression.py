"""Study of logistic regression with Gaussian coefficients: Algorithm 5 of Ozkara et al. 2023, appendix F."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import checks
from jaxpfl.core.types import Array, Key
from jaxpfl.studies.repetitions import mean_square, repeat
from jaxpfl.studies.study import Results, Settings, Study, minimum, within

from . import regression_model
from .regression import regression_results


@dataclass(frozen=True)
class LogisticSettings(Settings):
    """Settings of the study.

    The model is P(y = 1) = sigmoid(<x, theta_i>), theta_i ~ N(mu, sigma_theta^2 I), x ~ N(0, I). The paper has no
    experiment with this model.
    """

    clients: int = within(1000, minimum(2))
    """Number of clients, m."""
    samples: int = within(20, checks.count)
    """Samples per client, n."""
    dim: int = within(10, checks.count)
    """Dimension, d."""
    sigma_theta: float = within(0.5, checks.positive)
    """Standard deviation of the clients' coefficients about mu, in each dimension; known to the methods."""
    sigma_mean: float = within(1.0, minimum(0))
    """Standard deviation of mu's entries about 0; mu is drawn anew in each repetition."""
    rate: float = within(0.02, checks.positive)
    """Learning rate eta of steps on the sum of the losses over a client's examples."""
    steps: int = within(1000, checks.count)
    """Number of steps of every method."""
    repetitions: int = within(10, checks.count)
    """Number of independent repetitions, for the standard errors."""
    seed: int = 0
    """Seed of every random draw."""


def draw(key: Key, given: LogisticSettings) -> tuple[Array, Array, Array, Array]:
    """Draw mu [d], coefficients [m, d], inputs X [m, n, d], and labels y [m, n] in {0, 1}."""
    of_mu, of_theta, of_x, of_y = jax.random.split(key, 4)
    m, n, d = given.clients, given.samples, given.dim
    mu = given.sigma_mean * jax.random.normal(of_mu, (d,))
    theta = mu + given.sigma_theta * jax.random.normal(of_theta, (m, d))
    x = jax.random.normal(of_x, (m, n, d))
    chance = jax.nn.sigmoid(jnp.einsum("ijd,id->ij", x, theta))
    return mu, theta, x, jax.random.bernoulli(of_y, chance).astype(jnp.float32)


def study(key: Key, given: LogisticSettings) -> dict[str, Array]:
    """Mean squared error of every estimator in one repetition, [] each."""
    mu, theta, x, y = draw(key, given)
    m, d, s2, zero = given.clients, given.dim, given.sigma_theta**2, jnp.zeros(given.dim)

    def each(mu: Array, s2: float) -> Array:
        return jax.vmap(lambda x, y: regression_model.logistic_fit(mu, s2, x, y, given.rate, given.steps))(x, y)

    pooled = regression_model.logistic_fit(zero, np.inf, x.reshape(-1, d), y.reshape(-1), given.rate / m, given.steps)
    _, learned = regression_model.logistic_descent(zero, s2, jnp.zeros((m, d)), x, y, given.rate, given.steps)
    estimates = {
        "local": each(zero, np.inf),
        "fedavg": jnp.broadcast_to(pooled, theta.shape),
        "known": each(mu, s2),
        "personalized": learned,
    }
    return {name: mean_square(estimate, theta) for name, estimate in estimates.items()}


def simulated(given: LogisticSettings) -> Results:
    """Compare local fits, a pooled fit, posterior modes under the true population, and Algorithm 5.

    Raises:
      JaxpflError: as in `LogisticSettings.check`.
    """
    given.check()
    numbers = given.clients * given.samples * given.dim
    errors = repeat(lambda key: study(key, given), given.seed, given.repetitions, numbers)
    order = ("local", "fedavg", "known", "personalized")
    return regression_results("Logistic regression", given, {name: errors[name] for name in order}, {})


STUDY = Study(LogisticSettings, simulated)
