"""Means of the user's own clients about a regression of their samples on covariates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl.estimators.empirical_bayes import level_within, unit_level
from jaxpfl.studies.gaussian import GaussianSettings
from jaxpfl.studies.own_data import client_csv, output
from jaxpfl.studies.own_data.output import Own, Picture
from jaxpfl.studies.own_data.samples import SIMULATED
from jaxpfl.studies.study import Block, Results, refuse_given
from jaxpfl.support.errors import JaxpflError

_PRIVATE = ("epsilon", "mechanism", "delta", "bits", "sigma_theta", "sigma_x", "radius")


def results(path: Path, given: GaussianSettings, options: Any) -> Results:
    """Estimates of a long file's clients, each at the mean of its samples' covariates.

    Args:
      path: of the file, a row for each sample.
      given: the settings, of which those of simulated clients and of privacy must be at their defaults.
      options: a layout with ``covariates`` and ``level``.

    Raises:
      JaxpflError: for a bad file, covariates that are no columns of it, more than one other column of values, and as
        `unit_level`.
    """
    level_within(options.level, np.float64)
    refuse_given(given, (*SIMULATED, "dim", "mean"), "is of simulated data, which a CSV file takes the place of")
    refuse_given(given, _PRIVATE, "is without --covariates: messages of regressions have no private form here")
    clients, target, covariates = _read(path, options)
    index = np.repeat(np.arange(len(clients.names)), [len(own) for own in clients.samples])
    rows = np.concatenate(clients.samples)
    places = [clients.columns.index(name) for name in covariates]
    try:
        with jax.enable_x64(True):
            found = unit_level(rows[:, clients.columns.index(target)], rows[:, places], index)
            low, high = (np.asarray(of) for of in found.interval(options.level))
    except JaxpflError as error:
        raise JaxpflError(f"{path}: {error}") from None
    found = jax.tree.map(np.asarray, found)
    result: dict[str, Any] = {
        "study": "gaussian",
        "csv": path.name,
        "read": clients.understood,
        "clients": len(clients.names),
        "level": options.level,
        "target": target,
        "estimated": {
            "mean": float(found.regression.mean()),
            "sigma_theta": float(found.between) ** 0.5,
            "sigma_x": float(found.within) ** 0.5,
        },
        "coefficients": output.coefficients(covariates, found.beta, found.beta_covariance),
        "log_likelihood": float(found.log_likelihood),
        "clients_differ": {
            "name": "likelihood ratio",
            "statistic": float(found.ratio),
            "p_value": float(found.p_value),
        },
    }
    columns: dict[str, Any] = {
        "client": clients.names, "samples": found.size.astype(int), "local": found.own,
        "local_stderr": np.sqrt(found.within / found.size), "personalized": found.mean,
        "personalized_stderr": np.sqrt(found.mse), "low": low, "high": high, "regression": found.regression,
        "effect": found.effect, "shrinkage": found.shrinkage, "residual": found.residual,
    }  # fmt: skip
    picture = Picture("", found.own, found.mean, low, high, found.size, float(found.regression.mean()))
    own = Own(result, {name: np.asarray(of).tolist() for name, of in columns.items()}, [picture])

    return output.results(own, lambda: _said(result))


def _read(path: Path, options: Any) -> tuple[client_csv.Clients, str, list[str]]:
    """Clients of samples with covariates, the name of the column of values, and the covariates' names."""
    if options.values is not None:
        raise JaxpflError("covariates need a row for each sample: give --value COLUMN, not --values")
    value = client_csv.VALUE if options.value is None else options.value
    clients = client_csv.read(path, replace(options, value=",".join((value, *options.covariates))))
    target, *names = clients.columns
    if len(names) != len(options.covariates):
        raise JaxpflError(f"value and covariates must be different columns, got {value} and {options.covariates}")
    return clients, target, names


def _said(result: dict[str, Any]) -> list[Block]:
    of = result["estimated"]
    return [
        *output.how_it_was_read(result),
        output.said_coefficients(result),
        f"spread about it: sigma_theta {of['sigma_theta']:.4g}, sigma_x {of['sigma_x']:.4g}",
        output.said_test(result["clients_differ"], "clients"),
    ]
