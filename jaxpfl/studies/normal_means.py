"""Study of normal means: four families of priors, fitted to the user's clients or to simulated clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import checks
from jaxpfl.core.types import Array, Key
from jaxpfl.data.sources import csv_text
from jaxpfl.data.sources.csv_text import Table
from jaxpfl.estimators import empirical_bayes as eb
from jaxpfl.estimators.empirical_bayes import FAMILIES, Family, NormalMixture, ebnm, posterior
from jaxpfl.studies import own_clients
from jaxpfl.studies.own_clients import LEVEL, CsvTable, Own, Picture, distinct_clients, own_or_simulated, refuse_sum
from jaxpfl.studies.repetitions import repeat, report
from jaxpfl.studies.report import estimator_table, write_bars
from jaxpfl.studies.study import Block, Results, Settings, Study, minimum, refuse_given, within
from jaxpfl.support.errors import JaxpflError, printable, shown, unknown_name

Truth: TypeAlias = Literal["sparse", "two-point", "efron", "normal", "needles"]

MIXTURES: dict[Truth, tuple[tuple[float, ...], ...]] = {
    "sparse": ((0.95, 0.05), (0.0, 5.0), (0.0, 0.0)),
    "two-point": ((0.5, 0.5), (-2.0, 2.0), (0.0, 0.0)),
    "efron": ((0.9, 0.1), (0.0, -3.0), (0.0, 1.0)),
    "normal": ((1.0,), (0.0,), (1.0,)),
}
"""Weights, means and standard deviations of each population's components. In efron, nine of ten means are 0 and the
others N(-3, 1) (Efron 2008). The population needles is not listed, because its means are fixed and not drawn.
"""

TRUTHS: tuple[Truth, ...] = (*MIXTURES, "needles")

_REACH, _CELLS = 12.0, 8_001
"""Grid for the Bayes risk: half width in standard deviations, and number of points."""


@dataclass(frozen=True)
class NormalMeansSettings(Settings):
    """Settings of the study.

    The model is x_i ~ N(theta_i, 1), with theta_i drawn from a population.
    """

    clients: int = within(1000, minimum(2))
    """Number of clients, m."""
    truth: Truth = "sparse"
    """The population: sparse (5 % of the means are 5, others 0), two-point (-2 and 2), efron (90 % are 0, others
    N(-3, 1)), normal (N(0, 1)), or needles (exactly --nonzero of the means are --size, others 0)."""
    nonzero: int = 50
    """Number of needles, that is, of nonzero means."""
    size: float = 5.0
    """Mean of every needle, in standard errors."""
    priors: tuple[Family, ...] = FAMILIES[1:]
    """Families of priors in addition to the normal prior."""
    repetitions: int = within(20, checks.count)
    """Number of independent repetitions, for the standard errors."""
    seed: int = 0
    """Seed of every random draw."""

    def check(self) -> None:
        """Check the settings.

        Raises:
          JaxpflError: if a setting is out of range; the message names the setting, its value and the allowed values.
        """
        super().check()
        if self.truth not in TRUTHS:
            raise JaxpflError(f"truth must be one of {', '.join(TRUTHS)}, got {shown(self.truth)}")
        if self.truth == "needles":
            checks.count("nonzero", self.nonzero)
            if self.nonzero >= self.clients:
                raise JaxpflError(f"nonzero must be below the number of clients, {self.clients}, got {self.nonzero}")
            checks.positive("size", self.size)
        else:
            refuse_given(self, ("nonzero", "size"), f"applies to truth needles, not to {self.truth}")
        for prior in self.priors:
            if prior not in FAMILIES:
                raise unknown_name("prior", prior, FAMILIES)


@dataclass(frozen=True)
class NormalMeansOptions(CsvTable):
    """Options for estimating the user's own clients instead of simulated clients."""

    csv: Path | None = None
    """File with a row per client: its name (--client), and the columns estimate,se, or successes,trials, or
    count,exposure."""
    prior: Family = "normal"
    """Prior for your own estimates. Successes have a Beta prior and counts a Gamma prior, unless --prior is npmle,
    which allows any distribution."""
    center: float | None = None
    """Center of a normal, point-normal or scale-mixture prior; by default learned, but 0 for scale-mixture."""
    components: int | None = None
    """Number of components of the prior; by default 41 for scale-mixture and 300 atoms for npmle."""
    covariates: tuple[str, ...] = ()
    """Numeric columns on which your own estimates are regressed; the true means are then normally distributed about the
    regression (the area model of Fay and Herriot 1979). Probabilities of success are Beta-distributed about a logistic
    regression, and rates of counts Gamma-distributed about a log-linear regression."""
    groups: str | None = None
    """Column that names the group of each client, such as a pupil's school; the groups' means are then normally
    distributed about an overall mean, and the clients' means about their group's mean."""
    weights: str | None = None
    """Numeric column of clients' weights in the fit of the prior, at least 0 and in any unit. With populations as
    weights, the prior describes the client of a randomly chosen person. Risks are not weighted."""
    level: float = LEVEL
    """Level of the intervals for your own clients. They account for the uncertainty of a learned normal, Beta or Gamma
    prior. They treat the prior as known with --center, --weights or another prior, and for successes or counts of over
    100,000 clients."""


