r"""Point estimation by Ditto: the error as a function of lambda. At one lambda, Ditto's model is the posterior mean.

Client k draws its mean :math:`w_k \sim N(\theta, \tau^2)` and n samples from :math:`N(w_k, \sigma^2)` with mean
:math:`\bar x_k`. Let :math:`\mu` be the mean of all :math:`\bar x_k`. With squared loss, Ditto's personalized model is

.. math:: v_k(\lambda) = \frac{\bar x_k + \lambda \mu}{1 + \lambda}, \qquad
   E (v_k - w_k)^2 = \frac{\sigma^2}{n K} + \Big(1 - \frac1K\Big)
   \frac{\sigma^2 / n + \lambda^2 \tau^2}{(1 + \lambda)^2}

The error is smallest at :math:`\lambda^* = \sigma^2 / (n \tau^2)`, for every number K of clients.
:math:`v_k(\lambda^*)` is the posterior mean under a flat prior of :math:`\theta`.

Reference: Li, Hu, Beirami and Smith 2021, "Ditto: Fair and Robust Federated Learning Through Personalization",
https://arxiv.org/abs/2012.04221, federated point estimation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.algorithms import LocalWork
from jaxpfl.algorithms.ditto import DittoHyper, ditto
from jaxpfl.core import checks, full_precision
from jaxpfl.core import participation as participations
from jaxpfl.core.types import Array
from jaxpfl.data import stack_clients
from jaxpfl.engine import Simulation
from jaxpfl.models import Model, Task
from jaxpfl.studies.repetitions import report, standard_error
from jaxpfl.studies.report import Curve, estimator_table, write_curves
from jaxpfl.studies.study import Block, Results, Settings, Study, minimum, within
from jaxpfl.support import host_memory

_STEPS = 10
_SHARE = 0.5
"""Fraction by which a local step reduces a model's distance to its fixed point."""


@dataclass(frozen=True)
class DittoSettings(Settings):
    """Settings of the study.

    The model is w_k ~ N(0, tau^2), x_kj ~ N(w_k, sigma^2).
    """

    clients: int = within(100, minimum(2))
    """Number of clients, K."""
    samples: int = within(10, checks.count)
    """Samples per client, n."""
    sigma: float = within(1.0, checks.positive)
    """Standard deviation of a client's samples."""
    tau: float = within(0.5, checks.positive)
    """Standard deviation of the clients' means."""
    factors: tuple[float, ...] = within((0.0, 0.1, 0.3, 1.0, 3.0, 10.0), checks.not_negative, empty=True)
    """Values of lambda, in units of the optimal lambda*."""
    rounds: int = within(8, checks.count)
    """Rounds of Ditto; a round has ten full-batch steps, each of which halves the distance to the fixed point."""
    repetitions: int = within(200, checks.count)
    """Number of independent repetitions, for the standard errors."""
    seed: int = 0
    """Seed of every random draw."""

    def check(self) -> None:
        """Check the settings.

        Raises:
          JaxpflError: if a setting is out of range; the message names the setting, its value and the allowed values.
        """
        super().check()
        host_memory.check(
            12 * self.clients * self.samples * self.repetitions,
            f"{self.repetitions} repetitions of {self.clients * self.samples} samples need",
            "use fewer repetitions, clients or samples",
        )

    @property
    def best(self) -> float:
        """The value lambda* at which the error is smallest."""
        return self.sigma**2 / (self.samples * self.tau**2)


def error(given: DittoSettings, lam: float | np.ndarray) -> Any:
    """Expected squared error of Ditto's personalized estimate; an infinite ``lam`` gives the mean over clients."""
    noise, own = given.sigma**2 / given.samples, 1 / (1 + np.asarray(lam, float))
    rest = noise * own**2 + given.tau**2 * (1 - own) ** 2
    return noise / given.clients + (1 - 1 / given.clients) * rest


def draw(given: DittoSettings) -> tuple[np.ndarray, np.ndarray]:
    """Draw the clients' means [K, R] and samples [K, n, R]; repetition r depends only on the seed and r."""

    def one(r: Array) -> tuple[Array, Array]:
        of_w, of_x = jax.random.split(jax.random.fold_in(jax.random.key(given.seed), r))
        w = given.tau * jax.random.normal(of_w, (given.clients,))
        return w, w[:, None] + given.sigma * jax.random.normal(of_x, (given.clients, given.samples))

    drawn = full_precision.jit(jax.vmap(one, out_axes=-1))(jnp.arange(given.repetitions))
    return np.asarray(drawn[0]), np.asarray(drawn[1])


