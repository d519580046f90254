"""The Bernoulli study: local, personalized and private estimates of simulated clients' probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import checks
from jaxpfl.core.randomness import named
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators import base, bernoulli
from jaxpfl.estimators.base import Estimator
from jaxpfl.estimators.bernoulli import Population
from jaxpfl.estimators.empirical_bayes import differences, learned_rates, level_within
from jaxpfl.studies import own_clients
from jaxpfl.studies.own_clients import LEVEL, CsvLayout, Own, OwnClients, own_or_simulated
from jaxpfl.studies.repetitions import Swept, gain, repeat, repetition, report
from jaxpfl.studies.report import Curve, estimator_table, write_gains
from jaxpfl.studies.study import Results, Settings, Study, check_uploads, minimum, refuse_given, within
from jaxpfl.support.errors import JaxpflError, shown, unknown_name


@dataclass(frozen=True)
class BernoulliSettings(Settings):
    """Settings of the study.

    The model is X_ij ~ Bern(p_i), p_i ~ P. The defaults reproduce the paper's study with its normal prior.
    """

    clients: int = within(10_000, minimum(2))
    """Number of clients, m."""
    samples: int = 14
    """Samples per client, n."""
    prior: str = "truncnorm:.5,.15"
    """Distribution P of the clients' probabilities: beta:ALPHA,BETA, truncnorm:MEAN,STDDEV (truncated to [0, 1]),
    uniform, or spikes (1/4, 1/2, 3/4)."""
    epsilon: float | None = within(None, checks.positive)
    """Epsilon of pure local differential privacy for each client's message; by default, messages are not private."""
    uploads: int | None = None
    """Number K of clients that send a message; the others are estimated too. By default, all clients send one."""
    repetitions: int = within(60, checks.count)
    """Number of independent repetitions, for the standard errors."""
    seed: int = 0
    """Seed of every random draw."""

    def check(self) -> ProbabilityPrior:
        """Check the settings, and return the distribution P of the clients' probabilities.

        Raises:
          JaxpflError: if a setting is out of range; the message names the setting, its value and the allowed values.
        """
        super().check()
        if self.samples < 2:
            raise JaxpflError(
                f"samples must be at least 2, got {self.samples}: with one sample each, the clients' "
                "variance cannot be estimated"
            )
        check_uploads(self.uploads, self.clients)
        return parse_prior(self.prior)


def plain_estimators() -> dict[str, Estimator]:
    """Estimators without privacy, by name."""
    return {
        "local": bernoulli.local(),
        "global": bernoulli.global_mean(),
        "personalized": bernoulli.personalized(),
        "printed": bernoulli.personalized(printed=True),
    }


def contenders(given: BernoulliSettings, prior: ProbabilityPrior) -> dict[str, tuple[Estimator, float | None]]:
    """Estimators for these settings, by name, each with its exact error, or None if the error is unknown."""
    n, of = given.samples, prior.population
    best, printed = of.weight(n), of.printed_weight(n)
    found: dict[str, tuple[Estimator, float | None]] = {
        "local": (bernoulli.local(), of.local(n)),
        "global": (bernoulli.global_mean(), theory(given, of)),
        "personalized": (bernoulli.personalized(), theory(given, of, best)),
        "printed": (bernoulli.personalized(printed=True), theory(given, of, printed)),
    }
    if prior.beta is not None:
        found["known prior"] = (bernoulli.beta_posterior(*prior.beta), of.personalized(n, best))
    if given.epsilon is not None:
        found["private"] = (bernoulli.split(given.epsilon), None)
        found["printed private"] = (bernoulli.printed_private(given.epsilon), None)
    return found


def theory(given: BernoulliSettings, of: Population, a: Scalar | None = None) -> float:
    """Exact mean squared error of a client's estimate in the population ``of``, averaged over all clients.

    The estimate is ``a`` times the client's own fraction of ones, plus ``1 - a`` times the mean fraction of the other
    clients that upload. If ``a`` is None, every client's estimate is the mean fraction of all uploading clients. The
    average includes clients that do not upload.
    """
    uploads, n = given.uploads or given.clients, given.samples
    if a is None:
        sender, other = of.global_mean(n, uploads), of.personalized(n, 0.0, uploads)
    else:
        sender, other = (of.personalized(n, a, others) for others in (uploads - 1, uploads))
    return float(other + (sender - other) * uploads / given.clients)


