"""Study of linear regression with Gaussian coefficients: Algorithm 4 of Ozkara et al. 2023, appendix E."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpfl.core import checks
from jaxpfl.core.types import Array, Key
from jaxpfl.studies.repetitions import gain, mean_square, repeat, report
from jaxpfl.studies.report import estimator_table, plus_minus, write_bars
from jaxpfl.studies.study import Results, Settings, Study, minimum, within

from . import regression_model
from .regression_model import Population, Posterior, Rotated

_FLOOR = 1e-6
"""Lower bound on estimated variances."""


@dataclass(frozen=True)
class RegressionSettings(Settings):
    """Settings of the study.

    The model is y = X theta_i + w, theta_i ~ N(mu, sigma_theta^2 I). The defaults are the paper's setting with d = 50.
    """

    clients: int = within(10_000, minimum(2))
    """Number of clients, m."""
    samples: int = within(10, minimum(2))  # at least two, because moment estimates use pairs of a client's examples
    """Samples per client, n."""
    dim: int = within(50, checks.count)
    """Dimension, d."""
    sigma_theta: float = within(0.1, checks.positive)
    """Standard deviation of the clients' coefficients about mu, in each dimension."""
    sigma_mean: float = within(0.1, minimum(0))
    """Standard deviation of mu's entries about 0; mu is drawn anew in each repetition."""
    noise_variance: float = within(0.05, checks.positive)
    """Variance of the noise w in the labels."""
    feature_variance: float = within(0.05, checks.positive)
    """Variance of an entry of the features X."""
    em_steps: int = within(50, checks.count)
    """Number of EM steps, which start from moment estimates."""
    gradient_steps: int = within(300, checks.count)
    """Number of steps of Algorithm 4, with the variances fixed at moment estimates."""
    printed_steps: bool = False
    """Steps of Algorithm 4 as printed, with which mu converges slowly; by default steps have Nesterov's momentum."""
    repetitions: int = within(10, checks.count)
    """Number of independent repetitions, for the standard errors."""
    seed: int = 0
    """Seed of every random draw."""

    @property
    def local_mse(self) -> float | None:
        """Exact error of a client's own least-squares estimate (the minimum-norm solution); None for n near d."""
        n, d = self.samples, self.dim
        if abs(n - d) < 4:  # the error has no finite variance, so means over repetitions are unreliable
            return None
        missed = max(0.0, 1 - n / d) * d * (self.sigma_mean**2 + self.sigma_theta**2)
        return missed + self.noise_variance / self.feature_variance * min(n, d) / (abs(n - d) - 1)


def draw(key: Key, given: RegressionSettings) -> tuple[Population, Array, Array, Array]:
    """Draw the population, coefficients [m, d], inputs X [m, n, d] and targets y [m, n].

    Implements: Ozkara et al. 2023, equation (46).
    """
    of_mu, of_theta, of_x, of_noise = jax.random.split(key, 4)
    m, n, d = given.clients, given.samples, given.dim
    mu = given.sigma_mean * jax.random.normal(of_mu, (d,))
    theta = mu + given.sigma_theta * jax.random.normal(of_theta, (m, d))
    x = given.feature_variance**0.5 * jax.random.normal(of_x, (m, n, d))
    y = jnp.einsum("ijd,id->ij", x, theta) + given.noise_variance**0.5 * jax.random.normal(of_noise, (m, n))
    return Population(mu, jnp.float32(given.sigma_theta**2), jnp.float32(given.noise_variance)), theta, x, y


def algorithm_4(begin: Population, data: Rotated, steps: int, *, accelerated: bool = True) -> Array:
    """Coefficients [m, d] by Algorithm 4, from zero, at the largest learning rate that is stable for every client."""
    rate = 1 / (data.squares.max() / begin.sx2 + 1 / begin.s2)
    zeros = jnp.zeros((data.x.shape[0], data.x.shape[-1]), data.x.dtype)
    begin = begin._replace(mu=zeros[0])
    return regression_model.gradient_descent(begin, zeros, data.x, data.y, rate, steps, accelerated=accelerated)[1]


def study(key: Key, given: RegressionSettings) -> dict[str, Array]:
    """Mean squared errors in one repetition, [] each; ``bound`` is the expected error of ``known``, given X."""
    population, theta, x, y = draw(key, given)
    data = jax.vmap(regression_model.rotate)(x, y)
    moments = regression_model.moments(regression_model.pooled(data), x, y, _FLOOR)
    learned = regression_model.em(moments, data, _FLOOR, given.em_steps)

    def posteriors(of: Population) -> Posterior:
        return jax.vmap(lambda data: regression_model.posterior(of, data))(data)

    known = posteriors(population)
    estimates = {
        "local": jax.vmap(regression_model.least_squares)(data),
        "fedavg": jnp.broadcast_to(moments.mu, theta.shape),
        "known": known.mean,
        "algorithm-4": algorithm_4(moments, data, given.gradient_steps, accelerated=not given.printed_steps),
        "personalized": posteriors(learned).mean,
    }
    return {name: mean_square(each, theta) for name, each in estimates.items()} | {"bound": known.variance.mean()}


def simulated(given: RegressionSettings) -> Results:
    """Compare local and pooled least squares, Algorithm 4, and posterior means under true and learned populations.

    Reference: Ozkara et al. 2023, appendix K.2, linear regression.

    Raises:
      JaxpflError: as in `RegressionSettings.check`.
    """
    given.check()
    errors = repeat(
        lambda key: study(key, given), given.seed, given.repetitions, given.clients * given.samples * given.dim
    )
    exact = {"local": given.local_mse, "known": float(errors.pop("bound").mean())}
    order = ("local", "fedavg", "known", "algorithm-4", "personalized")
    return regression_results("Linear regression", given, {name: errors[name] for name in order}, exact)


def regression_results(kind: str, given: Any, errors: dict[str, Any], exact: dict[str, float | None]) -> Results:
    """Make the `Results` of a regression study; the summary includes gains over the pooled fit.

    Args:
      kind: "Linear regression" or "Logistic regression", which also determines the study's name.
      given: settings of the study.
      errors: mean squared errors by estimator, [repetitions] each; must include ``local``, ``fedavg`` and
        ``personalized``.
      exact: exact errors by estimator, if known.
    """
    name = kind.lower().replace(" ", "-").removeprefix("linear-")
    result = {"study": name, "settings": dict(vars(given))} | report(errors, exact)
    over = {n: gain(own, errors["fedavg"])._asdict() for n, own in errors.items() if n not in ("local", "fedavg")}
    result |= {"gains_over_fedavg": over}
    gains = ", ".join(f"{n} {plus_minus(row, percent=True)}" for n, row in over.items())
    title = regression_title(kind, given, f"n = {given.samples}")
    return Results(
        json=result,
        tables=lambda: estimator_table(result, title, [f"gain over fedavg: {gains}"]),
        plots=lambda folder: [write_bars(folder, result["mse"], "mean squared error of the coefficients", title)],
        series=errors,
    )


def regression_title(study: str, given: Any, more: str) -> str:
    """Title of a regression study, with its sizes.

    Args:
      study: first words of the title.
      given: settings with ``clients``, ``dim`` and ``repetitions``.
      more: a further size or setting, as text.
    """
    sizes = f"m = {given.clients}, d = {given.dim}, {more}"
    return f"{study}, {sizes}, {given.repetitions} repetitions; known: with the true prior"


STUDY = Study(RegressionSettings, simulated)