def mixture(truth: Truth) -> NormalMixture:
    """Population from which the clients' means are drawn."""
    return NormalMixture(*(jnp.array(of) for of in MIXTURES[truth]))


def draw(of_kind: Key, of_theta: Key, population: NormalMixture, clients: int) -> Array:
    """Draw the clients' means from a population, [m], with one key for their components and one for the means."""
    kind = jax.random.choice(of_kind, len(population.weights), (clients,), p=population.weights)
    return population.means[kind] + population.sds[kind] * jax.random.normal(of_theta, (clients,))


def needles(clients: int, nonzero: int | Array, size: float | Array) -> tuple[Array, NormalMixture]:
    """Return fixed means theta, [m], and the distribution of a mean that is chosen from them at random.

    The first ``nonzero`` of the means are ``size``, and the others are 0, as in Johnstone and Silverman 2004. An
    estimator that applies one function t to every client's x has a total expected squared error of at least m times the
    Bayes risk of this distribution. The reason is that the estimator's error is the sum over clients of E (t(theta_i +
    e) - theta_i)^2 with a standard normal e. This sum depends on the means only through their distribution.
    """
    share = jnp.asarray(nonzero) / clients
    theta = jnp.where(jnp.arange(clients) < nonzero, size, 0.0)
    two = jnp.stack([jnp.zeros_like(theta[0]), jnp.asarray(size, theta.dtype)])
    return theta, NormalMixture(jnp.stack([1 - share, share]).astype(theta.dtype), two, jnp.zeros_like(two))


def bayes_risk(population: NormalMixture) -> float:
    """Mean posterior variance at unit standard error: the smallest possible mean squared error.

    The mean over the estimates x is computed for each component of the population on its own evenly spaced grid, which
    extends twelve standard deviations to each side. The components may therefore be far apart.
    """
    z = jnp.linspace(-_REACH, _REACH, _CELLS)
    x = population.means[:, None] + jnp.sqrt(1 + population.sds**2)[:, None] * z
    variances = np.asarray(posterior(population, x.ravel(), jnp.ones(x.size)).sd, np.float64).reshape(x.shape) ** 2
    density = np.exp(-(np.asarray(z, np.float64) ** 2) / 2)
    return float(np.asarray(population.weights, np.float64) @ (variances @ (density / density.sum())))


def squared_errors(key: Key, theta: Array, population: NormalMixture, priors: Sequence[Family]) -> dict[str, Array]:
    """Mean squared error of each estimator, [], for the means ``theta`` [m] and one draw of the estimates x.

    ``local`` is x itself. ``personalized`` has a fitted normal prior, and ``known prior`` has the population as its
    prior.
    """
    x = theta + jax.random.normal(key, theta.shape)
    s = jnp.ones_like(x)
    made = {"local": x, "personalized": ebnm(x, s).mean}
    made |= {str(prior): ebnm(x, s, prior=prior).mean for prior in priors}
    made["known prior"] = posterior(population, x, s).mean
    return {name: ((values - theta) ** 2).mean() for name, values in made.items()}