def trained(given: DittoSettings, x: np.ndarray, lambdas: np.ndarray) -> np.ndarray:
    """Train Ditto's personalized models [L, K, R] at all lambdas [L] in one compiled program.

    Each repetition is one coordinate of the model. The squared loss is a sum over coordinates, so repetitions do not
    affect each other.
    """
    model = Model(lambda key, x: jnp.zeros(x.shape[-1]), lambda v, x, key=None, train=False: v - x)
    task = Task(model, x.shape[2:], 1, lambda rest, y: (rest**2).sum(axis=-1) / 2, {})
    federation = stack_clients([(own, np.zeros(len(own), np.int32)) for own in x])
    work = LocalWork(np.asarray(federation.train.size), _STEPS, given.samples)
    rates = {"lr": np.full(len(lambdas), _SHARE), "lr_personal": _SHARE / (1 + lambdas)}
    hp = DittoHyper(**rates, lam=lambdas, lr_decay=1.0, weight_decay=0.0)
    simulation = Simulation(ditto(task, work), task, federation, participations.full(given.clients), hp)
    state, _ = simulation.advance(simulation.init([given.seed] * len(lambdas)), given.rounds)
    return np.asarray(simulation.personal_models(state))


def name_of(factor: float) -> str:
    """Name of Ditto's series at ``factor`` times lambda*."""
    return f"ditto {factor:g}"


def simulated(given: DittoSettings) -> Results:
    """Compare Ditto at each lambda with the local, the global and the posterior mean (``personalized``).

    In the summary, ``lambda_star`` is lambda*; ``oracle_gap`` is the largest distance between Ditto at lambda* and the
    posterior mean; ``largest_z`` is the largest distance between a mean error and its closed form, in standard errors.

    Raises:
      JaxpflError: as in `DittoSettings.check`.
    """
    given.check()
    w, x = draw(given)
    own = x.mean(axis=1)
    mean = own.mean(axis=0)
    posterior = (own + given.best * mean) / (1 + given.best)
    factors = sorted({*given.factors, 1.0})
    models = dict(zip(factors, trained(given, x, given.best * np.array(factors)), strict=True))
    estimates = {"local": own, "global": np.broadcast_to(mean, own.shape), "personalized": posterior}
    exact = {"local": error(given, 0.0), "global": error(given, np.inf), "personalized": error(given, given.best)}
    for factor in given.factors:
        estimates[name_of(factor)], exact[name_of(factor)] = models[factor], error(given, given.best * factor)
    series = {name: ((one - w) ** 2).mean(axis=0).astype(float) for name, one in estimates.items()}
    result = {"study": "ditto", "settings": dict(vars(given)), "lambda_star": given.best}
    result |= report(series, {name: float(value) for name, value in exact.items()})
    result["oracle_gap"] = float(np.abs(models[1.0] - posterior).max())
    gaps = [(abs(float(values.mean()) - float(exact[name])), standard_error(values)) for name, values in series.items()]
    result["largest_z"] = max((gap / spread for gap, spread in gaps if spread), default=None)
    return Results(
        json=result,
        tables=lambda: _tables(given, result),
        plots=lambda folder: [_plot(folder, given, result)],
        series=series,
    )


def _tables(given: DittoSettings, result: dict[str, Any]) -> list[Block]:
    title = f"{given.clients} clients of {given.samples} samples, sigma {given.sigma:g}, tau {given.tau:g}"
    lines = [
        f"lambda* = sigma^2 / (n tau^2) = {given.best:.4g}; ditto C: at lambda = C lambda*",
        f"Ditto at lambda* is within {result['oracle_gap']:.2g} of the posterior mean (personalized)",
    ]
    return estimator_table(result, f"{title}, {given.repetitions} repetitions", lines)


def _plot(folder: Path, given: DittoSettings, result: dict[str, Any]) -> Path:
    shown = [factor for factor in given.factors if factor > 0]
    fine = np.geomspace(min([*shown, 0.1]), max([*shown, 10.0]), 100)
    rows = [result["mse"][name_of(factor)] for factor in shown]
    curves = {"ditto": Curve.measured(shown, rows, error(given, given.best * fine))}
    for name, at in (("local", 0.0), ("global", np.inf)):  # Ditto equals local at lambda = 0, and global at infinity
        curves[name] = Curve.level(float(error(given, at)), fine)
    title = f"Ditto's point estimation, K = {given.clients}, n = {given.samples}"
    path = folder / "error-lambda.png"
    return write_curves(path, fine, curves, xlabel="lambda / lambda*", title=title, logarithmic="x")


STUDY = Study(DittoSettings, simulated)