def draw(key: Key, given: BernoulliSettings, prior: ProbabilityPrior) -> tuple[Array, base.Samples]:
    """Draw probabilities [m], and samples [m, n] in {0, 1}."""
    of_p, of_x = jax.random.split(key)
    p = prior.draw(of_p, given.clients)
    ones = jax.random.uniform(of_x, (given.clients, given.samples)) < p[:, None]
    return p, base.every(ones.astype(p.dtype))


def simulate(given: BernoulliSettings, estimators: Mapping[str, Estimator | Swept], numbers: int) -> dict[str, Any]:
    """Mean squared error of each estimator in each repetition, [repetitions, ...]; all estimators see the same data.

    Args:
      given: the settings.
      estimators: estimators by name.
      numbers: number of random numbers per client, which limits how many repetitions are vmapped together.
    """
    prior = parse_prior(given.prior)
    study = repetition(lambda key: draw(key, given, prior), estimators, given.uploads)
    errors = repeat(study, given.seed, given.repetitions, given.clients * numbers)
    return {name: errors[name] for name in estimators}


@dataclass(frozen=True)
class BernoulliOptions(OwnClients):
    """Options for estimating the user's own clients instead of simulated clients."""

    csv: Path | None = None
    """CSV file of your own clients, whose samples are 0 or 1, with a row per client or per sample; the output says how
    the file was read."""


def simulated(given: BernoulliSettings) -> Results:
    """Run the simulation.

    Reference: Ozkara et al. 2023, appendix K.2, Bernoulli.

    Raises:
      JaxpflError: as in `BernoulliSettings.check`.
    """
    prior = given.check()
    found = contenders(given, prior)
    errors = simulate(given, {name: estimator for name, (estimator, _) in found.items()}, given.samples)
    exact = {name: None if mse is None else float(mse) for name, (_, mse) in found.items()}
    mean, variance = (float(value) for value in prior.population)
    result = {"study": "bernoulli", "settings": dict(vars(given))} | report(errors, exact)
    result |= {"population": {"mean": mean, "variance": variance}, "printed_bounds": printed_bounds(given)}
    sizes = f"{given.clients} Bernoulli clients of {given.samples} samples"
    title = f"{sizes}, {given.prior}, {given.repetitions} repetitions"
    return Results(
        json=result,
        tables=lambda: estimator_table(result, title, privacy_notes(given)),
        plots=lambda folder: write_plots(folder, given),
        series=errors,
    )


def privacy_notes(given: BernoulliSettings) -> list[str]:
    """List with one line on the privacy guarantee of a client's message; empty without epsilon."""
    if given.epsilon is None:
        return []
    return [f"private: each client's message, epsilon {given.epsilon:g}, pure, mechanism one-bit"]


def printed_bounds(given: BernoulliSettings) -> dict[str, float]:
    """The paper's bounds on the squared error of the estimated population mean.

    ``mean`` is the bound of Theorem 3, and ``private mean`` (only with epsilon) the bound of Theorem 4.
    """
    m, n = given.clients, given.samples
    bounds = {"mean": float(bernoulli.printed_error(m, n))}
    if given.epsilon is not None:
        bounds["private mean"] = float(bernoulli.printed_private_error(m, n, given.epsilon))
    return bounds


EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def over_epsilon(given: BernoulliSettings, epsilons: tuple[float, ...] = EPSILONS) -> dict[str, np.ndarray]:
    """Mean squared errors of the private estimators at each epsilon, and of ``local`` and ``personalized``.

    The errors have shape [repetitions, len(epsilons)] for a private estimator, and [repetitions] for the other two. All
    estimators are scored on the same data.
    """
    at = jnp.array(epsilons)
    estimators = {
        "private": Swept(bernoulli.split, at),
        "private, plus one error": Swept(lambda epsilon: bernoulli.split(epsilon, plus_error=True), at),
        "printed private": Swept(bernoulli.printed_private, at),
        "local": bernoulli.local(),
        "personalized": bernoulli.personalized(),
    }
    return simulate(given, estimators, given.samples + 3 * len(epsilons))


