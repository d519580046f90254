"""Study of county elections: estimates of each county's political tendency, scored on a held-out election.

The data are the winners of US presidential elections by county, 2000 to 2020. Each county is a Bernoulli client with
six real samples. ``elections/county_winners_2000_2020.csv`` has a header, the column ``fips`` (the five digits of a
county), and columns ``win_YYYY`` (R or D) for two or more elections; other columns are ignored. Source: county returns
of the MIT Election Lab (doi:10.7910/DVN/VOQCHQ).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import checks
from jaxpfl.core.types import Array, Key
from jaxpfl.data import data_directory
from jaxpfl.data.sources import csv_text
from jaxpfl.data.sources.base import where_to_put_it
from jaxpfl.estimators import base, bernoulli
from jaxpfl.estimators.base import Estimator
from jaxpfl.studies.bernoulli import plain_estimators
from jaxpfl.studies.repetitions import measure, repeat
from jaxpfl.studies.report import Curve, estimator_table, write_gains
from jaxpfl.studies.study import Read, Results, Settings, Study, within
from jaxpfl.support.errors import JaxpflError, shown

from . import beta_binomial

ELECTIONS_FILE = "county_winners_2000_2020.csv"


class Elections(NamedTuple):
    """Winners of elections by county.

    Attributes:
      counties: [m] FIPS codes, in the order of the file.
      years: [e] years of the elections, ascending.
      republican: [m, e], 1 where the Republican won, else 0.
    """

    counties: np.ndarray
    years: np.ndarray
    republican: np.ndarray


def load_elections(data_dir: str | None = None) -> Elections:
    """Read the winners of the elections.

    Args:
      data_dir: data directory, as in `data_directory`.

    Raises:
      JaxpflError: if the file is missing (the message says where to put it), or in another format (the message gives
        the line and the reason).
    """
    path = data_directory(data_dir) / "elections" / ELECTIONS_FILE
    if not path.is_file():
        raise JaxpflError(f"data set 'elections': file {path} not found: {where_to_put_it()}")
    table = csv_text.read(path)
    columns = {int(name[4:]): name for name in table.names if re.fullmatch(r"win_\d{4}", name)}
    if len(columns) < 2 or "fips" not in table.names:
        raise JaxpflError(f"{path} needs a header with fips and at least two columns win_YYYY, and counties below it")
    years = sorted(columns)
    _check_cells(table, "fips", r"\d{5}", "five digits")
    twice = table.cells["fips"].duplicated().tolist()
    if any(twice):
        line = table.lines[twice.index(True)]
        raise JaxpflError(f"{path} line {line}: fips must be distinct, but this one is also in an earlier line")
    for year in years:
        _check_cells(table, columns[year], "[RD]", "R or D")
    republican = np.array([table.cells[columns[year]].tolist() for year in years]) == "R"
    counties = np.array(table.cells["fips"].tolist())
    return Elections(counties, np.array(years), republican.T.astype(float))


def _check_cells(table: csv_text.Table, name: str, pattern: str, what: str) -> None:
    for line, text in zip(table.lines, table.cells[name].tolist(), strict=True):
        if not re.fullmatch(pattern, text):
            raise JaxpflError(f"{table.path} line {line}: {name} must be {what}, got {shown(text)}")


PRINTED_GAIN = (0.107, 0.019)
"""Gain in the paper, and the gain's standard deviation over six runs."""


@dataclass(frozen=True)
class ElectionSettings(Settings):
    """Settings of the study.

    Six-fold cross-validation uses five elections for estimation, and measures the squared error on the sixth.
    """

    epsilon: tuple[float, ...] = within((0.5, 1.0, 2.0, 4.0, 8.0), checks.positive)
    """Epsilon of each county's single, locally private bit; the private estimators run at each value."""
    repetitions: int = within(40, checks.count)
    """Repetitions of the private estimators with new randomness, in each fold."""
    seed: int = 0
    """Seed of every random draw."""
    data_dir: str | None = None
    """Folder that contains elections/county_winners_2000_2020.csv; by default JAXPFL_DATA_DIR."""


