"""Selection of each method's setting by validation scores alone.

First, `validation_scores` drops the test scores; then, `choose` makes the choice by validation scores. Settings are
compared only on the same clients. If a field of the data or the split (``clients``, ``data``, ``split_seed``) is an
axis, each of its values is a separate problem. A setting is chosen for each problem, because the best score over all
problems would merely belong to the easiest problem. Of settings with equal scores, the first in the order of the grid
is chosen.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxpfl.engine.scores import ACCURACY, HEADLINES, Headline, find_headline
from jaxpfl.runs.config import DataConfig
from jaxpfl.runs.records import DONE, Record, Value
from jaxpfl.support.errors import JaxpflError

_HEADLINES = {name for one in HEADLINES.values() for name in (one.validation, one.personalized)}


class Tried(NamedTuple):
    """A setting with its validation scores.

    Attributes:
      settings: axis name -> value.
      scores: score for each seed of the search, averaged over clients, [S]; NaN for a seed without a score.
      against: reason why the setting cannot be chosen; empty if it can be chosen.
    """

    settings: Mapping[str, Value]
    scores: np.ndarray
    against: str = ""


class Choice(NamedTuple):
    """The setting chosen for a method.

    Attributes:
      settings: chosen setting, as axis name -> value; None if no setting can be chosen.
      score: mean score of the chosen setting over the seeds of the search; NaN if no setting can be chosen.
      tries: number of settings that were tried, including settings that cannot be chosen.
      level_with: other settings whose mean difference from the chosen setting, paired over the seeds, is at most its
        standard error; with a single seed, other settings with the same score.
      reason: reason why no setting can be chosen; empty if a setting is chosen.
    """

    settings: Mapping[str, Value] | None
    score: float
    tries: int
    level_with: tuple[Mapping[str, Value], ...] = ()
    reason: str = ""


def select(records: Iterable[Record], seeds: Iterable[int]) -> dict[str, Choice]:
    """Choose the setting of each method with the best validation score, averaged over the seeds of the search.

    The score is the headline metric of the task. A setting can be chosen only if its runs with all these seeds are done
    and have a finite score. Of settings with equal means, the first in the order of the records (see `sort_records`) is
    chosen.

    Args:
      records: records of the sweep; records with other seeds are ignored.
      seeds: seeds of the search.

    Raises:
      JaxpflError: if there are no seeds, or the runs have different headline metrics.
    """
    records = list(records)
    larger = not headline_of(records).lower
    return {method: choose(tried, larger=larger) for method, tried in validation_scores(records, seeds).items()}


def headline_of(records: Iterable[Record]) -> Headline:
    """Return the headline metric of a sweep's runs.

    Raises:
      JaxpflError: if runs have different headline metrics, because their data sets have different tasks.
    """
    found = {find_headline(record.metrics) for record in records if _HEADLINES & record.metrics.keys()}
    if len(found) > 1:
        names = " and ".join(sorted(one.words for one in found))
        raise JaxpflError(f"the sweep's scores are not comparable ({names}): run one sweep for each data set")
    return next(iter(found), ACCURACY)


def validation_scores(records: Iterable[Record], seeds: Iterable[int]) -> dict[str, list[Tried]]:
    """Return the settings of each method with their validation scores, but without their test scores.

    Raises:
      JaxpflError: as in `select`.
    """
    records = list(records)
    metric = headline_of(records).validation
    seeds = list(dict.fromkeys(seeds))
    if not seeds:
        raise JaxpflError("a selection needs at least one search seed")
    found: dict[str, list[Tried]] = {}
    for (method, _), runs in group_by_setting(records).items():
        by_seed = {run.seed: run for run in runs}
        of_search = [by_seed.get(seed) for seed in seeds]
        scores = np.array([None if run is None else run.metrics.get(metric) for run in of_search], float)
        found.setdefault(method, []).append(Tried(runs[0].settings, scores, _against(of_search, scores, metric)))
    return found


def choose(tried: Sequence[Tried], *, larger: bool) -> Choice:
    """Choose the setting with the best mean score.

    Args:
      tried: settings of one method.
      larger: whether larger scores are better.
    """
    eligible = [one for one in tried if not one.against]
    if not eligible:
        why = Counter(one.against for one in tried)
        counted = (f"{reason} ({times} settings)" if times > 1 else reason for reason, times in why.items())
        return Choice(None, math.nan, len(tried), reason="; ".join(counted) or "no setting was tried")
    means = [_mean(one.scores) if larger else -_mean(one.scores) for one in eligible]
    best = max(range(len(eligible)), key=means.__getitem__)  # max returns the first of equal means
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
    """Return whether the mean difference of two settings' scores [S] is at most its standard error."""
    gaps = best - other
    error = gaps.std(ddof=1) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
    return abs(_mean(gaps)) <= error


def _mean(scores: np.ndarray) -> float:
    """Return the mean; fsum makes it independent of the scores' order, so rounding errors do not break ties."""
    return math.fsum(scores) / len(scores)


Problem = tuple[dict[str, Value], list[Record], dict[str, Choice]]
"""Settings of the data and split that identify the problem, records on the problem, and the choice of each method."""

DATA_FIELDS = frozenset(field.name for field in dataclasses.fields(DataConfig))
"""Names of the fields that determine the data and their split."""


def problem_of(settings: Mapping[str, Value]) -> dict[str, Value]:
    """Return the values of the axes that identify the problem, which are the axes of the data and the split."""
    return {name: value for name, value in settings.items() if name in DATA_FIELDS}


def select_each(records: Sequence[Record], seeds: Iterable[int]) -> list[Problem]:
    """Choose the settings on each problem separately; the problems are in the order of the records.

    Raises:
      JaxpflError: as in `select`.
    """
    seeds = list(seeds)
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(setting_key(problem_of(record.settings)), []).append(record)
    return [(problem_of(own[0].settings), own, select(own, seeds)) for own in found.values()]


def setting_key(settings: Mapping[str, Value]) -> str:
    """Return a text that identifies a setting, independently of the order of its axes.

    As in `records.run_id`, 1, 1.0 and True are different values.
    """
    return json.dumps(dict(sorted(settings.items())))


def sort_records(
    records: Iterable[Record], methods: Sequence[str] = (), axes: Mapping[str, Sequence[Value]] | None = None
) -> list[Record]:
    """Sort records by method, then by the values of the axes (the first axis varies slowest), then by seed.

    A journal has the records in the order in which the runs ended.

    Args:
      records: records of the sweep.
      methods: names of the methods, in the order to sort by. Other methods follow in the order of their first records.
      axes: values of each axis, in the order to sort by. Other axes and values follow in the order in which they first
        appear.
    """
    records, axes = list(records), axes or {}
    names = list(dict.fromkeys([*axes, *(name for one in records for name in one.settings)]))
    method_places = _places([*methods, *(one.method for one in records)])
    places = {
        name: _places([*axes.get(name, ()), *(one.settings[name] for one in records if name in one.settings)])
        for name in names
    }

    def place(one: Record) -> tuple[int, ...]:
        known = (places[name][json.dumps(one.settings[name])] if name in one.settings else -1 for name in names)
        return (method_places[json.dumps(one.method)], *known, one.seed)

    return sorted(records, key=place)


def group_by_setting(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Group records by (method, key of the setting), in the order in which the groups first appear."""
    found: dict[tuple[str, str], list[Record]] = {}
    for one in records:
        found.setdefault((one.method, setting_key(one.settings)), []).append(one)
    return found


def _places(values: Sequence[Value]) -> dict[str, int]:
    return {text: place for place, text in enumerate(dict.fromkeys(map(json.dumps, values)))}