def write_plots(folder: Path, given: BernoulliSettings) -> list[Path]:
    """Plot the gain against epsilon for these settings; write the plot into ``folder``."""
    errors = over_epsilon(given)
    local = errors.pop("local")
    best = gain(errors.pop("personalized"), local)
    curves = {"personalized": Curve.level(100 * best.mean, EPSILONS)}
    for name, values in errors.items():
        curves[name] = Curve.measured(EPSILONS, [gain(column, local) for column in values.T], scale=100)
    title = f"Private bits, m = {given.clients}, n = {given.samples}, {given.prior}"
    path = folder / "gain-epsilon.png"
    return [write_gains(path, EPSILONS, curves, xlabel="epsilon of a client's bit", title=title)]


PRIORS = ("beta", "truncnorm", "uniform", "spikes")


class ProbabilityPrior(NamedTuple):
    """A distribution P of the clients' probabilities, on [0, 1].

    Attributes:
      name: string from which P was parsed.
      draw: function ``(key, m) -> [m]`` that draws m probabilities.
      population: mean and variance of P.
      beta: (alpha, beta) if P is a Beta distribution, otherwise None.
    """

    name: str
    draw: Callable[[Key, int], Array]
    population: Population
    beta: tuple[float, float] | None = None


def parse_prior(text: str) -> ProbabilityPrior:
    """Parse a population: ``beta:ALPHA,BETA``, ``truncnorm:MEAN,STDDEV``, ``uniform`` or ``spikes``.

    ``truncnorm`` is truncated to [0, 1]; ``spikes`` has equal mass at 1/4, 1/2 and 3/4.

    Raises:
      JaxpflError: if the distribution is unknown or its arguments are wrong.
    """
    kind, _, rest = text.partition(":")
    if kind not in PRIORS:
        raise unknown_name("prior", kind, PRIORS)
    try:
        values = [float(part) for part in rest.split(",")] if rest else []
    except ValueError:
        raise JaxpflError(f"prior {shown(text)}: {shown(rest)} is not a list of numbers") from None
    if len(values) != (2 if kind in ("beta", "truncnorm") else 0):
        raise JaxpflError(f"prior must be beta:ALPHA,BETA, truncnorm:MEAN,STDDEV, uniform or spikes, got {shown(text)}")
    if kind == "uniform":
        return ProbabilityPrior(text, lambda key, m: jax.random.uniform(key, (m,)), Population(0.5, 1 / 12), (1.0, 1.0))
    if kind == "spikes":
        return ProbabilityPrior(text, lambda key, m: jax.random.randint(key, (m,), 1, 4) / 4, Population(0.5, 1 / 24))
    return _beta(text, *values) if kind == "beta" else _truncated(text, *values)


def _beta(text: str, alpha: float, beta: float) -> ProbabilityPrior:
    if not (0 < alpha < 1e6 and 0 < beta < 1e6):
        raise JaxpflError(f"prior {shown(text)}: ALPHA and BETA must be > 0 and below 1e6")
    total = alpha + beta
    population = Population(alpha / total, alpha * beta / (total**2 * (total + 1)))
    return ProbabilityPrior(text, lambda key, m: jax.random.beta(key, alpha, beta, (m,)), population, (alpha, beta))


