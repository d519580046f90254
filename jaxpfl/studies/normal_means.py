"""The study of normal means: priors of five families on simulated clients with a known Bayes risk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import checks
from jaxpfl.core.types import Array, Key
from jaxpfl.estimators.empirical_bayes import FAMILIES, Family, NormalMixture, ebnm, posterior
from jaxpfl.studies.own_data.client_csv import LEVEL, CsvTable, own_or_simulated
from jaxpfl.studies.repetitions import repeat, report
from jaxpfl.studies.report import FEW_ERRORS, color, estimator_table
from jaxpfl.studies.study import Results, Settings, Study, at_least, refuse_given, within
from jaxpfl.support.console import new_axes, save
from jaxpfl.support.errors import JaxpflError, shown, unknown_name

Truth: TypeAlias = Literal["sparse", "two-point", "efron", "normal", "needles"]

MIXTURES: dict[Truth, tuple[tuple[float, ...], ...]] = {
    "sparse": ((0.95, 0.05), (0.0, 5.0), (0.0, 0.0)),
    "two-point": ((0.5, 0.5), (-2.0, 2.0), (0.0, 0.0)),
    "efron": ((0.9, 0.1), (0.0, -3.0), (0.0, 1.0)),
    "normal": ((1.0,), (0.0,), (1.0,)),
}
"""Weights, means and standard deviations of the components. efron: nine of ten are zero, the others N(-3, 1) (Efron
2008). needles is none of these: its means are fixed, not drawn."""

TRUTHS: tuple[Truth, ...] = (*MIXTURES, "needles")

_REACH, _CELLS = 12.0, 8_001


@dataclass(frozen=True)
class NormalMeansSettings(Settings):
    """x_i ~ N(theta_i, 1), theta_i from a population."""

    clients: int = within(1000, at_least(2))
    """Number of clients, m."""
    truth: Truth = "sparse"
    """The population: sparse (5 % of the means are 5, others 0), two-point (-2 and 2), efron (90 % are 0, others
    N(-3, 1)), normal (N(0, 1)), or needles (exactly --nonzero of the means are --size, others 0)."""
    nonzero: int = 50
    """Number of the needles, the means that are not 0."""
    size: float = 5.0
    """Mean of every needle, in standard errors."""
    priors: tuple[Family, ...] = FAMILIES[1:]
    """Families of priors beside the normal one."""
    repetitions: int = within(20, checks.count)
    """Independent repetitions, for the standard errors."""
    seed: int = 0
    """Seed of every random draw."""

    def check(self) -> None:
        """Check the settings.

        Raises:
          JaxpflError: the name, its value, and what is allowed.
        """
        super().check()
        if self.truth not in TRUTHS:
            raise JaxpflError(f"truth must be {', '.join(TRUTHS)}, got {shown(self.truth)}")
        if self.truth == "needles":
            checks.count("nonzero", self.nonzero)
            if self.nonzero >= self.clients:
                raise JaxpflError(f"nonzero must be below the number of clients, {self.clients}, got {self.nonzero}")
            checks.positive("size", self.size)
        else:
            refuse_given(self, ("nonzero", "size"), f"is of truth needles, and truth is {self.truth}")
        for prior in self.priors:
            if prior not in FAMILIES:
                raise unknown_name("prior", prior, FAMILIES)


@dataclass(frozen=True)
class NormalMeansOptions(CsvTable):
    """Clients of your own instead of simulated ones."""

    csv: Path | None = None
    """A file with a row for each client: its name (--client), and the columns estimate,se, or successes,trials, or
    count,exposure."""
    prior: Family = "normal"
    """The prior of estimates of your own. Of successes it is a Beta distribution, of counts a Gamma distribution unless
    npmle, any distribution, is asked for."""
    center: float | None = None
    """Center of that prior; learned unless given, and 0 for scale-mixture."""
    components: int | None = None
    """Components of the priors that have some: 41 of a scale-mixture, 300 places of an npmle unless given."""
    covariates: tuple[str, ...] = ()
    """Columns of numbers on which estimates of your own are regressed; clients are then normal about the regression
    (the area model of Fay and Herriot 1979). Successes are Beta-distributed about a logistic regression, counts
    Gamma-distributed about a log-linear one."""
    groups: str | None = None
    """The column that names the group of each client, as a pupil's school; groups are then normal about a mean of all,
    and clients about their group's."""
    weights: str | None = None
    """A column of numbers of at least 0, in any unit, by which clients count in the fit of the prior, as populations:
    it is then that of a random person's client. Estimates and risks are of all clients all the same."""
    epsilon: float | None = None
    """Privacy of each client in the prior of estimates of your own, from counts of cells of --range and --error-range;
    local, by each client itself, unless --delta is given."""
    delta: float | None = None
    """Delta of a trusted server's counts of the cells."""
    range: tuple[float, ...] = ()
    """Least and greatest estimate of the cells, publicly known; those beyond are clipped."""
    error_range: tuple[float, ...] = ()
    """Least and greatest standard error of the cells, publicly known."""
    level: float = LEVEL
    """Level of the intervals of clients of your own, which integrate over a normal, Beta or Gamma prior and take any
    other for known."""


def mixture(truth: Truth) -> NormalMixture:
    """A population that clients are drawn from."""
    return NormalMixture(*(jnp.array(of) for of in MIXTURES[truth]))


