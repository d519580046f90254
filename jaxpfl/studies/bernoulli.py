"""The Bernoulli study: local, personalised and private estimates of simulated clients' probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import checks
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators import base, bernoulli
from jaxpfl.estimators.base import Estimator
from jaxpfl.estimators.bernoulli import Population
from jaxpfl.studies import probability_priors as priors
from jaxpfl.studies.own_data.client_csv import OwnClients, own_or_simulated
from jaxpfl.studies.probability_priors import ProbabilityPrior
from jaxpfl.studies.repetitions import Swept, gain, repeat, repetition, report
from jaxpfl.studies.report import Curve, estimator_table, write_gains
from jaxpfl.studies.study import Results, Settings, Study, at_least, check_uploads, within
from jaxpfl.support.errors import JaxpflError


@dataclass(frozen=True)
class BernoulliSettings(Settings):
    """X_ij ~ Bern(p_i), p_i ~ P; the defaults are those of the paper's study, for its normal prior."""

    clients: int = within(10_000, at_least(2))
    """m."""
    samples: int = 14
    """n, of each client."""
    prior: str = "truncnorm:.5,.15"
    """P: beta:ALPHA,BETA, truncnorm:MEAN,STDDEV (truncated to [0, 1]), uniform, or spikes (1/4, 1/2, 3/4)."""
    epsilon: float | None = within(None, checks.positive)
    """Local privacy of each client's message, pure; none unless given."""
    uploads: int | None = None
    """K: number of clients that send; the others personalise as well. All unless given."""
    repetitions: int = within(60, checks.count)
    """Independent repetitions, for the standard errors."""
    seed: int = 0
    """Seed of every random draw."""

    def check(self) -> ProbabilityPrior:
        """Check the settings, and return the population.

        Raises:
          JaxpflError: the name, its value, and what is allowed.
        """
        super().check()
        if self.samples < 2:
            raise JaxpflError(
                f"samples must be at least 2, got {self.samples}: of one sample each, nothing can be learned of the "
                "clients' variance"
            )
        check_uploads(self.uploads, self.clients)
        return priors.parse(self.prior)


def contenders(given: BernoulliSettings, prior: ProbabilityPrior) -> dict[str, tuple[Estimator, float | None]]:
    """Estimators that the settings call for, by name, with their exact errors if known."""
    n, of = given.samples, prior.population
    best, printed = of.weight(n), of.printed_weight(n)
    found: dict[str, tuple[Estimator, float | None]] = {
        "local": (bernoulli.local(), of.local(n)),
        "global": (bernoulli.global_mean(), theory(given, of)),
        "personalized": (bernoulli.personalized(), theory(given, of, best)),
        "printed": (bernoulli.personalized(printed=True), theory(given, of, printed)),
    }
    if prior.beta is not None:
        found["known prior"] = (bernoulli.known_beta(*prior.beta), of.personalized(n, best))
    if given.epsilon is not None:
        found["private"] = (bernoulli.split(given.epsilon), None)
        found["printed private"] = (bernoulli.printed_private(given.epsilon), None)
    return found


def theory(given: BernoulliSettings, of: Population, a: Scalar | None = None) -> float:
    """Exact error of a weight with the mean of the other clients' shares; without a weight, of the mean of all.

    It is averaged over clients that send and those that do not.
    """
    uploads, n = given.uploads or given.clients, given.samples
    if a is None:
        sender, other = of.global_mean(n, uploads), of.personalized(n, 0.0, uploads)
    else:
        sender, other = (of.personalized(n, a, others) for others in (uploads - 1, uploads))
    return float(other + (sender - other) * uploads / given.clients)


def draw(key: Key, given: BernoulliSettings, prior: ProbabilityPrior) -> tuple[Array, base.Samples]:
    """Draw probabilities [m] and samples [m, n] of zeros and ones."""
    of_p, of_x = jax.random.split(key)
    p = prior.draw(of_p, given.clients)
    ones = jax.random.uniform(of_x, (given.clients, given.samples)) < p[:, None]
    return p, base.every(ones.astype(p.dtype))


def simulate(given: BernoulliSettings, estimators: Mapping[str, Estimator | Swept], numbers: int) -> dict[str, Any]:
    """Mean squared error of each estimator in each repetition, [repetitions, ...], on the same data for all.

    Args:
      given: the settings.
      estimators: by name.
      numbers: random numbers of a client.
    """
    prior = priors.parse(given.prior)
    study = repetition(lambda key: draw(key, given, prior), estimators, given.uploads)
    errors = repeat(study, given.seed, given.repetitions, given.clients * numbers)
    return {name: errors[name] for name in estimators}


@dataclass(frozen=True)
class BernoulliOptions(OwnClients):
    """The user's own clients instead of simulated ones."""

    csv: Path | None = None
    """Clients of your own, samples 0 or 1: one row per client, or per sample; the reading of the file is reported."""


def run(given: BernoulliSettings) -> dict[str, Any]:
    """Summary of `simulated`: each estimator's error and closed form.

    Reference: Ozkara et al. 2023, appendix K.2, Bernoulli.
    """
    return simulated(given).json


def simulated(given: BernoulliSettings) -> Results:
    """Run the simulation.

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
    """A line on the guarantee of a client's message; none without eps."""
    if given.epsilon is None:
        return []
    return [f"private: every client's message by itself, epsilon {given.epsilon:g}, pure, mechanism one-bit"]


def printed_bounds(given: BernoulliSettings) -> dict[str, float]:
    """The paper's bounds on the estimated mean's squared error: Theorem 3, and under privacy Theorem 4."""
    m, n = given.clients, given.samples
    bounds = {"mean": float(bernoulli.printed_error(m, n))}
    if given.epsilon is not None:
        bounds["private mean"] = float(bernoulli.printed_private_error(m, n, given.epsilon))
    return bounds


EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def over_epsilon(given: BernoulliSettings, epsilons: tuple[float, ...] = EPSILONS) -> dict[str, np.ndarray]:
    """Errors of the private designs, [repetitions, len(epsilons)] each, and of ``local``, [repetitions], on the same
    data.
    """
    given.check()
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
    """Plot the gain against eps at the settings into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    errors = over_epsilon(given)
    local = errors.pop("local")
    best = gain(errors.pop("personalized"), local)
    curves = {"personalized": Curve.level(100 * best.mean, EPSILONS)}
    for name, values in errors.items():
        curves[name] = Curve.measured(EPSILONS, [gain(column, local) for column in values.T], scale=100)
    title = f"Private bits, m = {given.clients}, n = {given.samples}, {given.prior}"
    path = folder / "gain-epsilon.png"
    return [write_gains(path, EPSILONS, curves, xlabel="epsilon of a client's bit", title=title)]


STUDY = Study(BernoulliSettings, own_or_simulated("bernoulli", simulated), BernoulliOptions)
