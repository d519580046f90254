"""Study of Bernoulli clients with unequal numbers of samples: gains by client size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import checks
from jaxpfl.core.types import Array, Key
from jaxpfl.estimators import bernoulli
from jaxpfl.estimators.base import Samples
from jaxpfl.studies.bernoulli import ProbabilityPrior, parse_prior, plain_estimators
from jaxpfl.studies.repetitions import gain, measure, repeat, repetition, report
from jaxpfl.studies.report import Curve, estimator_table, plus_minus, write_gains
from jaxpfl.studies.study import Block, Results, Settings, Study, minimum, within
from jaxpfl.support.errors import JaxpflError

_SHOWN = 8
"""Largest number of sizes that are reported separately."""


@dataclass(frozen=True)
class UnequalSettings(Settings):
    """Settings of the study.

    The model is X_ij ~ Bern(p_i), p_i ~ P, with n_i samples for client i.
    """

    clients: int = within(10_000, minimum(2))
    """Number of clients, m."""
    least: int = within(2, checks.count)
    """Fewest samples of a client."""
    most: int = 50
    """Most samples of a client; all numbers between them are about equally frequent."""
    prior: str = "truncnorm:.5,.15"
    """P: beta:ALPHA,BETA, truncnorm:MEAN,STDDEV (truncated to [0, 1]), uniform, or spikes (1/4, 1/2, 3/4)."""
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
        if self.most < max(2, self.least):
            raise JaxpflError(f"most must be at least 2 and not below least ({self.least}), got {self.most}")
        return parse_prior(self.prior)

    @property
    def sizes(self) -> np.ndarray:
        """Numbers of samples n_i in ascending order, [m]."""
        return self.least + np.arange(self.clients) * (self.most - self.least + 1) // self.clients

    @property
    def reported_sizes(self) -> list[int]:
        """Sizes that are reported separately, evenly spaced on a logarithmic axis."""
        sizes = np.unique(self.sizes)
        spaced = np.geomspace(sizes[0], sizes[-1], _SHOWN)
        return [int(n) for n in np.unique(sizes[np.abs(sizes[:, None] - spaced).argmin(axis=0)])]


def draw(key: Key, given: UnequalSettings, prior: ProbabilityPrior) -> tuple[Array, Samples]:
    """Draw probabilities [m], and samples [m, most] in {0, 1}; the mask selects the first n_i samples of client i."""
    of_p, of_x = jax.random.split(key)
    p = prior.draw(of_p, given.clients)
    ones = jax.random.uniform(of_x, (given.clients, given.most)) < p[:, None]
    return p, Samples(ones.astype(p.dtype), jnp.arange(given.most) < given.sizes[:, None])


def simulate(given: UnequalSettings, prior: ProbabilityPrior) -> dict[str, np.ndarray]:
    """Mean squared errors by estimator, [repetitions, 1 + sizes]: over all clients, and for each reported size."""
    estimators = plain_estimators()
    if prior.beta is not None:
        estimators["known prior"] = bernoulli.beta_posterior(*prior.beta)
    groups = np.stack([np.ones(given.clients, bool), *(given.sizes == n for n in given.reported_sizes)])

    def score(estimates: Array, p: Array) -> Array:
        return jnp.where(groups, (estimates - p) ** 2, 0).sum(axis=1) / groups.sum(axis=1)

    study = repetition(lambda key: draw(key, given, prior), estimators, score=score)
    found = repeat(study, given.seed, given.repetitions, given.clients * given.most)
    return {name: found[name] for name in estimators}


def simulated(given: UnequalSettings) -> Results:
    """Compare local estimates, one estimate for all clients, and personalised estimates, whose weights depend on n_i.

    In the summary, ``mse`` and ``gains`` are over all clients. ``by_samples`` has the same entries over the clients of
    each reported size, and ``limit``: the gain of the optimal weight with infinitely many clients.

    Raises:
      JaxpflError: as in `UnequalSettings.check`.
    """
    prior = given.check()
    series = simulate(given, prior)
    local = prior.population.local(given.sizes)
    exact = {
        "local": float(local.mean()),
        "global": float(prior.population.global_mean(1 / (1 / given.sizes).mean(), given.clients)),
    }
    rows = []
    for number, n in enumerate(given.reported_sizes, start=1):
        errors = {name: values[:, number] for name, values in series.items()}
        rows.append({
            "samples": n,
            "clients": int((given.sizes == n).sum()),
            "mse": {name: measure(values)._asdict() for name, values in errors.items()},
            "gains": {name: gain(of, errors["local"])._asdict() for name, of in errors.items() if name != "local"},
            "limit": 1 - float(prior.population.weight(n)),
        })  # fmt: skip
    result = {"study": "unequal", "settings": dict(vars(given))}
    result |= report({name: values[:, 0] for name, values in series.items()}, exact) | {"by_samples": rows}
    return Results(
        json=result,
        tables=lambda: _tables(given, result),
        plots=lambda folder: [_plot(folder, given, prior, result)],
        series=series,
    )


def _tables(given: UnequalSettings, result: dict[str, Any]) -> list[Block]:
    title = f"{given.clients} Bernoulli clients of {given.least} to {given.most} samples, {given.prior}"
    lines = []
    for row in result["by_samples"]:
        gained = plus_minus(row["gains"]["personalized"], percent=True)
        limit = f"{100 * row['limit']:.1f} %"
        lines.append(
            f"clients with {row['samples']} samples: personalized gains {gained}; limit with many clients {limit}"
        )
    return estimator_table(result, f"{title}, {given.repetitions} repetitions", lines)


def _plot(folder: Path, given: UnequalSettings, prior: ProbabilityPrior, result: dict[str, Any]) -> Path:
    rows = result["by_samples"]
    fine = np.geomspace(rows[0]["samples"], max(rows[-1]["samples"], 1 + rows[0]["samples"]), 60)
    curves = {}
    for name in (name for name in result["gains"] if name != "global"):
        line = 100 * (1 - prior.population.weight(fine)) if name == "personalized" else None
        sizes, gains = [row["samples"] for row in rows], [row["gains"][name] for row in rows]
        curves[name] = Curve.measured(sizes, gains, line, scale=100)
    title = f"Clients of unequal sizes, m = {given.clients}, {given.prior}"
    return write_gains(folder / "gain-samples.png", fine, curves, xlabel="samples of a client, n", title=title)


STUDY = Study(UnequalSettings, simulated)