def _means(given: NormalMeansSettings) -> tuple[Callable[[Key, Key], Array], NormalMixture]:
    """Return a function that draws all clients' means from two keys; also return the distribution of these means."""
    if given.truth == "needles":
        theta, population = needles(given.clients, given.nonzero, given.size)
        return lambda of_kind, of_theta: theta, population
    population = mixture(given.truth)
    return lambda of_kind, of_theta: draw(of_kind, of_theta, population, given.clients), population


def simulated(given: NormalMeansSettings) -> Results:
    """Simulate clients, and fit every family of priors; the estimator ``personalized`` has the normal prior.

    Raises:
      JaxpflError: as in `NormalMeansSettings.check`.
    """
    given.check()
    drawn, population = _means(given)

    def study(key: Key) -> dict[str, Array]:
        of_kind, of_theta, of_x = jax.random.split(key, 3)
        return squared_errors(of_x, drawn(of_kind, of_theta), population, given.priors)

    found = repeat(study, given.seed, given.repetitions, given.clients)
    series = {name: found[name] for name in ("local", "personalized", *given.priors, "known prior")}
    with jax.enable_x64(True):
        exact = {"local": 1.0, "known prior": bayes_risk(_means(given)[1])}
    result = {"study": "normal-means", "settings": dict(vars(given))} | report(series, exact)
    named = f"{given.nonzero} needles of {given.size:g}" if given.truth == "needles" else given.truth
    title = f"{given.clients} normal means, {named}, {given.repetitions} repetitions"
    label = "mean squared error of an estimate"
    return Results(
        json=result,
        tables=lambda: estimator_table(
            result, title, ["personalized has a normal prior; the others are named by their priors"]
        ),
        plots=lambda folder: [write_bars(folder, result["mse"], label, title, least=exact["known prior"])],
        series=series,
    )


Kind: TypeAlias = Literal["estimate", "successes", "count"]
PAIRS: dict[Kind, tuple[str, str]] = {
    "estimate": ("estimate", "se"),
    "successes": ("successes", "trials"),
    "count": ("count", "exposure"),
}
"""Names of the two columns for each kind of data."""
_SIMULATED = ("clients", "truth", "nonzero", "size", "priors", "repetitions")
_MOST_INTEGRATED = 100_000
"""Number of clients above which intervals treat the fitted population of rates as known."""


class Summaries(NamedTuple):
    """Clients read from a file.

    Attributes:
      kind: kind of data, a key of `PAIRS`.
      client: name of the column with the clients' names.
      names: the clients' names, [m].
      first, second: values of the two columns in `PAIRS`, [m] each.
      ignored: names of the columns that are not used.
      covariate_names: names of the covariates as given, [k].
      covariates: values of the covariates, [m, k].
      groups: names of the clients' groups, [m]; None without groups.
      weights: nonnegative weights, [m]; None without weights.
    """

    kind: Kind
    client: str
    names: list[str]
    first: np.ndarray
    second: np.ndarray
    ignored: list[str]
    covariate_names: list[str]
    covariates: np.ndarray
    groups: list[str] | None = None
    weights: np.ndarray | None = None


class Fitted(NamedTuple):
    """Results of a fit.

    Attributes:
      facts: results for the population, as JSON; the entry ``estimated`` includes the ``mean``.
      columns: columns [m] of ``estimates.csv`` in addition to the clients' names.
      files: further tables, by file name.
    """

    facts: dict[str, Any]
    columns: dict[str, Any]
    files: Mapping[str, dict[str, list]] = {}


