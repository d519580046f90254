"""Summary statistics of per-client scores. S seeds, m clients; a score is an accuracy in [0, 1] or another metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpfl.engine import stopping
from jaxpfl.headline import ACCURACY, Headline

_NO_METRICS = ("loss", "diverged")
"""Scores of clients that are no metrics of a task."""


def over_clients(scores: np.ndarray, *, lower: bool = False) -> dict[str, float | None]:
    """Statistics of a score [S, m]; clients without a score (NaN) are left out.

    Returns:
      ``mean``: unweighted over clients, then over seeds; ``std``: of the seeds' means (ddof 1; None for one seed);
      ``std_clients`` (ddof 0: the clients are the whole population), ``p10``, ``worst_decile``: over clients, then
      averaged over seeds. The worst decile is the mean of the lowest ceil(m / 10) clients. Where lower is better,
      p10 is the score that a tenth of the clients exceed, and the worst decile that of the highest.
    """
    rows = [row[~np.isnan(row)] for row in np.atleast_2d(np.asarray(scores, float))]
    rows = [row for row in rows if len(row)]
    if not rows:
        return dict.fromkeys(("mean", "std", "std_clients", "p10", "worst_decile"))
    means = np.array([row.mean() for row in rows])
    if not all(np.isfinite(row).all() for row in rows):  # a model of finite parameters whose predictions overflow
        bad = math.inf if lower else -math.inf
        return {"mean": bad, "std": None, "std_clients": None, "p10": bad, "worst_decile": bad}
    sign = -1 if lower else 1
    worst = [sign * np.sort(sign * row)[: math.ceil(len(row) / 10)].mean() for row in rows]
    return {
        "mean": float(means.mean()),
        "std": float(means.std(ddof=1)) if len(means) > 1 else None,
        "std_clients": float(np.mean([row.std() for row in rows])),
        "p10": float(np.mean([np.quantile(row, 0.9 if lower else 0.1) for row in rows])),
        "worst_decile": float(np.mean(worst)),
    }


def other_metrics(scores: Mapping[str, np.ndarray], headline: Headline) -> dict[str, Any]:
    """Means over clients, then over seeds, of a task's metrics beside its headline; empty without any.

    Args:
      scores: [S, m] by ``after_NAME``, of personalised models, and ``global_NAME``.
      headline: the metric that is not among them.

    Returns:
      By name, ``personalized`` and ``global`` (None without a global model) with their ``mean`` and ``std``, and
      ``undefined``, the number of clients whose test examples do not define the metric, as the AUC of one class: they
      are left out of the means.
    """
    found: dict[str, Any] = {}
    scored = ~np.isnan(scores[f"after_{headline.name}"])
    for key, of_clients in scores.items():
        name = key.removeprefix("after_")
        if name == key or name in (headline.name, *_NO_METRICS):
            continue
        entry: dict[str, Any] = {}
        for label, own in (("personalized", of_clients), ("global", scores.get(f"global_{name}"))):
            over = None if own is None else over_clients(own)
            entry[label] = None if over is None else {"mean": over["mean"], "std": over["std"]}
        found[name] = entry | {"undefined": int((scored & np.isnan(of_clients)).any(axis=0).sum())}
    return found


def fraction_hurt(scores: np.ndarray, local: np.ndarray, *, lower: bool = False) -> float:
    """Fraction of clients, over all seeds, with a worse score than that of local training; both [S, m]."""
    both = ~np.isnan(scores) & ~np.isnan(local)
    worse = scores > local if lower else scores < local
    return float(worse[both].mean()) if both.any() else math.nan


def best_on_validation(
    rounds: list[int],
    validation: np.ndarray,
    test: np.ndarray,
    headline: Headline = ACCURACY,
    patience: int | None = None,
) -> dict[str, Any]:
    """Test score at the round of best validation score, chosen in each seed (the first in a tie).

    Args:
      rounds: [E].
      validation, test: mean scores of the personalised models, [E, S].
      headline: their metric.
      patience: of the run; the evaluations behind a seed's own end are not among its choices.
    """
    best = stopping.chosen(validation, patience, lower=headline.lower).best
    chosen = test[best, np.arange(test.shape[1])]
    return {
        "rounds": [rounds[i] for i in best],
        headline.personalized: {
            "mean": float(chosen.mean()),
            "std": float(chosen.std(ddof=1)) if len(chosen) > 1 else None,
        },
    }
