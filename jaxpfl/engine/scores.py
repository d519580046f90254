"""Headline metrics of runs, and statistics of per-client scores, for S seeds and m clients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.core.types import Federation
from jaxpfl.engine.evaluate import chosen, is_root, mean_over_examples
from jaxpfl.models import Task
from jaxpfl.models.base import CLASSIFICATION, NEXT_TOKEN
from jaxpfl.support.errors import label


class Headline(NamedTuple):
    """Main metric of a task.

    Attributes:
      name: name of the metric, such as accuracy.
      lower: whether smaller values are better.
      percent: whether values are fractions that are shown in percent.
    """

    name: str = "accuracy"
    lower: bool = False
    percent: bool = True

    @property
    def validation(self) -> str:
        """Key of the scores on validation examples in the record of an evaluation."""
        return f"validation_{self.name}"

    @property
    def personalized(self) -> str:
        """Key of the personalized models' scores on test examples in the record of an evaluation."""
        return f"personalized_{self.name}"

    @property
    def words(self) -> str:
        """Name of the metric for display, such as macro F1."""
        return _WORDS.get(self.name, self.name)

    @property
    def scale(self) -> float:
        """Factor by which values are multiplied when they are shown."""
        return 100.0 if self.percent else 1.0

    @property
    def ticks(self) -> str:
        """Format of an axis's tick labels."""
        return "{x:g} %" if self.percent else "{x:g}"

    @property
    def unit(self) -> str:
        """Unit after the metric's name in a table's title, if any."""
        return " in %" if self.percent else ""

    def number(self, value: float | None) -> str:
        """Format a value for a table; None gives a dash."""
        if value is None:
            return "-"
        return f"{100 * value:.2f}" if self.percent else f"{value:.4g}"

    def better(self, values: Any) -> Any:
        """Return the values, negated if smaller values are better, so that larger values are always better."""
        return -np.asarray(values) if self.lower else values


ACCURACY = Headline()
HEADLINES: Mapping[str, Headline] = {
    one.name: one
    for one in (ACCURACY, Headline("rmse", lower=True, percent=False), Headline("macro_f1"), Headline("auc"))
}
"""Headlines of the registered tasks."""
UNBOUNDED = ("r2",)
"""Metrics without a lower bound. Tables show their median over clients instead of the mean."""
_WORDS = {
    "rmse": "RMSE",
    "mae": "MAE",
    "r2": "R^2",
    "macro_f1": "macro F1",
    "auc": "AUC",
    "calibration_error": "calibration error",
    "balanced_accuracy": "balanced accuracy",
}


def find_headline(names: Iterable[str]) -> Headline:
    """Return the headline whose scores appear first among the names of results; accuracy if no headline appears.

    Examples:
      >>> find_headline(["train_loss", "personalized_auc", "personalized_accuracy"]).name
      'auc'
    """
    by_name = {name: one for one in HEADLINES.values() for name in (one.personalized, one.validation)}
    return next((by_name[name] for name in names if name in by_name), ACCURACY)


def stored_headline(summary: Mapping[str, Any]) -> Headline:
    """Return the headline that a stored summary names; accuracy if the summary names none."""
    name = summary.get("metric", ACCURACY.name)
    return HEADLINES.get(name, Headline(name, summary.get("lower_is_better", False), percent=False))


_NO_METRICS = ("loss", "diverged")
"""Names of clients' scores that are not metrics of a task."""
_OF_OTHERS = ("mean", "std", "median", "mean_examples", "std_examples")


def over_clients(
    scores: np.ndarray, *, lower: bool = False, sizes: np.ndarray | None = None, root: bool = False
) -> dict[str, float | None]:
    """Return statistics of the clients' scores, without the clients that have no score (NaN).

    Args:
      scores: scores [S, m].
      lower: whether smaller scores are better.
      sizes: numbers of examples of the clients, [m], for the statistics weighted by examples.
      root: whether the score is the square root of a mean over a client's examples.

    Returns:
      The statistics by name. Each is computed over the clients and then averaged over the seeds, except ``std`` and
      ``std_examples``. ``mean`` is the unweighted mean over clients, and ``std`` the standard deviation of the seeds'
      means (ddof 1; None for one seed). ``std_clients`` is the standard deviation over clients (ddof 0, because the
      clients are the whole population). ``median`` is the median, ``p10`` the 10 % quantile, and ``worst_decile`` the
      mean of the ceil(m / 10) lowest scores. If smaller scores are better, ``p10`` is the 90 % quantile, and
      ``worst_decile`` the mean of the highest scores. If ``sizes`` is given, ``mean_examples`` and ``std_examples`` are
      the mean and the standard deviation of `mean_over_examples` over the seeds. If a score is infinite, ``mean``,
      ``p10`` and ``worst_decile`` have the worst possible value, infinity or minus infinity, and ``std`` and
      ``std_clients`` are None. If there is no score at all, all entries are None.
    """
    found = _over_clients(scores, lower)
    if sizes is not None:
        means = mean_over_examples(np.atleast_2d(scores), sizes, root=root)
        found |= _over_seeds(means[~np.isnan(means)], "mean_examples", "std_examples")
    return found


