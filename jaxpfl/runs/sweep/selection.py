"""Selection of each method's setting, on validation examples alone.

The choice is made by `choose`, whose argument holds validation scores and nothing else: what a run scored on test
examples is dropped by `validation_scores` before.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxpfl.runs.records import DONE, Record, Value
from jaxpfl.runs.scores import ACCURACY, HEADLINES, Headline, find_headline
from jaxpfl.runs.sweep.order import by_setting
from jaxpfl.support.errors import JaxpflError, unknown_name

METRICS = {one.validation: not one.lower for one in HEADLINES.values()} | {"validation_loss": False}
"""The metrics of validation examples; true where larger is better."""


_HEADLINES = {name for one in HEADLINES.values() for name in (one.validation, one.personalized)}


class Tried(NamedTuple):
    """One setting's validation scores.

    Attributes:
      settings: the values on the axes.
      scores: [S], the mean over clients with each seed of the search; NaN where there is none.
      against: the reason why it cannot be chosen; empty where it can.
    """

    settings: Mapping[str, Value]
    scores: np.ndarray
    against: str = ""


class Choice(NamedTuple):
    """The setting chosen for a method.

    Attributes:
      settings: the values on the axes; None where no setting can be chosen.
      score: its mean over the seeds of the search; NaN where no setting can be chosen.
      tries: settings that were tried, those that cannot be chosen among them.
      level_with: the other settings within one standard error of it, with its differences paired over the seeds; with
        a single seed, those of the same score.
      reason: the reason why no setting can be chosen; empty where one is.
    """

    settings: Mapping[str, Value] | None
    score: float
    tries: int
    level_with: tuple[Mapping[str, Value], ...] = ()
    reason: str = ""


def select(records: Iterable[Record], seeds: Iterable[int], metric: str | None = None) -> dict[str, Choice]:
    """The best setting of each method by a metric of validation examples, mean over the seeds of the search.

    A setting is chosen only if its runs with all of these seeds are done and have a finite score. Of settings with the
    same mean, the first in the order of the records is chosen (`in_grid_order`).

    Args:
      records: of the sweep; those with other seeds do not count.
      seeds: of the search.
      metric: one of `METRICS`; that of the task's headline unless given.

    Raises:
      JaxpflError: for another metric, and without seeds.
    """
    records = list(records)
    metric = metric or headline_of(records).validation
    scores = validation_scores(records, seeds, metric)
    return {method: choose(tried, larger=METRICS[metric]) for method, tried in scores.items()}


def headline_of(records: Iterable[Record]) -> Headline:
    """The headline metric of the runs of a sweep.

    Raises:
      JaxpflError: for runs of several, as of data sets of different tasks.
    """
    found = {find_headline(record.metrics) for record in records if _HEADLINES & record.metrics.keys()}
    if len(found) > 1:
        names = " and ".join(sorted(one.words for one in found))
        raise JaxpflError(f"runs of the sweep are scored by {names}, which do not compare: sweep their data apart")
    return next(iter(found), ACCURACY)


def validation_scores(
    records: Iterable[Record], seeds: Iterable[int], metric: str | None = None
) -> dict[str, list[Tried]]:
    """Each method's settings with their validation scores, and nothing else of their runs.

    Raises:
      JaxpflError: as `select`.
    """
    records = list(records)
    metric = metric or headline_of(records).validation
    if metric not in METRICS:
        raise unknown_name("metric of a selection", metric, METRICS)
    seeds = list(dict.fromkeys(seeds))
    if not seeds:
        raise JaxpflError("a selection needs one seed of the search at least")
    found: dict[str, list[Tried]] = {}
    for (method, _), runs in by_setting(records).items():
        by_seed = {run.seed: run for run in runs}
        of_search = [by_seed.get(seed) for seed in seeds]
        scores = np.array([math.nan if run is None else _number(run.metrics.get(metric)) for run in of_search])
        found.setdefault(method, []).append(Tried(runs[0].settings, scores, _against(of_search, scores, metric)))
    return found


def choose(tried: Sequence[Tried], *, larger: bool) -> Choice:
    """The setting with the best mean score.

    Args:
      tried: the settings of one method.
      larger: whether larger scores are better.
    """
    eligible = [one for one in tried if not one.against]
    if not eligible:
        why = Counter(one.against for one in tried)
        counted = (f"{reason} ({times} settings)" if times > 1 else reason for reason, times in why.items())
        return Choice(None, math.nan, len(tried), reason="; ".join(counted) or "no setting was tried")
    means = [_mean(one.scores) if larger else -_mean(one.scores) for one in eligible]
    best = max(range(len(eligible)), key=means.__getitem__)  # the first of equal ones
    winner = eligible[best]
    level = (one.settings for i, one in enumerate(eligible) if i != best and _level(winner.scores, one.scores))
    return Choice(winner.settings, _mean(winner.scores), len(tried), tuple(level))


def _against(runs: Sequence[Record | None], scores: np.ndarray, metric: str) -> str:
    for run in runs:
        if run is not None and run.status != DONE:
            return run.status
    if None in runs:
        return "not all seeds were run"
    return "" if np.isfinite(scores).all() else f"no {metric.replace('_', ' ')}"


def _level(best: np.ndarray, other: np.ndarray) -> bool:
    """True if the mean difference, paired over the seeds, is at most its standard error."""
    gaps = best - other
    error = gaps.std(ddof=1) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
    return abs(_mean(gaps)) <= error


def _mean(scores: np.ndarray) -> float:
    """The mean, the same for any order of the scores: ties are not decided by rounding."""
    return math.fsum(scores) / len(scores)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