def _truncated(text: str, mean: float, stddev: float) -> ProbabilityPrior:
    if not (0 <= mean <= 1 and 0 < stddev < 1e3):
        raise JaxpflError(f"prior {shown(text)}: MEAN must be within [0, 1] and STDDEV > 0 and below 1000")
    low, high = (0 - mean) / stddev, (1 - mean) / stddev

    def draw(key: Key, m: int) -> Array:
        return jnp.clip(mean + stddev * jax.random.truncated_normal(key, low, high, (m,)), 0, 1)

    with jax.enable_x64(True):
        # Moments of the normal distribution truncated to [low, high] (in units of the standard deviation).
        cdf, pdf = jax.scipy.stats.norm.cdf, jax.scipy.stats.norm.pdf
        mass = cdf(high) - cdf(low)
        first = (pdf(low) - pdf(high)) / mass
        second = 1 + (low * pdf(low) - high * pdf(high)) / mass
        population = Population(float(mean + stddev * first), float(stddev**2 * (second - first**2)))
    return ProbabilityPrior(text, draw, population)


def estimate_file(
    path: Path, given: BernoulliSettings, layout: CsvLayout | None = None, *, level: float = LEVEL
) -> Own:
    """Estimate the probabilities of a file's clients, whose samples are zeros and ones.

    Args:
      path: file to read.
      given: settings of the study; fields that apply only to simulated clients must have their default values.
      layout: layout of the file.
      level: probability level of the intervals.

    Raises:
      JaxpflError: if the level is out of range; if a setting is out of range or does not apply to the user's own data;
        if the file cannot be read; if a sample is not 0 or 1; or if there are fewer than two clients, or no client has
        two samples.
    """
    level_within(level, np.float64)
    ignored = (*own_clients.SIMULATED, "prior")
    refuse_given(given, ignored, own_clients.NOT_OWN)
    given.check()
    clients = own_clients.read(path, layout)
    for name, own in zip(clients.names, clients.samples, strict=True):
        if own.ndim > 1 or not np.isin(own, (0, 1)).all():
            raise JaxpflError(f"{path}: samples must be single numbers, 0 or 1, but client {shown(name)} has others")
    sizes = own_clients.sizes_of(path, clients.samples)
    notes = own_clients.alike(clients.columns, clients.samples)
    estimators = plain_estimators()
    if given.epsilon is not None:
        estimators["private"] = bernoulli.split(given.epsilon)
    with jax.enable_x64(True):
        data = base.stack(clients.samples)
        # The key depends on the data, because equal noise for two files that differ by one client would reveal that
        # client.
        key = named(jax.random.key(given.seed), *data)
        made = own_clients.estimates(estimators, key, data)
        told: bernoulli.Broadcast = made["personalized"].shared
        mu = told.shares.mean
        v = jnp.clip(bernoulli.moment_variance(mu, told.shares.variance, told.inverse_sizes.mean), 0, mu * (1 - mu))
        ones = np.array([own.sum() for own in clients.samples])
        believed = learned_rates.probabilities(ones, sizes, level)
        settings = {name: value for name, value in vars(given).items() if name not in ignored}
        facts: dict[str, Any] = {"read": clients.understood, "notes": notes, "settings": settings, "level": level}
        if given.epsilon is not None:
            facts["privacy"] = {"epsilon": given.epsilon, "delta": 0.0, "mechanism": "one-bit"}
        of_all: dict[str, Any] = {
            "estimated": {"mean": float(mu), "variance": float(v)},
            "clients_differ": differences.compare_shares(ones, sizes, given.seed)._asdict(),
        }
        # The usual standard error of a fraction is zero if all samples are equal; the posterior under a flat prior has
        # a positive standard deviation.
        local_stderr = np.sqrt((ones + 1) * (sizes - ones + 1) / (sizes + 3)) / (sizes + 2)
        learned = own_clients.Learned(of_all, *believed, local_stderr, {})
        return own_clients.summary("bernoulli", path, clients, data, estimators, made, key, [learned], facts)


def own_results(path: Path, given: BernoulliSettings, options: OwnClients) -> Results:
    """Results of `estimate_file` with the options' layout and level."""
    made, notes = estimate_file(path, given, options, level=options.level), privacy_notes(given)
    if notes:
        notes = [*notes, own_clients.privacy_line(made.result["privacy"])]
    return own_clients.file_results(made, lambda: own_clients.file_tables(made.result, notes))


STUDY = Study(BernoulliSettings, own_or_simulated(own_results, simulated), BernoulliOptions)