def _over_seeds(means: np.ndarray, mean: str = "mean", std: str = "std") -> dict[str, float | None]:
    """Return the mean and the standard deviation of the seeds' means [S]."""
    spread = len(means) > 1 and bool(np.isfinite(means).all())
    return {mean: float(means.mean()) if len(means) else None, std: float(means.std(ddof=1)) if spread else None}


def _over_clients(scores: np.ndarray, lower: bool) -> dict[str, float | None]:
    rows = [row[~np.isnan(row)] for row in np.atleast_2d(np.asarray(scores, float))]
    rows = [row for row in rows if len(row)]
    if not rows:
        return dict.fromkeys(("mean", "std", "std_clients", "median", "p10", "worst_decile"))
    means = np.array([row.mean() for row in rows])
    if not all(np.isfinite(row).all() for row in rows):  # predictions may overflow although the parameters are finite
        bad = math.inf if lower else -math.inf
        middle = float(np.mean([np.median(row) for row in rows]))
        return {"mean": bad, "std": None, "std_clients": None, "median": middle, "p10": bad, "worst_decile": bad}
    sign = -1 if lower else 1
    worst = [sign * np.sort(sign * row)[: math.ceil(len(row) / 10)].mean() for row in rows]
    return _over_seeds(means) | {
        "std_clients": float(np.mean([row.std() for row in rows])),
        "median": float(np.mean([np.median(row) for row in rows])),
        "p10": float(np.mean([np.quantile(row, 0.9 if lower else 0.1) for row in rows])),
        "worst_decile": float(np.mean(worst)),
    }


def undefined(scores: Mapping[str, np.ndarray], metric: str, examples: np.ndarray) -> int:
    """Count the clients whose test examples leave a metric undefined, such as the AUC if there is only one class.

    Args:
      scores: arrays [S, m] named ``after_METRIC`` and ``attackers_after_METRIC``. Attackers are not counted.
      metric: name of the metric.
      examples: numbers of test examples of the clients [m]; clients without test examples are not counted.
    """
    attacks = [~np.isnan(of) for key, of in scores.items() if key.startswith("attackers_after_")]
    scored = (np.asarray(examples) > 0) & ~np.any(attacks, axis=0) if attacks else np.asarray(examples) > 0
    return int((scored & np.isnan(scores[f"after_{metric}"])).any(axis=0).sum())


def other_metrics(
    scores: Mapping[str, np.ndarray],
    headline: Headline,
    sizes: np.ndarray,
    task: Task | None = None,
    examples: np.ndarray | None = None,
) -> dict[str, Any]:
    """Return statistics of the task's metrics other than the headline.

    Args:
      scores: arrays [S, m] named ``after_METRIC`` (personalized models) and ``global_METRIC`` (global model).
      headline: metric to leave out.
      sizes: the clients' weights [m] in means over examples.
      task: task of the metrics.
      examples: numbers of test examples of the clients [m]; ``sizes`` by default.

    Returns:
      A dictionary for each metric, with the entries ``personalized``, ``global`` and ``undefined``. ``personalized``
      and ``global`` have the statistics ``mean``, ``std``, ``median``, ``mean_examples`` and ``std_examples`` of
      `over_clients`; ``global`` is None if there is no global model. ``undefined`` is the number of clients for which
      the metric is undefined.
    """
    found: dict[str, Any] = {}
    for key, of_clients in scores.items():
        name = key.removeprefix("after_")
        if name == key or name in (headline.name, *_NO_METRICS):
            continue
        entry: dict[str, Any] = {}
        for of, own in (("personalized", of_clients), ("global", scores.get(f"global_{name}"))):
            over = None if own is None else over_clients(own, sizes=sizes, root=is_root(task, name))
            entry[of] = None if over is None else {name: over[name] for name in _OF_OTHERS}
        found[name] = entry | {"undefined": undefined(scores, name, sizes if examples is None else examples)}
    return found


