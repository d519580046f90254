"""Common parts of the studies of own clients: checks of the file and of the settings, and the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.core import full_precision
from jaxpfl.core.types import Key
from jaxpfl.estimators import base
from jaxpfl.estimators.base import Estimated, Estimator, Samples
from jaxpfl.studies.bernoulli import BernoulliSettings
from jaxpfl.studies.gaussian import GaussianSettings
from jaxpfl.studies.own_data import held_out
from jaxpfl.studies.own_data.client_csv import Clients
from jaxpfl.studies.study import refuse_given
from jaxpfl.support.errors import JaxpflError, shown

SIMULATED = ("clients", "samples", "uploads", "repetitions")


class Learned(NamedTuple):
    """Posterior of one column, besides its estimates.

    Attributes:
      facts: of all clients, as JSON; ``estimated`` with the ``mean`` among them.
      low, high: ends of every client's interval, [m].
      stderr: posterior standard deviations of every client's parameter, [m].
      local_stderr: those of the clients' own estimates, [m].
      more: further columns of ``estimates.csv``, by name, [m] each.
    """

    facts: dict[str, Any]
    low: np.ndarray
    high: np.ndarray
    stderr: np.ndarray
    local_stderr: np.ndarray
    more: dict[str, np.ndarray]


class Picture(NamedTuple):
    """Estimates and interval ends of a column, [m] each, numbers of samples [m], and the mean of all, for a plot."""

    column: str
    local: np.ndarray
    personalized: np.ndarray
    low: np.ndarray
    high: np.ndarray
    sizes: np.ndarray
    mean: float


class Own(NamedTuple):
    """Results for a file.

    Attributes:
      result: for the table and JSON. What is of one column is at the top where there is no other, else by the column's
        name in ``columns``.
      columns: one for each fact of a client, for ``estimates.csv``.
      pictures: one for each column.
      public: of private Gaussian messages, the settings that they are clipped and reckoned with.
    """

    result: dict[str, Any]
    columns: dict[str, list]
    pictures: list[Picture]
    public: GaussianSettings | None = None


def estimates(estimators: dict[str, Estimator], key: Key, data: Samples) -> dict[str, Estimated]:
    """Run every estimator on the data, in one program."""
    return full_precision.jit(lambda data: {name: base.estimate(each, key, data) for name, each in estimators.items()})(
        data
    )


def summary(
    study: str,
    path: Path,
    clients: Clients,
    data: Samples,
    estimators: dict[str, Estimator],
    made: dict[str, Estimated],
    key: Key,
    learned: list[Learned],
    facts: dict[str, Any],
) -> Own:
    """Result of a study: errors on held-out samples, and every client's estimates with their intervals.

    Args:
      study, path, clients: its name, the file, and its contents.
      data: the samples, stacked.
      estimators, made: by name, and what they made of the data.
      key: of the estimators' randomness.
      learned: of each column.
      facts: of the study, as JSON.
    """
    names, sizes = clients.names, np.asarray(data.mask.sum(axis=1))
    result: dict[str, Any] = {
        "study": study,
        "csv": path.name,
        "clients": len(names),
        "samples": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
    } | facts
    found = None
    if sizes.max() < held_out.LEAST:
        why = "of what is not held out, the clients' variance cannot be learned"
        result["not_scored"] = f"no client has {held_out.LEAST} samples: {why}"
    else:
        left_out = "a sample" if sizes.max() <= held_out.MOST_FOLDS else f"1/{held_out.MOST_FOLDS}"
        result["of"] = f"the true values, {left_out} of each client left out"
        found = held_out.errors(estimators, key, data)
    several = len(learned) > 1
    columns: dict[str, list] = {"client": names, "samples": sizes.tolist()}
    blocks: dict[str, dict[str, Any]] = {}
    pictures = []
    for number, (column, of) in enumerate(zip(clients.columns, learned, strict=True)):
        at = {name: np.asarray(each.estimates).reshape(len(names), -1)[:, number] for name, each in made.items()}
        # An estimate uses the moment estimate of the variance, its interval the posterior mean over all variances:
        # if few clients leave the two far apart, the interval is extended to the estimate.
        own, personal = at["local"], at["personalized"]
        low, high = np.minimum(of.low, personal), np.maximum(of.high, personal)
        facts_of = {"local": own, "local_stderr": of.local_stderr, "personalized": personal}
        facts_of |= {"personalized_stderr": of.stderr}
        facts_of |= {name: values for name, values in at.items() if name not in ("global", *facts_of)}
        for name, values in (facts_of | {"low": low, "high": high} | of.more).items():
            called = f"{name}_{column}" if several else name
            if called in columns:
                other = next(c for c in clients.columns if called.endswith(f"_{c}") and c != column)
                names = f"{shown(other)} and {shown(column)}"
                raise JaxpflError(f"{path}: columns {names} would both be {called} in estimates.csv: rename one")
            columns[called] = values.tolist()
        blocks[column] = of.facts | (held_out.scores(found, number) if found is not None else {})
        title, mean = column if several else "", float(of.facts["estimated"]["mean"])
        pictures.append(Picture(title, own, personal, low, high, sizes, mean))
    return Own(result | ({"columns": blocks} if several else blocks[clients.columns[0]]), columns, pictures)


def refuse_simulated(given: GaussianSettings | BernoulliSettings, names: tuple[str, ...]) -> None:
    """Refuse settings of simulated clients that differ from their defaults.

    Raises:
      JaxpflError.
    """
    refuse_given(given, names, "is of simulated data, which a CSV file takes the place of")


def without(given: GaussianSettings | BernoulliSettings, ignored: tuple[str, ...]) -> dict[str, Any]:
    """The settings that apply to own data."""
    return {name: value for name, value in vars(given).items() if name not in ignored}


def sizes_of(path: Path, samples: list[np.ndarray]) -> np.ndarray:
    """Numbers of samples, [m].

    Raises:
      JaxpflError: less than two clients, or none with two samples.
    """
    sizes = np.array([len(own) for own in samples])
    if len(sizes) < 2:
        raise JaxpflError(f"{path}: needs at least two clients, got {len(sizes)}")
    if sizes.max() < 2:
        raise JaxpflError(f"{path}: every client has a single sample: nothing can be learned of the clients' variance")
    return sizes
