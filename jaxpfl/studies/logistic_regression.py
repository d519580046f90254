"""The logistic-regression study: a Gaussian population of coefficients, Algorithm 5 (Ozkara et al. 2023, app. F)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import checks
from jaxpfl.core.types import Array, Key
from jaxpfl.estimators import logistic_regression
from jaxpfl.studies.repetitions import gain, mean_square, repeat, report
from jaxpfl.studies.report import estimator_table, gains_over_fedavg, regression_title
from jaxpfl.studies.settings import at_least
from jaxpfl.studies.sizes import fractions, write_sizes
from jaxpfl.studies.study import Results, Study


@dataclass(frozen=True)
class LogisticSettings:
    """P(y = 1) = sigmoid(<x, theta_i>), theta_i ~ N(mu, sigma_theta^2 I), x ~ N(0, I). The paper has no experiment."""

    clients: int = 1000
    """m."""
    samples: int = 20
    """n, of each client."""
    dim: int = 10
    """d."""
    sigma_theta: float = 0.5
    """Standard deviation of the clients' coefficients about mu, in each dimension; known to the methods."""
    sigma_mean: float = 1.0
    """Standard deviation of mu's entries about 0; mu is drawn anew in each repetition."""
    rate: float = 0.02
    """eta, of steps on a sum over the client's examples."""
    steps: int = 1000
    """Steps of every method."""
    repetitions: int = 10
    """Independent repetitions, for the standard errors."""
    seed: int = 0
    """Seed of every random draw."""

    def check(self) -> None:
        """Check the settings.

        Raises:
          JaxpflError: the name, its value, and what is allowed.
        """
        at_least("clients", self.clients, 2)
        for name in ("samples", "dim", "steps", "repetitions"):
            checks.count(name, getattr(self, name))
        for name in ("sigma_theta", "rate"):
            checks.positive(name, getattr(self, name))
        at_least("sigma_mean", self.sigma_mean, 0)


def draw(key: Key, given: LogisticSettings) -> tuple[Array, Array, Array, Array]:
    """Draw mu [d], coefficients [m, d], X [m, n, d], and y [m, n] of zeros and ones."""
    of_mu, of_theta, of_x, of_y = jax.random.split(key, 4)
    m, n, d = given.clients, given.samples, given.dim
    mu = given.sigma_mean * jax.random.normal(of_mu, (d,))
    theta = mu + given.sigma_theta * jax.random.normal(of_theta, (m, d))
    x = jax.random.normal(of_x, (m, n, d))
    chance = jax.nn.sigmoid(jnp.einsum("ijd,id->ij", x, theta))
    return mu, theta, x, jax.random.bernoulli(of_y, chance).astype(jnp.float32)


def study(key: Key, given: LogisticSettings) -> dict[str, Array]:
    """One repetition: mean squared errors, [] each."""
    mu, theta, x, y = draw(key, given)
    m, d, s2, zero = given.clients, given.dim, given.sigma_theta**2, jnp.zeros(given.dim)

    def each(mu: Array, s2: float) -> Array:
        return jax.vmap(lambda x, y: logistic_regression.fit(mu, s2, x, y, given.rate, given.steps))(x, y)

    pooled = logistic_regression.fit(zero, np.inf, x.reshape(-1, d), y.reshape(-1), given.rate / m, given.steps)
    _, learned = logistic_regression.gradient_descent(zero, s2, jnp.zeros((m, d)), x, y, given.rate, given.steps)
    estimates = {
        "local": each(zero, np.inf),
        "fedavg": jnp.broadcast_to(pooled, theta.shape),
        "known": each(mu, s2),
        "personalized": learned,
    }
    return {name: mean_square(estimate, theta) for name, estimate in estimates.items()}


def run(given: LogisticSettings) -> dict[str, Any]:
    """Summary of `simulated`: each estimator's error and gains."""
    return simulated(given).json


def simulated(given: LogisticSettings) -> Results:
    """Run the simulation: local and pooled fits, the mode under the known population, and Algorithm 5.

    Raises:
      JaxpflError: for settings that `LogisticSettings.check` refuses.
    """
    given.check()
    numbers = given.clients * given.samples * given.dim
    errors = repeat(lambda key: study(key, given), given.seed, given.repetitions, numbers)
    order = ("local", "fedavg", "known", "personalized")
    result = {"study": "logistic-regression", "settings": dict(vars(given))} | report({k: errors[k] for k in order}, {})
    over = {name: gain(errors[name], errors["fedavg"])._asdict() for name in order[2:]}
    result |= {"gains_over_fedavg": over}
    title = regression_title("Logistic regression", given, f"n = {given.samples}")
    return Results(
        json=result,
        tables=lambda: estimator_table(result, title, [gains_over_fedavg(result)]),
        plots=lambda folder: write_plots(folder, given),
        series=errors,
    )


def write_plots(folder: Path, given: LogisticSettings) -> list[Path]:
    """Plot the error against m and against n into ``folder``."""
    given.check()
    folder.mkdir(parents=True, exist_ok=True)
    few = replace(given, repetitions=min(given.repetitions, 3))
    of_m = fractions(given.clients, (0.01, 0.03, 0.1, 0.3, 1), 2)
    of_n = fractions(given.samples, (0.25, 0.5, 1, 2, 4), 1)
    return [
        write_sizes(folder, run, few, "clients", of_m, "Logistic regression"),
        write_sizes(folder, run, few, "samples", of_n, "Logistic regression"),
    ]


STUDY = Study(LogisticSettings, simulated)
