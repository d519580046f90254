"""Common parts of the studies of own clients with samples: checks, errors on held-out samples, and the result.

A held-out sample differs from the estimate by its own noise and by the estimate's error about the client's true mean.
The variance :math:`s_i^2` of a client's samples is an unbiased estimate of the former, so the mean squared difference
minus :math:`s_i^2` is one of the latter; gains are computed from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Key
from jaxpfl.estimators import base
from jaxpfl.estimators.base import Estimated, Estimator, Samples
from jaxpfl.studies.bernoulli import BernoulliSettings
from jaxpfl.studies.gaussian import GaussianSettings
from jaxpfl.studies.own_data.client_csv import Clients
from jaxpfl.studies.own_data.output import Own, Picture
from jaxpfl.studies.repetitions import measure, report
from jaxpfl.studies.study import refuse_given
from jaxpfl.support.errors import JaxpflError, shown

_MOST_FOLDS = 20
"""With fewer samples of every client, each sample is a fold."""

_LEAST = 3
"""Least number of samples of some client for held-out scores: one of a pair gives no variance."""

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
    if sizes.max() < _LEAST:
        why = "of what is not held out, the clients' variance cannot be learned"
        result["not_scored"] = f"no client has {_LEAST} samples: {why}"
    else:
        left_out = "a sample" if sizes.max() <= _MOST_FOLDS else f"1/{_MOST_FOLDS}"
        result["of"] = f"the true values, {left_out} of each client left out"
        found = held_out_errors(estimators, key, data)
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
        blocks[column] = of.facts | (_scores(found, number) if found is not None else {})
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


class HeldOut(NamedTuple):
    """Held-out errors of the k clients with two samples or more, for each of d columns.

    Attributes:
      errors: mean squared differences of held-out samples from the estimates, by estimator, [k, d].
      noise: the samples' variances s_i^2, [k, d].
    """

    errors: dict[str, np.ndarray]
    noise: np.ndarray


def held_out_errors(estimators: dict[str, Estimator], key: Key, data: Samples) -> HeldOut:
    """Cross-validate the estimators.

    Sample j is held out in fold j mod the number of folds. A client without training samples in a fold neither sends
    nor is scored in it.
    """
    m, n = data.mask.shape
    folds = min(n, _MOST_FOLDS)

    @full_precision.jit
    def totals(data: Samples) -> tuple[dict[str, Array], Array, Array]:
        fold_of = jnp.cumsum(data.mask, axis=1) - 1

        def fold(f: Array) -> tuple[dict[str, Array], Array]:
            held = data.mask & (fold_of % folds == f)
            train = Samples(data.x, data.mask & ~held)
            scored = held & train.mask.any(axis=1, keepdims=True)

            def score(estimator: Estimator) -> Array:
                made = base.estimate(estimator, jax.random.fold_in(key, f), train, sent=train.mask.any(axis=1))
                square = ((data.x - made.estimates[:, None]) ** 2).reshape(m, n, -1)
                return jnp.where(scored[:, :, None], square, 0).sum(axis=1)

            return {name: score(estimator) for name, estimator in estimators.items()}, scored.sum(axis=1)

        sums, counts = jax.lax.map(fold, jnp.arange(folds))
        scatter = jax.vmap(lambda own: own.scatter)(data).reshape(m, -1)
        return jax.tree.map(lambda a: a.sum(axis=0), sums), counts.sum(axis=0), scatter

    sums, counts, scatter = jax.tree.map(np.asarray, totals(data))
    scored = counts > 0
    of_all = counts[scored, None]
    return HeldOut({name: sums[name][scored] / of_all for name in estimators}, scatter[scored] / (of_all - 1))


def _scores(found: HeldOut, column: int) -> dict[str, Any]:
    """Scores of one column, as JSON: ``mse`` about the clients' true means, ``gains`` over local, and
    ``held_out_errors``.

    Standard errors are over clients; ``held_out_errors`` include the samples' noise.
    """
    raw = {name: values[:, column] for name, values in found.errors.items()}
    noise = found.noise[:, column]
    held_out = {name: {"mean": of.mean, "stderr": of.stderr} for name, of in ((k, measure(v)) for k, v in raw.items())}
    return report({name: values - noise for name, values in raw.items()}, {}) | {"held_out_errors": held_out}
