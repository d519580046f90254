"""The study of normal means: priors of five families on simulated clients with a known Bayes risk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import checks
from jaxpfl.core.types import Array, Key
from jaxpfl.estimators.normal_means import FAMILIES, Family, NormalMixture, ebnm, posterior
from jaxpfl.estimators.normal_means.area import Likelihood
from jaxpfl.studies.mean_populations import TRUTHS, Truth, bayes_risk, draw, mixture, needles
from jaxpfl.studies.own_data.client_csv import CsvTable
from jaxpfl.studies.own_data.options import LEVEL, Intervals, own_or_simulated
from jaxpfl.studies.repetitions import repeat, report
from jaxpfl.studies.report import FEW_ERRORS, color, estimator_table
from jaxpfl.studies.study import Options, Results, Study, at_least, refuse_given
from jaxpfl.support.console import new_axes, save
from jaxpfl.support.errors import JaxpflError, shown, unknown_name

Choice: TypeAlias = Literal[
    "normal",
    "point-normal",
    "point-laplace",
    "scale-mixture",
    "npmle",
    "normal-mixture",
    "beta-mixture",
    "gamma-mixture",
    "best",
]
"""The families of priors in a single type, of which the command line can name the nearest, or the best of them."""


@dataclass(frozen=True)
class NormalMeansSettings:
    """x_i ~ N(theta_i, 1), theta_i from a population."""

    clients: int = 1000
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
    repetitions: int = 20
    """Independent repetitions, for the standard errors."""
    seed: int = 0
    """Seed of every random draw."""

    def check(self) -> None:
        """Check the settings.

        Raises:
          JaxpflError: the name, its value, and what is allowed.
        """
        at_least(2)("clients", self.clients)
        checks.count("repetitions", self.repetitions)
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
class NormalMeansOptions(CsvTable, Options):
    """Clients of your own instead of simulated ones."""

    csv: Path | None = None
    """A file with a row for each client: its name (--client), and the columns estimate,se, or successes,trials, or
    count,exposure, or counts of categories in columns count:NAME."""
    prior: Choice = "normal"
    """The prior of estimates of your own. Of successes it is a Beta distribution unless beta-mixture or npmle is asked
    for, of counts a Gamma distribution unless gamma-mixture or npmle is. Best compares all families of these on clients
    that are held out in turn."""
    center: float | None = None
    """Center of that prior; learned unless given, and 0 for scale-mixture."""
    components: int | None = None
    """Components of the priors that have some: 41 of a scale-mixture, 300 places of an npmle, and 2 of a
    normal-mixture, beta-mixture or gamma-mixture unless given."""
    covariates: tuple[str, ...] = ()
    """Columns of numbers on which estimates of your own are regressed; clients are then normal about the regression
    (the area model of Fay and Herriot 1979). Successes are Beta-distributed about a logistic regression, counts
    Gamma-distributed about a log-linear one."""
    groups: str | None = None
    """The column that names the group of each client, as a pupil's school; groups are then normal about a mean of all,
    and clients about their group's."""
    fit: Likelihood = "reml"
    """Likelihood by which the spread about the covariates' regression, or the spreads within and between groups, are
    fitted: reml, or ml, which is too small with few clients or groups."""
    weights: str | None = None
    """A column of numbers of at least 0, in any unit, by which clients count in the fit of the prior, as populations:
    it is then that of a random person's client. Estimates and risks are of all clients all the same."""
    epsilon: float | None = None
    """Privacy of each client in the prior of clients of your own, from counts of cells, for estimates of --range and
    --error-range, for successes and counts of --sizes; local, by each client itself, unless --delta is given."""
    delta: float | None = None
    """Delta of a trusted server's counts of the cells."""
    range: tuple[float, ...] = ()
    """Least and greatest estimate of the cells, publicly known; those beyond are clipped."""
    error_range: tuple[float, ...] = ()
    """Least and greatest standard error of the cells, publicly known."""
    sizes: tuple[float, ...] = ()
    """Numbers of trials, or exposures, of the cells, publicly known: a client thins its counts to the greatest that it
    has."""
    most_events: int | None = None
    """Greatest thinned count of count,exposure, publicly known; greater ones count as it."""
    threshold: float | None = None
    """Probability or rate of which estimates.csv has every client's probability of being above it, as a limit that no
    ward should exceed; the mean of the fitted prior unless given, with --covariates each client's own place on the
    regression. Of successes and counts."""
    level: float = LEVEL
    """Level of the intervals of clients of your own."""
    intervals: Intervals = "learned"
    """learned: intervals count the error of the fitted prior, by integrating over a normal, Beta, Gamma or Dirichlet
    prior, and by refitting another to clients drawn from it; clients: by refitting it to clients drawn from the file;
    plug-in: they take the fitted prior for known, and are too short for few clients."""

    def refuse_without_file(self) -> None:
        """Refuse the other options without a file.

        Raises:
          JaxpflError.
        """
        names = (
            *("prior", "center", "components", "covariates", "groups", "fit", "weights", "epsilon", "delta", "range"),
            *("error_range", "sizes", "most_events", "threshold", "level", "intervals"),
            *(field.name for field in fields(CsvTable)),
        )
        refuse_given(self, names, "is of --csv, and there is none")


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