def read(
    table: Table,
    covariates: Sequence[str] = (),
    *,
    client: str | None = None,
    groups: str | None = None,
    weights: str | None = None,
) -> Summaries:
    """Read clients from a table that has the columns of exactly one pair in `PAIRS`, in any order and case.

    Args:
      table: table with a row per client.
      covariates: names of further numeric columns.
      client: name of the column with the clients' names; by default the column called client or id.
      groups: name of a column that names each client's group.
      weights: name of a column of nonnegative numbers.

    Raises:
      JaxpflError: if the table has none of the pairs, or more than one; if no column has the clients' names; if a
        covariate, ``groups`` or ``weights`` is not the name of a column; if a column is used twice; if a cell is not a
        finite number; if a standard error, a number of trials or an exposure is not positive; if successes, trials or
        counts are not whole, or there are more successes than trials; if a weight is negative; if a name is empty (the
        message gives the line) or occurs twice; or if one client is the sum of all (two or more) others.
    """
    path, known = table.path, [name.lower() for name in table.names]
    found: list[Kind] = [kind for kind, pair in PAIRS.items() if set(pair) <= set(known)]
    if len(found) != 1:
        ways = " or ".join(",".join(pair) for pair in PAIRS.values())
        more = "" if found else "; for a file with a row for each sample, use jaxpfl estimate gaussian"
        raise JaxpflError(f"{path} must have exactly one of the pairs of columns {ways}, but has {table.listed}{more}")
    kind = found[0]
    first, second = (table.find(name) for name in PAIRS[kind])
    wished = [table.find(name.strip(), "covariate") for name in covariates]
    group = None if groups is None else table.find(groups.strip(), "groups")
    weight = None if weights is None else table.find(weights.strip(), "weights")
    used = [first, second, *wished, *(name for name in (group, weight) if name is not None)]
    own = table.clients(client, used)
    for name in (own, *used):
        if [own, *used].count(name) > 1:
            raise JaxpflError(f"{path}: column {shown(name)} is used twice")
    columns = {name: table.numbers(name) for name in used if name != group}
    names, x, s = distinct_clients(table, own), columns[first], columns[second]
    rules = [(second, s > 0, "> 0")]
    if kind != "estimate":
        rules.append((first, (x >= 0) & (x == np.round(x)), "a whole number of at least 0"))
    if kind == "successes":
        rules += [(second, s == np.round(s), "a whole number"), (first, x <= s, f"at most the {second}")]
    if weight is not None:
        rules.append((weight, columns[weight] >= 0, "at least 0"))
    for name, good, words in rules:
        for row in np.flatnonzero(~good):
            got = shown(table.cells[name].iloc[row])
            raise JaxpflError(f"{path} line {table.lines[row]}: {name} must be {words}, got {got}")
    with np.errstate(over="ignore"):  # for a row of totals, the variance is the sum of the clients' variances
        refuse_sum(path, names, np.stack([x, s**2 if kind == "estimate" else s], axis=1))
    return Summaries(
        kind, own, names, x, s, [name for name in table.names if name not in (own, *used)], wished,
        np.stack([columns[name] for name in wished], axis=1) if wished else np.zeros((len(x), 0)),
        None if group is None else table.texts(group), None if weight is None else columns[weight],
    )  # fmt: skip


def own_results(path: Path, given: Any, options: Any) -> Results:
    """Fit a prior to the clients in a file, and estimate every client.

    Args:
      path: file to read; see `read`.
      given: settings of the study; fields that apply only to simulated clients must have their default values.
      options: a `NormalMeansOptions`.

    Raises:
      JaxpflError: if the file cannot be read; if the level is outside (0, 1); if an option does not apply to the file;
        or if two options exclude each other. Also as in the fit functions of `empirical_bayes`.
    """
    eb.level_within(options.level, np.float64)
    refuse_given(given, _SIMULATED, own_clients.NOT_OWN)
    table = csv_text.read(path, options.sep, options.decimal, options.encoding, options.missing_words)
    data = read(table, options.covariates, client=options.client, groups=options.groups, weights=options.weights)
    _refuse_beside(path, data.kind, options)
    try:
        with jax.enable_x64(True):
            found = _fit(data, given.seed, options)
    except JaxpflError as error:
        raise JaxpflError(f"{path}: {error}") from None
    columns = {name: np.asarray(values) for name, values in found.columns.items()}
    more = [name.strip() for name in (options.groups, options.weights) if name is not None]
    result: dict[str, Any] = {
        "study": "normal-means",
        "csv": path.name,
        "read": {
            "client": data.client,
            "columns": [*PAIRS[data.kind], *data.covariate_names, *more],
            "ignored": data.ignored,
        },
        "clients": len(data.names),
        "level": options.level,
        "settings": {"seed": given.seed},
    } | found.facts
    sizes = np.ones(len(data.names)) if data.kind == "estimate" else data.second
    local, personalized, low, high = (columns[name] for name in ("local", "personalized", "low", "high"))
    picture = Picture("", local, personalized, low, high, sizes, found.facts["estimated"]["mean"])
    own = Own(result, {"client": data.names} | {name: of.tolist() for name, of in columns.items()}, [picture])
    return own_clients.file_results(own, lambda: _summary_lines(result), found.files)


