"""Headline metrics of runs, and statistics of per-client scores. S seeds, m clients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.engine.evaluate import chosen, is_root, mean_over_examples
from jaxpfl.models import Task


class Headline(NamedTuple):
    """Main metric of a task.

    Attributes:
      name: name, such as accuracy.
      lower: True where less is better.
      percent: True where it is a share, shown in percent.
    """

    name: str = "accuracy"
    lower: bool = False
    percent: bool = True

    @property
    def validation(self) -> str:
        """Its name in records, on validation examples."""
        return f"validation_{self.name}"

    @property
    def personalized(self) -> str:
        """Its name in records, of personalised models on test examples."""
        return f"personalized_{self.name}"

    @property
    def words(self) -> str:
        """The metric in a sentence, such as macro F1."""
        return _WORDS.get(self.name, self.name)

    @property
    def scale(self) -> float:
        """Factor of the values that are shown."""
        return 100.0 if self.percent else 1.0

    @property
    def ticks(self) -> str:
        """Format of the ticks of an axis."""
        return "{x:g} %" if self.percent else "{x:g}"

    @property
    def unit(self) -> str:
        """Words behind its name in a table's title."""
        return " in %" if self.percent else ""

    def number(self, value: float | None) -> str:
        """A value in a table; a dash for none."""
        if value is None:
            return "-"
        return f"{100 * value:.2f}" if self.percent else f"{value:.4g}"

    def better(self, values: Any) -> Any:
        """Values with the sign that makes larger ones better."""
        return -np.asarray(values) if self.lower else values


ACCURACY = Headline()
HEADLINES: Mapping[str, Headline] = {
    one.name: one
    for one in (ACCURACY, Headline("rmse", lower=True, percent=False), Headline("macro_f1"), Headline("auc"))
}
"""Headlines of the registered tasks."""
UNBOUNDED = ("r2",)
"""Metrics with no lower bound, of which tables show the median over clients in place of the mean."""
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
    """Headline whose scores come first among the names of results; accuracy if there is none.

    Examples:
      >>> find_headline(["train_loss", "personalized_auc", "personalized_accuracy"]).name
      'auc'
    """
    by_name = {name: one for one in HEADLINES.values() for name in (one.personalized, one.validation)}
    return next((by_name[name] for name in names if name in by_name), ACCURACY)


def stored_headline(summary: Mapping[str, Any]) -> Headline:
    """Headline that a stored summary names; accuracy if it names none."""
    return HEADLINES.get(summary.get("metric", ACCURACY.name), ACCURACY)


_NO_METRICS = ("loss", "diverged")
"""Scores of clients that are not metrics of a task."""
_OF_OTHERS = ("mean", "std", "median", "mean_examples", "std_examples")


def over_clients(
    scores: np.ndarray, *, lower: bool = False, sizes: np.ndarray | None = None, root: bool = False
) -> dict[str, float | None]:
    """Statistics of a score [S, m]; clients without a score (NaN) are left out.

    Args:
      scores: [S, m].
      lower: less is better.
      sizes: the clients' numbers of examples, [m], for the means weighted by them.
      root: the score is the root of a mean over a client's examples.

    Returns:
      ``mean``: unweighted over clients, then over seeds; ``std``: of the seeds' means (ddof 1; None for one seed);
      ``std_clients`` (ddof 0: the clients are the whole population), ``median``, ``p10``, ``worst_decile``: over
      clients, then averaged over seeds. The worst decile is the mean of the lowest ceil(m / 10) clients. Where lower is
      better, p10 is the score that a tenth of the clients exceed, and the worst decile is the mean of the highest.
      Given ``sizes``, ``mean_examples`` and ``std_examples`` are computed likewise from `mean_over_examples`.
    """
    found = _over_clients(scores, lower)
    if sizes is not None:
        means = mean_over_examples(np.atleast_2d(scores), sizes, root=root)
        found |= _over_seeds(means[~np.isnan(means)], "mean_examples", "std_examples")
    return found


def _over_seeds(means: np.ndarray, mean: str = "mean", std: str = "std") -> dict[str, float | None]:
    """Mean and standard deviation of the seeds' means, [S]."""
    spread = len(means) > 1 and bool(np.isfinite(means).all())
    return {mean: float(means.mean()) if len(means) else None, std: float(means.std(ddof=1)) if spread else None}


def _over_clients(scores: np.ndarray, lower: bool) -> dict[str, float | None]:
    rows = [row[~np.isnan(row)] for row in np.atleast_2d(np.asarray(scores, float))]
    rows = [row for row in rows if len(row)]
    if not rows:
        return dict.fromkeys(("mean", "std", "std_clients", "median", "p10", "worst_decile"))
    means = np.array([row.mean() for row in rows])
    if not all(np.isfinite(row).all() for row in rows):  # a model of finite parameters whose predictions overflow
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
    """Number of clients whose test examples do not define a metric, as the AUC of one class.

    Args:
      scores: [S, m] by ``after_NAME``, and ``attackers_after_NAME``, whose clients are not among the others.
      metric: name of the metric.
      examples: the clients' numbers of test examples, [m].
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
    """Means over clients, then over seeds, of a task's metrics beside its headline; empty without any.

    Args:
      scores: [S, m] by ``after_NAME``, of personalised models, and ``global_NAME``.
      headline: the metric that is not among them.
      sizes: the clients' weights in means over examples, [m].
      task: task of the metrics.
      examples: the clients' numbers of test examples, [m]; ``sizes`` unless given.

    Returns:
      By name, ``personalized`` and ``global`` (None without a global model) with ``mean``, ``std``, ``median``,
      ``mean_examples`` and ``std_examples`` as `over_clients` gives them, and ``undefined``, the number of clients that
      are left out, as `undefined` counts them.
    """
    found: dict[str, Any] = {}
    for key, of_clients in scores.items():
        name = key.removeprefix("after_")
        if name == key or name in (headline.name, *_NO_METRICS):
            continue
        entry: dict[str, Any] = {}
        for label, own in (("personalized", of_clients), ("global", scores.get(f"global_{name}"))):
            over = None if own is None else over_clients(own, sizes=sizes, root=is_root(task, name))
            entry[label] = None if over is None else {name: over[name] for name in _OF_OTHERS}
        found[name] = entry | {"undefined": undefined(scores, name, sizes if examples is None else examples)}
    return found


def fraction_hurt(scores: np.ndarray, local: np.ndarray, *, lower: bool = False) -> float:
    """Fraction of clients, over all seeds, that score worse than under local training; both [S, m]."""
    both = ~np.isnan(scores) & ~np.isnan(local)
    worse = scores > local if lower else scores < local
    return float(worse[both].mean()) if both.any() else math.nan


def best_on_validation(
    rounds: list[int],
    validation: np.ndarray,
    test: np.ndarray,
    headline: Headline = ACCURACY,
    patience: int | None = None,
) -> dict[str, Any] | None:
    """Test score at the round of best validation score, chosen in each seed (the first in a tie).

    None where a seed has no validation score, as the AUC of clients that each have one class.

    Args:
      rounds: [E].
      validation, test: mean scores of the personalised models, [E, S].
      headline: their metric.
      patience: patience of the run; a seed's evaluations after its own end are not candidates.
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
