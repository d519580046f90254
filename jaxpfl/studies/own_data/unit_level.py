"""Means of the user's own clients about a regression of their samples on covariates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl.estimators import inputs, unit_level
from jaxpfl.studies.gaussian import GaussianSettings
from jaxpfl.studies.own_data import client_csv, diagnostics, output
from jaxpfl.studies.own_data.common import SIMULATED, Own, Picture
from jaxpfl.studies.own_data.normal_means_fits import coefficients, said_coefficients
from jaxpfl.studies.study import Block, Results, refuse_given
from jaxpfl.support.console import literal
from jaxpfl.support.errors import JaxpflError

_PRIVATE = ("epsilon", "mechanism", "delta", "bits", "sigma_theta", "sigma_x", "radius")


def results(path: Path, given: GaussianSettings, options: Any) -> Results:
    """Estimates of a long file's clients, each at the mean of its samples' covariates.

    Args:
      path: of the file, a row for each sample.
      given: the settings, of which those of simulated clients and of privacy must be at their defaults.
      options: a layout with ``covariates``, ``fit`` and ``level``.

    Raises:
      JaxpflError: for a bad file, covariates that are no columns of it, more than one other column of values, and as
        `unit_level`.
    """
    inputs.level(options.level, np.float64)
    refuse_given(given, (*SIMULATED, "dim", "mean"), "is of simulated data, which a CSV file takes the place of")
    refuse_given(given, _PRIVATE, "is without --covariates: messages of regressions have no private form here")
    clients, target, covariates = _read(path, options)
    index = np.repeat(np.arange(len(clients.names)), [len(own) for own in clients.samples])
    rows = np.concatenate(clients.samples)
    places = [clients.columns.index(name) for name in covariates]
    try:
        with jax.enable_x64(True):
            found = unit_level(rows[:, clients.columns.index(target)], rows[:, places], index, fit=options.fit)
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
        "fit": options.fit,
        "estimated": {
            "mean": float(found.regression.mean()),
            "sigma_theta": float(found.between) ** 0.5,
            "sigma_x": float(found.within) ** 0.5,
        },
        "coefficients": coefficients(("intercept", *covariates), found.beta, found.beta_covariance),
        "log_likelihood": float(found.log_likelihood),
        "clients_differ": {
            "name": "likelihood ratio",
            "statistic": float(found.ratio),
            "p_value": float(found.p_value),
        },
        "outlying": diagnostics.outlying(found.residual, clients.names),
    }
    columns: dict[str, Any] = {
        "client": clients.names, "samples": found.size.astype(int), "local": found.own,
        "local_stderr": np.sqrt(found.within / found.size), "personalized": found.mean,
        "personalized_stderr": np.sqrt(found.mse), "low": low, "high": high, "regression": found.regression,
        "effect": found.effect, "shrinkage": found.shrinkage, "residual": found.residual,
    }  # fmt: skip
    picture = Picture("", found.own, found.mean, low, high, found.size, float(found.regression.mean()))
    own = Own(result, {name: np.asarray(of).tolist() for name, of in columns.items()}, [picture])

    def plots(folder: Path) -> list[Path]:
        title = literal(f"{path.name}: {target} about {', '.join(covariates)}")
        drawn = output.write(folder, own)
        return [*drawn, diagnostics.quantiles(folder, found.residual, clients.names, title)]

    hint = f"estimates of every client, with {output.percent(options.level)} intervals: --output FOLDER"
    return Results(result, lambda: _said(result), plots, files=output.FILES, hint=hint)


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
    of, test = result["estimated"], result["clients_differ"]
    differ = "clients differ" if test["p_value"] < 0.05 else "no sign that clients differ"
    return [
        *output.how_it_was_read(result),
        said_coefficients(result),
        f"learned by {result['fit']}: sigma_theta {of['sigma_theta']:.4g} about it, sigma_x {of['sigma_x']:.4g}",
        f"{differ}: {test['name']} = {test['statistic']:.4g}, p = {test['p_value']:.2g}",
        diagnostics.told(result["outlying"]),
    ]