def _refuse_beside(path: Path, kind: Kind, options: Any) -> None:
    """Refuse options that would have no effect for this file or together with other options.

    Raises:
      JaxpflError: if there is such an option; the message names it.
    """
    if kind != "estimate":
        names = ["center", "components", "groups", *["prior"] * (options.prior != "npmle")]
        refuse_given(options, names, f"applies to files with estimate,se, but {path.name} has {','.join(PAIRS[kind])}")
    priors = ("prior", "center", "components", "weights")
    if options.covariates:
        why = "is not available with --covariates, which sets the prior"
        refuse_given(options, (*priors, "groups"), why)
    elif options.groups is not None:
        refuse_given(options, priors, "is not available with --groups, whose prior is normal")


def _fit(data: Summaries, seed: int, options: Any) -> Fitted:
    if data.covariate_names:
        at = eb.dependent(data.covariates)
        if at is not None:
            name = shown(data.covariate_names[at])
            raise JaxpflError(f"covariate {name} is a linear combination of the intercept and the covariates before it")
        return (_areas if data.kind == "estimate" else _rates_about)(data, options)
    if data.kind != "estimate":
        return _rates(data, seed, options)
    if data.groups is not None:
        return _groups(data, data.groups, options)
    return _estimates(data, options)


def _estimates(data: Summaries, options: Any) -> Fitted:
    """Fit a prior to estimates with standard errors."""
    x, s = data.first, data.second
    center: Any = options.center
    if center is None and options.prior in ("normal", "point-normal"):
        center = "learned"
    facts: dict[str, Any] = {"prior": options.prior, "intervals": "plug-in"}
    fit = ebnm(x, s, options.prior, center=center, components=options.components, weights=data.weights)
    low, high = fit.interval(options.level)
    stderr, lfsr = fit.sd, fit.lfsr
    if options.prior == "normal" and options.center is None and data.weights is None:
        # With few clients, the prior's mean and spread are uncertain, and the maximum-likelihood spread may be zero.
        # Intervals, standard errors and false sign rates therefore integrate over both.
        facts["intervals"] = "integrated"
        middle, stderr = (
            of[:, 0] for of in eb.learned_gaussian.posterior(jnp.asarray(x)[:, None], jnp.asarray(s) ** 2)
        )
        reach = eb.learned_gaussian.student(options.level, np.inf) * stderr
        low, high = middle - reach, middle + reach
        lfsr = jax.scipy.special.ndtr(-jnp.abs(middle) / stderr)
    robust, test = eb.robust_intervals(x, s, options.level), eb.homogeneity(x, s)
    facts |= {
        "estimated": {"mean": float(fit.prior.mean), "sigma_theta": float(fit.prior.sd)},
        "log_marginal": float(fit.log_marginal),
        "risk": _risk(s, fit.risks),
        "clients_differ": _test("Cochran's Q", test.statistic, test.p_value),
        "pooled": {"mean": float(test.mean), "stderr": float(test.stderr)},
        "kurtosis": robust.kurtosis,
    } | _weighting(data, options)
    columns = {
        "local": x, "local_stderr": s, "personalized": fit.mean, "personalized_stderr": stderr,
        "low": np.minimum(low, fit.mean), "high": np.maximum(high, fit.mean), "robust": robust.mean,
        "robust_low": robust.low, "robust_high": robust.high, "lfsr": lfsr, "shrinkage": fit.shrinkage,
        "score": fit.scores,
    }  # fmt: skip
    return Fitted(facts, columns)


