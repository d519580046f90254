"""Study of a mixture of regressions: AdaMix's Table 3 (Ozkara et al. 2023), compared with EM on the data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import checks
from jaxpfl.core.types import Array, Key
from jaxpfl.priors.discrete import Discrete
from jaxpfl.priors.gaussian_mixture import Mixture
from jaxpfl.studies.repetitions import mean_square, measure, repeat, report
from jaxpfl.studies.report import Curve, estimator_table, write_curves
from jaxpfl.studies.study import Results, Settings, Study, minimum, within

from . import regression_mixture_model, regression_model
from .regression import regression_title
from .regression_mixture_model import MixturePopulation

_POINTS = 20
"""Number of points on the curve of Algorithm 1 over its iterations."""

_FLOOR = 1e-5
"""Lower bound on a component's variance in EM on the data."""


@dataclass(frozen=True)
class RegressionMixtureSettings(Settings):
    """Settings of the study.

    The model is y = X theta_i + w, with theta_i ~ N(mu, s2 I) or N(-mu, s2 I), and X ~ N(0, I). The defaults are the
    settings of Table 3.
    """

    clients: int = within(1000, minimum(2))
    """Number of clients, m."""
    samples: tuple[int, ...] = within((10, 20, 30), checks.count)
    """Samples per client, n; one study per value."""
    dim: int = within(50, checks.count)
    """Dimension, d."""
    mean: float = within(1.0, minimum(0))
    """Value of every entry of mu. The paper does not state this value; 1 reproduces the paper's errors for local
    estimates."""
    component_variance: float = within(0.001, checks.positive)
    """Variance s2 of the coefficients about their center."""
    noise_variance: float = within(0.1, checks.positive)
    """Variance of the noise w in the labels, which is known to Algorithms 1 and 6, but not to EM."""
    iterations: int = within(1000, checks.count)
    """Iterations of Algorithm 1. Algorithm 6 converges after a few iterations, and has at most 20."""
    floor: float = within(0.001, checks.positive)
    """Lower bound on a component's variance in Algorithm 1; the variances decrease to this bound."""
    em_steps: int = within(20, checks.count)
    """Number of EM steps on the data."""
    repetitions: int = within(5, checks.count)
    """Number of independent repetitions, for the standard errors."""
    seed: int = 0
    """Seed of every random draw."""

    @property
    def population(self) -> MixturePopulation:
        """The true population."""
        mu = jnp.full(self.dim, self.mean)
        s2 = jnp.full(2, self.component_variance)
        return MixturePopulation(jnp.full(2, 0.5), jnp.stack([mu, -mu]), s2, jnp.float32(self.noise_variance))


def draw(key: Key, given: RegressionMixtureSettings, n: int) -> tuple[Array, Array, Array]:
    """Draw coefficients [m, d], inputs X [m, n, d] and targets y [m, n].

    Implements: Ozkara et al. 2023, equation (56).
    """
    of_sign, of_theta, of_x, of_noise = jax.random.split(key, 4)
    m, d = given.clients, given.dim
    centers = given.mean * jax.random.rademacher(of_sign, (m, 1), jnp.float32)
    theta = centers + given.component_variance**0.5 * jax.random.normal(of_theta, (m, d))
    x = jax.random.normal(of_x, (m, n, d))
    y = jnp.einsum("ijd,id->ij", x, theta) + given.noise_variance**0.5 * jax.random.normal(of_noise, (m, n))
    return theta, x, y


