"""Probabilities of the user's own clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core.randomness import named
from jaxpfl.estimators import base, bernoulli
from jaxpfl.estimators.empirical_bayes import differences, learned_rates, level_within
from jaxpfl.studies.bernoulli import BernoulliSettings, privacy_notes
from jaxpfl.studies.own_data import client_csv, output
from jaxpfl.studies.own_data.client_csv import LEVEL, CsvLayout, OwnClients
from jaxpfl.studies.own_data.output import Own
from jaxpfl.studies.own_data.samples import (
    SIMULATED,
    Learned,
    estimates,
    refuse_simulated,
    sizes_of,
    summary,
    without,
)
from jaxpfl.studies.study import Results
from jaxpfl.support.errors import JaxpflError, shown


def run(path: Path, given: BernoulliSettings, layout: CsvLayout | None = None, *, level: float = LEVEL) -> Own:
    """Estimate the probabilities of the file's clients, whose samples are zeros and ones.

    Args:
      path: of the file.
      given: the settings that apply to own data.
      layout: of the file.
      level: of the intervals.

    Raises:
      JaxpflError: for settings that do not apply to own data, a bad file, samples other than 0 and 1, less than two
        clients, or none with two samples.
    """
    level_within(level, np.float64)
    ignored = (*SIMULATED, "prior")
    refuse_simulated(given, ignored)
    given.check()
    clients = client_csv.read(path, layout)
    for name, own in zip(clients.names, clients.samples, strict=True):
        if own.ndim > 1 or not np.isin(own, (0, 1)).all():
            raise JaxpflError(f"{path}: client {shown(name)}: samples must be 0 or 1, one number each")
    sizes = sizes_of(path, clients.samples)
    notes = client_csv.alike(clients.columns, clients.samples)
    estimators = {
        "local": bernoulli.local(),
        "global": bernoulli.global_mean(),
        "personalized": bernoulli.personalized(),
        "printed": bernoulli.personalized(printed=True),
    }
    if given.epsilon is not None:
        estimators["private"] = bernoulli.split(given.epsilon)
    with jax.enable_x64(True):
        data = base.stack(clients.samples)
        # Equal noise for two files that differ by one client would reveal that client.
        key = named(jax.random.key(given.seed), *data)
        made = estimates(estimators, key, data)
        told: bernoulli.Broadcast = made["personalized"].shared
        mu = told.shares.mean
        v = jnp.clip(bernoulli.moment_variance(mu, told.shares.variance, told.inverse_sizes.mean), 0, mu * (1 - mu))
        ones = np.array([own.sum() for own in clients.samples])
        believed = learned_rates.probabilities(ones, sizes, level)
        facts: dict[str, Any] = {"read": clients.understood, "notes": notes, "settings": without(given, ignored)}
        if given.epsilon is not None:
            facts["privacy"] = {"epsilon": given.epsilon, "delta": 0.0, "mechanism": "one-bit"}
        of_all: dict[str, Any] = {
            "estimated": {"mean": float(mu), "variance": float(v)},
            "clients_differ": differences.of_shares(ones, sizes, given.seed)._asdict(),
        }
        # A share's standard error is zero without ones: instead that of the posterior under a flat prior.
        local_stderr = np.sqrt((ones + 1) * (sizes - ones + 1) / (sizes + 3)) / (sizes + 2)
        learned = Learned(of_all, *believed, local_stderr, {})
        facts["level"] = level
        return summary("bernoulli", path, clients, data, estimators, made, key, [learned], facts)


def results(path: Path, given: BernoulliSettings, options: OwnClients) -> Results:
    """`run` with the options' layout and level, as the results of a study."""
    made, notes = run(path, given, options, level=options.level), privacy_notes(given)
    if notes:
        notes = [*notes, output.said_of_privacy(made.result["privacy"])]
    return output.results(made, lambda: output.tables(made.result, notes))
