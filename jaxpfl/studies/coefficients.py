"""Study of regressions on few examples per client: coefficients with a full covariance, or in a common subspace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpfl.core import checks
from jaxpfl.core.types import Array, Key
from jaxpfl.estimators import regression
from jaxpfl.estimators.empirical_bayes import common_representation as common
from jaxpfl.estimators.empirical_bayes import random_coefficients as joint
from jaxpfl.studies.repetitions import mean_square, repeat, report
from jaxpfl.studies.report import estimator_table, regression_title, write_bars
from jaxpfl.studies.study import Results, Settings, Study, minimum, within
from jaxpfl.support.errors import JaxpflError

FLOOR = 1e-6
"""Lower bound on the variances that EM fits."""


@dataclass(frozen=True)
class CoefficientsSettings(Settings):
    """Settings of the study.

    The model is y = X theta_i + w, X ~ N(0, I). theta_i ~ N(mu, Sigma) has correlated entries, or lies in a subspace.
    """

    clients: int = within(800, minimum(2))
    """Number of clients, m."""
    samples: int = within(3, minimum(2))
    """Examples per client, n."""
    dim: int = within(6, checks.count)
    """Number of coefficients, d."""
    rank: int = 0
    """Dimension k of the coefficients' subspace; 0 for coefficients with a mean and a full covariance."""
    noise_variance: float = within(0.3, checks.positive)
    """Variance of w."""
    em_steps: int = within(200, checks.count)
    """Steps of EM, and of alternating least squares."""
    repetitions: int = within(10, checks.count)
    """Number of independent repetitions, for the standard errors."""
    seed: int = 0
    """Seed of every random draw."""

    def check(self) -> None:
        """Check the settings.

        Raises:
          JaxpflError: if a setting is out of range; the message names the setting, its value and the allowed values.
        """
        super().check()
        if not 0 <= self.rank <= self.dim:
            raise JaxpflError(f"rank must be from 0 to dim = {self.dim}, got {self.rank}")


def draw(key: Key, given: CoefficientsSettings) -> tuple[joint.Coefficients, Array, Array, Array]:
    """Draw the population, coefficients [m, d], inputs X [m, n, d] and targets y [m, n]."""
    of_root, of_mu, of_theta, of_x, of_noise = jax.random.split(key, 5)
    m, n, d = given.clients, given.samples, given.dim
    rank = given.rank or d
    root = jax.random.normal(of_root, (d, rank)) / rank**0.5
    mu = jnp.zeros(d) if given.rank else jax.random.normal(of_mu, (d,))
    theta = mu + jax.random.normal(of_theta, (m, rank)) @ root.T
    x = jax.random.normal(of_x, (m, n, d))
    y = jnp.einsum("ijd,id->ij", x, theta) + given.noise_variance**0.5 * jax.random.normal(of_noise, (m, n))
    return joint.Coefficients(mu, root @ root.T, jnp.float32(given.noise_variance)), theta, x, y


def estimates(name: str, given: CoefficientsSettings, known: joint.Coefficients, x: Array, y: Array) -> Array:
    """Estimated coefficients [m, d] by the estimator ``name``; only "known" uses the true population ``known``."""
    sent = jax.vmap(joint.message)(x, y)
    if name == "local":
        return jax.vmap(partial(common.least_squares_head, jnp.eye(given.dim)))(sent)
    if name == "fedavg":
        return jnp.broadcast_to(joint.pooled(sent), (given.clients, given.dim))
    if name == "one variance":
        data = jax.vmap(regression.rotate)(x, y)
        begin = regression.moments(regression.pooled(data), x, y, FLOOR)
        learned = regression.em(begin, data, FLOOR, given.em_steps)
        return jax.vmap(lambda data: regression.posterior(learned, data).mean)(data)
    if name == "in turns":
        basis = common.alternating(common.start(sent, given.rank).basis, sent, given.em_steps)
        return jax.vmap(partial(common.least_squares_head, basis))(sent) @ basis.T
    if name == "personalized" and given.rank:
        at = common.em(common.start(sent, given.rank), sent, FLOOR, given.em_steps)
        return jax.vmap(partial(common.head, at))(sent).mean @ at.basis.T
    if name in ("personalized", "full covariance"):
        known = joint.em(joint.start(sent), sent, FLOOR, given.em_steps)
    return jax.vmap(partial(joint.posterior, known))(sent).mean


def simulated(given: CoefficientsSettings) -> Results:
    """Simulate clients, and compare local, pooled, learned-prior and known-prior estimates of their coefficients.

    Raises:
      JaxpflError: as in `CoefficientsSettings.check`.
    """
    given.check()
    numbers = given.clients * given.dim * (given.samples + given.dim)

    def errors_of(name: str) -> Any:
        def study(key: Key) -> Array:
            known, theta, x, y = draw(key, given)
            return mean_square(estimates(name, given, known, x, y), theta)

        return repeat(study, given.seed, given.repetitions, numbers)

    # One program per estimator, because batched decompositions must not run concurrently (see `regression.rotate`).
    names = ("full covariance", "in turns") if given.rank else ()
    order = ("local", "fedavg", "one variance", *names, "personalized", "known")
    series = {name: errors_of(name) for name in order}
    result = {"study": "coefficients", "settings": dict(vars(given))} | report(series, {})
    of = f"n = {given.samples}, " + (f"in {given.rank} dimensions" if given.rank else "correlated coefficients")
    title = regression_title("Clients' regressions", given, of)
    return Results(
        json=result,
        tables=lambda: estimator_table(result, title),
        plots=lambda folder: [write_bars(folder, result["mse"], "mean squared error of the coefficients", title)],
        series=series,
    )


STUDY = Study(CoefficientsSettings, simulated)