def draw(of_kind: Key, of_theta: Key, population: NormalMixture, clients: int) -> Array:
    """Means of clients drawn from a population, [m]."""
    kind = jax.random.choice(of_kind, len(population.weights), (clients,), p=population.weights)
    return population.means[kind] + population.sds[kind] * jax.random.normal(of_theta, (clients,))


def needles(clients: int, nonzero: int | Array, size: float | Array) -> tuple[Array, NormalMixture]:
    """Means of which exactly ``nonzero`` are ``size`` and the others 0, [m] (Johnstone and Silverman 2004), and their
    distribution.

    An estimator that treats all clients by one function of their x has a total expected squared error of at least m
    times the Bayes risk of that distribution: the error of a function t is the sum over clients of
    E (t(theta_i + e) - theta_i)^2, which depends on the means by their distribution alone.
    """
    share = jnp.asarray(nonzero) / clients
    theta = jnp.where(jnp.arange(clients) < nonzero, size, 0.0)
    two = jnp.stack([jnp.zeros_like(theta[0]), jnp.asarray(size, theta.dtype)])
    return theta, NormalMixture(jnp.stack([1 - share, share]).astype(theta.dtype), two, jnp.zeros_like(two))


def bayes_risk(population: NormalMixture) -> float:
    """Least mean squared error at a unit standard error: the mean posterior variance.

    The mean over x is a sum over an even grid of twelve standard deviations about each component, so that components
    may lie anywhere.
    """
    z = jnp.linspace(-_REACH, _REACH, _CELLS)
    x = population.means[:, None] + jnp.sqrt(1 + population.sds**2)[:, None] * z
    variances = np.asarray(posterior(population, x.ravel(), jnp.ones(x.size)).sd, np.float64).reshape(x.shape) ** 2
    density = np.exp(-(np.asarray(z, np.float64) ** 2) / 2)
    return float(np.asarray(population.weights, np.float64) @ (variances @ (density / density.sum())))


def squared_errors(key: Key, theta: Array, population: NormalMixture, priors: Sequence[Family]) -> dict[str, Array]:
    """Mean squared error of each estimator of means theta [m] of a population, from one draw of estimates.

    ``local`` is x, ``personalized`` has a normal prior, ``known prior`` the population; [] each.
    """
    x = theta + jax.random.normal(key, theta.shape)
    s = jnp.ones_like(x)
    made = {"local": x, "personalized": ebnm(x, s).mean}
    made |= {str(prior): ebnm(x, s, prior=prior).mean for prior in priors}
    made["known prior"] = posterior(population, x, s).mean
    return {name: ((values - theta) ** 2).mean() for name, values in made.items()}


def _means(given: NormalMeansSettings) -> tuple[Callable[[Key, Key], Array], NormalMixture]:
    """Sampler of all clients' means, by two keys, and their distribution."""
    if given.truth == "needles":
        theta, population = needles(given.clients, given.nonzero, given.size)
        return lambda of_kind, of_theta: theta, population
    population = mixture(given.truth)
    return lambda of_kind, of_theta: draw(of_kind, of_theta, population, given.clients), population


def simulate(given: NormalMeansSettings) -> dict[str, np.ndarray]:
    """Mean squared error of each estimator in each repetition, [repetitions], on the same data for all."""
    drawn, population = _means(given)

    def study(key: Key) -> dict[str, Array]:
        of_kind, of_theta, of_x = jax.random.split(key, 3)
        return squared_errors(of_x, drawn(of_kind, of_theta), population, given.priors)

    found = repeat(study, given.seed, given.repetitions, given.clients)
    return {name: found[name] for name in ("local", "personalized", *given.priors, "known prior")}


def simulated(given: NormalMeansSettings) -> Results:
    """Simulate clients, and fit every family of priors; ``personalized`` is the normal one.

    Raises:
      JaxpflError: for settings that `NormalMeansSettings.check` refuses.
    """
    given.check()
    series = simulate(given)
    with jax.enable_x64(True):
        exact = {"local": 1.0, "known prior": bayes_risk(_means(given)[1])}
    result = {"study": "normal-means", "settings": dict(vars(given))} | report(series, exact)
    named = f"{given.nonzero} needles of {given.size:g}" if given.truth == "needles" else given.truth
    title = f"{given.clients} normal means, {named}, {given.repetitions} repetitions"
    return Results(
        json=result,
        tables=lambda: estimator_table(result, title, ["personalized: a normal prior; the others by their priors"]),
        plots=lambda folder: [_plot(folder, result, title)],
        series=series,
    )


def _plot(folder: Path, result: dict[str, Any], title: str) -> Path:
    """Plot every estimator's error, with the Bayes risk as a line."""
    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = new_axes("", "mean squared error of an estimate", title)
    rows = result["mse"]
    bars = [FEW_ERRORS * (row["stderr"] or 0) for row in rows.values()]
    axes.bar(list(rows), [row["mean"] for row in rows.values()], yerr=bars, color=color("personalized"), capsize=3)
    least = rows["known prior"]["closed_form"]
    axes.axhline(least, color=color("local"), linestyle="--", linewidth=1.2, label=f"Bayes risk {least:.3g}")
    axes.tick_params(axis="x", labelrotation=20, labelsize=8)
    axes.legend(frameon=False, fontsize=9)
    return save(figure, folder, "errors")


STUDY = Study(NormalMeansSettings, own_or_simulated("normal_means", simulated), NormalMeansOptions)
