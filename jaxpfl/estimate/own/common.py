"""Parts that the studies of own clients share: checks of the file and of the settings, and the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.errors import JaxpflError
from jaxpfl.estimate.bernoulli import BernoulliSettings
from jaxpfl.estimate.gaussian import GaussianSettings
from jaxpfl.estimate.own import held_out
from jaxpfl.estimate.repetitions import report
from jaxpfl.estimate.settings import refuse_given
from jaxpfl.estimators.base import Estimated, Estimator, Samples
from jaxpfl.types import Key

LEVEL = 0.95

SIMULATED = ("clients", "samples", "uploads", "repetitions")


class Own(NamedTuple):
    """What was made of a file.

    Attributes:
      result: for the table and JSON.
      columns: one for each fact of a client, for ``estimates.csv``.
      pairs: local and personalised estimates of the first entry, [m] each, and numbers of samples [m], for the plot.
      public: of private Gaussian messages, the settings that they are clipped and reckoned with.
    """

    result: dict[str, Any]
    columns: dict[str, list]
    pairs: tuple[np.ndarray, np.ndarray, np.ndarray]
    public: GaussianSettings | None = None


def summary(
    study: str,
    path: Path,
    names: list[str],
    data: Samples,
    estimators: dict[str, Estimator],
    made: dict[str, Estimated],
    key: Key,
    around: tuple[Any, Any],
    facts: dict[str, Any],
) -> Own:
    """The result of a study: errors on held-out samples, and every client's estimates with their intervals."""
    sizes = np.asarray(data.mask.sum(axis=1))
    result: dict[str, Any] = {
        "study": study,
        "csv": path.name,
        "clients": len(names),
        "samples": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
    } | facts
    if sizes.max() < held_out.LEAST:
        why = (
            f"no client has {held_out.LEAST} samples: of what is not held out, the clients' variance cannot be learned"
        )
        result["not_scored"] = why
    else:
        result |= {"of": "held-out samples"} | report(held_out.errors(estimators, key, data), {})
    columns: dict[str, list] = {"client": names, "samples": sizes.tolist()}
    # An estimate is at the variance that the moments say, its interval about the mean over all that are likely: where
    # few clients leave the two far apart, the interval reaches to the estimate.
    low, high = (np.asarray(end) for end in around)
    at = np.asarray(made["personalized"].estimates)
    ends = {"low": np.minimum(low, at), "high": np.maximum(high, at)}
    parts = {name: made[name].estimates for name in made if name != "global"} | ends
    for name, values in parts.items():
        values = np.asarray(values).reshape(len(names), -1)
        for entry, column in enumerate(values.T):
            label = name if values.shape[1] == 1 else f"{name}{entry + 1}"
            columns[label] = column.tolist()
    first = [np.asarray(made[name].estimates).reshape(len(names), -1)[:, 0] for name in ("local", "personalized")]
    return Own(result, columns, (first[0], first[1], sizes))


def refuse_simulated(given: GaussianSettings | BernoulliSettings, names: tuple[str, ...]) -> None:
    """Refuses settings of simulated clients that differ from their defaults.

    Raises:
      JaxpflError.
    """
    refuse_given(given, names, "is of simulated data, which a CSV file takes the place of")


def without(given: GaussianSettings | BernoulliSettings, ignored: tuple[str, ...]) -> dict[str, Any]:
    """The settings that own data have."""
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