def folds(won: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Leave out each election in turn: won [m, e] -> training outcomes [e, m, e - 1] and held-out outcomes [e, m]."""
    left_out = range(won.shape[1])
    return np.stack([np.delete(won, f, axis=1) for f in left_out]), won.T


def cross_validate(estimator: Estimator, key: Key, train: Array, test: Array) -> tuple[Array, Array]:
    """Squared errors on the held-out elections, [e], and the estimates, [e, m]; vmapped over folds."""

    def fold(key: Key, train: Array, test: Array) -> tuple[Array, Array]:
        estimates = base.estimate(estimator, key, base.every(train)).estimates
        return ((estimates - test) ** 2).mean(), estimates

    return jax.vmap(fold)(jax.random.split(key, len(train)), train, test)


def cross_validated(given: ElectionSettings, elections: Elections | None = None) -> Results:
    """Cross-validate all estimators; repeat the private estimators with new randomness.

    In the summary, ``mse`` and ``gains`` are means over folds with standard errors. Gains have, in addition, the
    standard deviation over folds, as in the paper. ``gain_over_local`` is the gain of the personalized estimator.
    ``folds`` has the errors in each fold, and ``beta_binomial`` has the maximum-likelihood alpha and beta in each fold.

    Reference: Ozkara et al. 2023, section 4, elections.

    Args:
      given: the settings.
      elections: election results; by default read from the data directory.

    Raises:
      JaxpflError: if the data are missing or damaged; or as in `ElectionSettings.check`.
    """
    given.check()
    elections = load_elections(given.data_dir) if elections is None else elections
    train, test = (jnp.asarray(part, jnp.float32) for part in folds(elections.republican))
    key = jax.random.key(given.seed)
    errors, estimates = {}, {}
    for name, estimator in plain_estimators().items():
        errors[name], estimates[name] = jax.tree.map(np.asarray, cross_validate(estimator, key, train, test))
    fitted = [beta_binomial.fit(np.asarray(own).sum(axis=1), np.full(own.shape[0], own.shape[1])) for own in train]
    estimates["beta-binomial"] = np.stack([
        (np.asarray(own).sum(axis=1) + alpha) / (own.shape[1] + alpha + beta)
        for own, (alpha, beta) in zip(train, fitted, strict=True)
    ])  # fmt: skip
    errors["beta-binomial"] = ((estimates["beta-binomial"] - np.asarray(test)) ** 2).mean(axis=1)
    private = _private(given, train, test)
    errors |= {name: values.mean(axis=0) for name, values in private.items()}
    to_avoid = np.where(errors["local"] > 0, errors["local"], np.nan)  # no gain over an exact estimate
    gained = {name: 1 - values / to_avoid for name, values in errors.items()}
    spread = {name: measure(g)._asdict() | {"std": float(g.std(ddof=1))} for name, g in gained.items()}
    result = {
        "study": "elections",
        "settings": {k: v for k, v in vars(given).items() if k != "data_dir"},
        "counties": len(elections.counties),
        "years": elections.years.tolist(),
        "mse": {name: measure(values)._asdict() for name, values in errors.items()},
        "gain_over_local": spread["personalized"]["mean"],
        "gains": {name: row for name, row in spread.items() if name != "local"},
        "printed_gain": {"mean": PRINTED_GAIN[0], "std": PRINTED_GAIN[1]},
        "folds": {name: values.tolist() for name, values in errors.items()},
        "beta_binomial": [{"alpha": alpha, "beta": beta} for alpha, beta in fitted],
    }
    title = f"{result['counties']} counties, each election left out in turn; ± over the {len(result['years'])} folds"
    return Results(
        json=result,
        tables=lambda: estimator_table(result, title, [_note(result)]),
        plots=lambda folder: write_plots(folder, result),
        series=private,
    )


def _note(result: dict[str, Any]) -> str:
    own, printed = result["gains"]["personalized"], result["printed_gain"]
    gain = f"gain over local: {100 * own['mean']:.1f} ± {100 * own['std']:.1f} % (standard deviation over folds)"
    if not np.isfinite(own["mean"]):
        gain = "gain over local undefined: in one fold all local estimates are exact"
    return f"{gain}; printed in the paper: {100 * printed['mean']:.1f} ± {100 * printed['std']:.1f} %"


def _private(given: ElectionSettings, train: Array, test: Array) -> dict[str, np.ndarray]:
    """Errors of the private estimators by name, [repetitions, e] each; vmapped over epsilon."""
    builders = {"private": bernoulli.split, "printed private": bernoulli.printed_private}

    def errors(key: Key) -> dict[str, Array]:
        return {
            name: jax.vmap(lambda e, build=build: cross_validate(build(e), key, train, test)[0])(
                jnp.array(given.epsilon)
            )
            for name, build in builders.items()
        }

    found = repeat(errors, given.seed, given.repetitions, train.size * len(given.epsilon))
    return {
        _label(name, epsilon, given.epsilon): found[name][:, i]
        for name in builders
        for i, epsilon in enumerate(given.epsilon)
    }


def _label(name: str, epsilon: float, among: Sequence[float]) -> str:
    return name if len(among) == 1 else f"{name}, epsilon {epsilon:g}"


def write_plots(folder: Path, result: dict[str, Any]) -> list[Path]:
    """Plot the gain against epsilon; write the plot into ``folder``."""
    epsilons = result["settings"]["epsilon"]
    gains = result["gains"]
    curves = {
        name: Curve.measured(epsilons, [gains[_label(name, e, epsilons)] for e in epsilons], scale=100)
        for name in ("private", "printed private")
    }
    for name in ("personalized", "beta-binomial"):
        curves[name] = Curve.level(100 * gains[name]["mean"], epsilons)
    title = "Held-out error of counties (bars: two standard errors over folds)"
    path = folder / "gain-epsilon.png"
    return [write_gains(path, epsilons, curves, xlabel="epsilon of a county's bit", title=title)]


def _read(given: ElectionSettings) -> Read:
    given.check()
    found = load_elections(given.data_dir)
    return Read(found, (found.years, found.republican))


STUDY = Study(ElectionSettings, cross_validated, reads=_read)