def _areas(data: Summaries, options: Any) -> Fitted:
    """Shrink estimates with standard errors toward a regression on covariates."""
    found = eb.fay_herriot(data.first, data.second, data.covariates)
    low, high = found.interval(options.level)
    facts = {
        "prior": "normal",
        "estimated": {"mean": float(found.regression.mean()), "sigma_theta": float(found.variance) ** 0.5},
        "coefficients": own_clients.coefficients(data.covariate_names, found.beta, found.beta_covariance),
        "log_likelihood": float(found.log_likelihood),
        "risk": _risk(data.second, found.risks),
        "clients_differ": _test("Cochran's Q about the regression", found.statistic, found.p_value),
    }
    columns = {
        "local": data.first, "local_stderr": data.second, "personalized": found.mean,
        "personalized_stderr": np.sqrt(found.mse), "low": low, "high": high, "regression": found.regression,
        "shrinkage": found.shrinkage, "residual": found.residual,
    }  # fmt: skip
    return Fitted(facts, columns)


def _groups(data: Summaries, groups: list[str], options: Any) -> Fitted:
    """Shrink estimates with standard errors toward the means of their groups."""
    names, index = np.unique(np.array(groups), return_inverse=True)
    found = eb.ebnm_groups(data.first, data.second, index)
    low, high = found.interval(options.level)
    group_low, group_high = found.group_interval(options.level)
    facts = {
        "prior": "normal",
        "estimated": {
            "mean": float(found.overall), "stderr": float(found.overall_stderr),
            "sigma_theta": float(found.within) ** 0.5, "sigma_groups": float(found.between) ** 0.5,
        },
        "groups": len(names),
        "log_likelihood": float(found.log_likelihood),
        "risk": _risk(data.second, found.risks),
        "clients_differ": _test("Cochran's Q about the groups", found.statistic, found.p_value),
        "groups_differ": _test("likelihood ratio", found.ratio, found.group_p_value),
    }  # fmt: skip
    columns = {
        "local": data.first, "local_stderr": data.second, "personalized": found.mean,
        "personalized_stderr": np.sqrt(found.mse), "low": low, "high": high, "group": np.array(groups),
        "group_mean": np.asarray(found.group_mean)[index], "shrinkage": found.shrinkage, "residual": found.residual,
    }  # fmt: skip
    rows = {
        "clients": np.bincount(index), "mean": found.group_mean, "stderr": np.sqrt(found.group_mse),
        "low": group_low, "high": group_high, "shrinkage": found.group_shrinkage, "residual": found.group_residual,
    }  # fmt: skip
    table = {"group": names.tolist()} | {name: np.asarray(of).tolist() for name, of in rows.items()}
    return Fitted(facts, columns, {"groups.csv": table})


def _rates(data: Summaries, seed: int, options: Any) -> Fitted:
    """Fit a Beta or Gamma prior, or any distribution (npmle), to successes in trials or to counts."""
    z, n, bounded = data.first, data.second, data.kind == "successes"
    prior: Any = "npmle" if options.prior == "npmle" else "conjugate"
    fit = (eb.ebbinomial if bounded else eb.ebpoisson)(z, n, prior, weights=data.weights)
    low, high, stderr = (np.asarray(of) for of in (*fit.interval(options.level), fit.sd))
    how = "plug-in"
    if prior == "conjugate" and data.weights is None and len(z) <= _MOST_INTEGRATED:
        how = "integrated"
        low, high, stderr = (eb.learned_rates.probabilities if bounded else eb.learned_rates.rates)(z, n, options.level)
    test = eb.differences.compare_shares(z, n, seed) if bounded else eb.differences.compare_rates(z, n)
    facts = {
        "prior": "npmle" if prior == "npmle" else "beta" if bounded else "gamma",
        "intervals": how,
        "estimated": {"mean": float(fit.prior_mean), "sigma_theta": float(fit.prior_sd)},
        "log_marginal": float(fit.log_marginal),
        "clients_differ": test._asdict(),
    } | _weighting(data, options)
    own = np.asarray(fit.mean)
    columns = {
        "local": z / n, "personalized": own, "personalized_stderr": stderr, "low": np.minimum(low, own),
        "high": np.maximum(high, own),
    }  # fmt: skip
    return Fitted(facts, columns)