def fraction_hurt(scores: np.ndarray, local: np.ndarray, *, lower: bool = False) -> float:
    """Return the fraction of clients, over all seeds, whose score is worse than under local training.

    Args:
      scores: clients' scores [S, m].
      local: clients' scores under local training [S, m].
      lower: whether smaller scores are better.
    """
    both = ~np.isnan(scores) & ~np.isnan(local)
    worse = scores > local if lower else scores < local
    return float(worse[both].mean()) if both.any() else math.nan


def client_means(scores: np.ndarray) -> np.ndarray:
    """Average the finite scores of each client over the seeds, [S, m] -> [m]; NaN if no seed has a finite score."""
    finite = np.isfinite(scores)
    return np.where(finite, scores, 0).sum(axis=0) / np.where(finite.any(axis=0), finite.sum(axis=0), math.nan)


def worst(scores: np.ndarray, who: Mapping[str, Any], headline: Headline, base: Any = None) -> list[dict[str, Any]]:
    """Return id, name and value of up to five clients with the worst scores (mean over seeds), the worst first.

    Args:
      scores: scores [S, m].
      who: arrays ``client_ids`` and ``client_names``, [m].
      headline: metric of the scores.
      base: other scores of the clients, [S, m]. If given, the values are the scores minus ``base``, and only clients
        whose scores are worse than in ``base`` are returned.
    """
    most = math.inf if base is None else 0.0
    values = client_means(scores) - (0.0 if base is None else client_means(base))
    order = [i for i in np.argsort(headline.better(values), kind="stable")[:5] if headline.better(values[i]) < most]
    found = [(int(who["client_ids"][i]), str(who["client_names"][i]), float(values[i])) for i in order]
    return [dict(zip(("client_id", "client_name", "value"), one, strict=True)) for one in found]


def words_of_clients(found: Iterable[Mapping[str, Any]], headline: Headline) -> str:
    """Return the names of the clients that `worst` returns, with their values."""
    return ", ".join(f"{label(one['client_name'])} {headline.number(one['value'])}" for one in found)


def constant_scores(federation: Federation, kind: str, headline: str | None = None) -> tuple[Any, np.ndarray] | None:
    """Score the best constant prediction: the most frequent training label, or the mean of the training labels.

    Args:
      federation: clients with labels.
      kind: task of the labels.
      headline: main metric of the task; by default, the main metric of ``kind``.

    Returns:
      The prediction, and its accuracy (root mean squared error for a regression) on each client's test examples, [m].
      None if the headline is another metric, or if the labels are neither classes nor real numbers.
    """
    real = kind == "regression"
    other = headline not in (None, "rmse" if real else ACCURACY.name)
    if other or (not real and kind not in (CLASSIFICATION, "binary", NEXT_TOKEN)):
        return None
    train, test = (
        split.with_examples(x=()).flat().y for split in (federation.train, federation.test)
    )  # without inputs
    prediction = (
        train.mean(axis=0, dtype=np.float64) if real else int(np.bincount(train[train >= 0], minlength=1).argmax())
    )
    total, counted = (np.square(test - prediction), np.ones(test.shape)) if real else (test == prediction, test >= 0)
    owner, axes = np.repeat(np.arange(federation.num_clients), federation.test.size), tuple(range(1, test.ndim))
    sums, counts = (np.bincount(owner, of.sum(axis=axes), federation.num_clients) for of in (total, counted))
    mean = sums / np.where(counts > 0, counts, math.nan)
    return prediction, np.sqrt(mean) if real else mean


def best_on_validation(
    rounds: list[int],
    validation: np.ndarray,
    test: np.ndarray,
    headline: Headline = ACCURACY,
    patience: int | None = None,
) -> dict[str, Any] | None:
    """Return the test score at the evaluation with the best validation score, chosen separately for each seed.

    The first of equal validation scores is chosen. The result is None if some seed has no validation score, for example
    if the metric is the AUC and every client has only one class.

    Args:
      rounds: rounds of the E evaluations.
      validation, test: scores of the personalized models, averaged over clients, [E, S].
      headline: metric of the scores.
      patience: patience of the run; evaluations after a seed's patience has run out are ignored.
    """
    if np.isnan(validation).all(axis=0).any():
        return None
    best = chosen(validation, patience, lower=headline.lower).best
    found = test[best, np.arange(test.shape[1])]
    return {
        "rounds": [rounds[i] for i in best],
        headline.personalized: {
            "mean": float(found.mean()),
            "std": float(found.std(ddof=1)) if len(found) > 1 else None,
        },
    }