def study(key: Key, given: RegressionMixtureSettings, n: int) -> dict[str, Array]:
    """Mean squared errors in one repetition, [] each, and Algorithm 1's errors during its iterations, [_POINTS]."""
    theta, x, y = draw(key, given, n)
    data = jax.vmap(regression_model.rotate)(x, y)
    alone = jax.vmap(regression_model.least_squares)(data)
    begin = regression_mixture_model.start(data, 2, (y**2).mean(), _FLOOR)
    learned = regression_mixture_model.em(begin, data, _FLOOR, given.em_steps)

    def posterior_means(population: MixturePopulation) -> Array:
        return jax.vmap(lambda data: regression_mixture_model.personalize(population, data))(data)

    rate, each = given.noise_variance / data.squares.max(), _each(given)

    def some(at: tuple[Mixture, Array], _: None) -> tuple[tuple[Mixture, Array], Array]:
        at = regression_mixture_model.adamix(*at, x, y, given.noise_variance, rate, given.floor, each)
        return at, mean_square(at[1], theta)

    first = Mixture(begin.p, begin.mu, jnp.maximum(begin.s2, given.floor))
    _, along = jax.lax.scan(some, (first, alone), length=_POINTS)
    _, in_hull = regression_mixture_model.alternating(
        Discrete(begin.p, begin.mu), x, y, given.noise_variance, min(given.iterations, 20)
    )
    estimates = {
        "local": alone,
        "algorithm-6": in_hull,
        "personalized": posterior_means(learned),
        "known": posterior_means(given.population),
    }
    errors = {name: mean_square(estimate, theta) for name, estimate in estimates.items()}
    return errors | {"algorithm-1": along[-1], "along": along}


def measured(given: RegressionMixtureSettings) -> dict[int, dict[str, np.ndarray]]:
    """Errors of every repetition, by the number of samples per client.

    Raises:
      JaxpflError: as in `RegressionMixtureSettings.check`.
    """
    given.check()
    return {
        n: repeat(partial(study, given=given, n=n), given.seed, given.repetitions, given.clients * n * given.dim)
        for n in given.samples
    }


ORDER = ("local", "algorithm-6", "algorithm-1", "personalized", "known")


def summary(given: RegressionMixtureSettings, errors: dict[int, dict[str, np.ndarray]]) -> dict[str, Any]:
    """Summary of the errors from `measured`: a row for each estimator and number of samples."""
    result: dict[str, Any] = {"mse": {}, "gains": {}, "gain_over_local": {}}
    for n, found in errors.items():
        of_n = report({name: found[name] for name in ORDER}, {})
        for part in ("mse", "gains"):
            result[part] |= {f"{name}, n = {n}": row for name, row in of_n[part].items()}
        result["gain_over_local"][str(n)] = of_n["gain_over_local"]
    return {"study": "regression-mixture", "settings": dict(vars(given))} | result


def write_plots(folder: Path, given: RegressionMixtureSettings, errors: dict[int, dict[str, np.ndarray]]) -> list[Path]:
    """Plot the errors from `measured` against n, and Algorithm 1's errors against its iterations, into ``folder``."""
    setting = f"Mixture of two regressions, m = {given.clients}, d = {given.dim}"
    style: dict[str, Any] = {"ylabel": "mean squared error of the coefficients", "logarithmic": "y"}
    over = {name: Curve.measured(list(errors), [measure(own[name]) for own in errors.values()]) for name in ORDER}
    steps = _each(given) * np.arange(1, _POINTS + 1)
    along = {f"n = {n}": Curve.measured(steps, map(measure, own["along"].T)) for n, own in errors.items()}
    return [
        write_curves(folder / "mse-samples.png", [], over, xlabel="samples of a client, n", title=setting, **style),
        write_curves(
            folder / "mse-iterations.png", [], along, xlabel="iterations", title=f"{setting}: Algorithm 1", **style
        ),
    ]


def _each(given: RegressionMixtureSettings) -> int:
    """Number of Algorithm 1's iterations between two points of its curve."""
    return -(-given.iterations // _POINTS)


def simulated(given: RegressionMixtureSettings) -> Results:
    """Reproduce Table 3: local least squares, Algorithms 1 and 6, posterior means under the learned and true mixtures.

    Reference: Ozkara et al. 2023, Table 3.

    Raises:
      JaxpflError: as in `RegressionMixtureSettings.check`.
    """
    errors = measured(given)
    result = summary(given, errors)
    title = regression_title("Mixture of two regressions", given, f"mu = {given.mean:g}")
    return Results(
        json=result,
        tables=lambda: estimator_table(result, title),
        plots=lambda folder: write_plots(folder, given, errors),
        series={f"{name}, n = {n}": values for n, found in errors.items() for name, values in found.items()},
    )


STUDY = Study(RegressionMixtureSettings, simulated)