def _rates_about(data: Summaries, options: Any) -> Fitted:
    """Fit Beta or Gamma priors whose means follow a regression on covariates, to successes in trials or to counts."""
    bounded = data.kind == "successes"
    fit = (eb.ebbinomial_regression if bounded else eb.ebpoisson_regression)(data.first, data.second, data.covariates)
    low, high = fit.interval(options.level)
    spread = float(fit.spread)
    facts = {
        "prior": "beta" if bounded else "gamma",
        "estimated": {
            "mean": float(fit.rates.prior_mean.mean()),
            "sigma_theta": float((fit.rates.prior_sd**2).mean()) ** 0.5,
        },
        "spread": {"pseudo_trials" if bounded else "shape": spread if np.isfinite(spread) else None},
        "coefficients": own_clients.coefficients(data.covariate_names, fit.beta, fit.beta_covariance),
        "log_marginal": float(fit.log_marginal),
        "clients_differ": _test("likelihood ratio to the regression", fit.ratio, fit.p_value),
    }
    columns = {
        "local": data.first / data.second, "personalized": fit.mean, "personalized_stderr": fit.rates.sd,
        "low": np.minimum(low, fit.mean), "high": np.maximum(high, fit.mean), "regression": fit.rates.prior_mean,
        "shrinkage": fit.rates.shrinkage,
    }  # fmt: skip
    return Fitted(facts, columns)


def _test(name: str, statistic: Any, p_value: Any) -> dict[str, Any]:
    return {"name": name, "statistic": float(statistic), "p_value": float(p_value)}


def _risk(s: np.ndarray, terms: Any) -> dict[str, float]:
    """Mean squared errors, as JSON: ``local`` of the estimates x, and ``personalized`` of the posterior means.

    ``personalized`` is Stein's unbiased estimate, which is the mean of the clients' ``terms``, and ``stderr`` is its
    standard error.
    """
    each = np.asarray(terms)
    stderr = float(each.std(ddof=1) / len(s) ** 0.5)
    return {"local": float((s**2).mean()), "personalized": float(each.mean()), "stderr": stderr}


def _weighting(data: Summaries, options: Any) -> dict[str, Any]:
    """Name of the weights' column, and Kish's effective number of clients, as JSON; empty without weights."""
    if data.weights is None:
        return {}
    share = data.weights / data.weights.sum()
    return {"weights": {"column": options.weights.strip().lower(), "effective_clients": float(1 / (share @ share))}}


def _summary_lines(result: dict[str, Any]) -> list[Block]:
    lines = [own_clients.summaries_read(result)]
    estimated = result["estimated"]
    if "coefficients" in result:
        lines.append(own_clients.coefficients_line(result))
        lines.append(f"spread about the regression: sigma_theta {estimated['sigma_theta']:.4g}")
    elif "groups" in result:
        mean = f"mean {estimated['mean']:.4g} ± {estimated['stderr']:.2g}"
        spreads = f"sigma_groups {estimated['sigma_groups']:.4g}, sigma_theta within groups"
        lines.append(f"estimated from {result['groups']} groups: {mean}, {spreads} {estimated['sigma_theta']:.4g}")
        lines.append(own_clients.test_line(result["groups_differ"], "groups"))
    else:
        mean, spread = f"mean {estimated['mean']:.4g}", f"sigma_theta {estimated['sigma_theta']:.4g}"
        likely = f"log likelihood {result['log_marginal']:.6g}"
        lines.append(f"estimated from all clients, prior {result['prior']}: {mean}, {spread}, {likely}")
    if "weights" in result:
        of = result["weights"]
        lines.append(
            f"prior weighted by {printable(of['column'])}, equivalent to {of['effective_clients']:.4g} equal weights; "
            "tests count each row once"
        )
    lines.append(own_clients.test_line(result["clients_differ"], "clients"))
    if "risk" in result:
        risk = result["risk"]
        lines.append(
            f"mean squared error by Stein's unbiased estimate: {risk['personalized']:.4g} ± {risk['stderr']:.2g}, "
            f"local {risk['local']:.4g}"
        )
    if result.get("intervals") == "plug-in":
        lines.append("intervals treat the prior as known, so they are too short with few clients")
    return [*lines]


STUDY = Study(NormalMeansSettings, own_or_simulated(own_results, simulated), NormalMeansOptions)
