"""Selection of each method's setting, on validation examples alone.

The choice is made by `choose`, whose argument holds validation scores and nothing else: what a run scored on test
examples is dropped by `validation_scores` before. Settings are compared on the same clients only: where a field of the
data or the split is an axis (``clients``, ``data``, ``split_seed``), its values are problems, and each method has a
best setting for each of them, as the best over all would belong to the easiest problem. Ties are decided by the order
of the grid.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxpfl.runs.config import DataConfig
from jaxpfl.runs.records import DONE, Record, Value
from jaxpfl.runs.scores import ACCURACY, HEADLINES, Headline, find_headline
from jaxpfl.support.errors import JaxpflError

_HEADLINES = {name for one in HEADLINES.values() for name in (one.validation, one.personalized)}


class Tried(NamedTuple):
    """One setting's validation scores.

    Attributes:
      settings: the values on the axes.
      scores: mean score over clients of each seed in the search, [S]; NaN for a seed without a score.
      against: reason why the setting cannot be chosen; empty if it can be chosen.
    """

    settings: Mapping[str, Value]
    scores: np.ndarray
    against: str = ""


class Choice(NamedTuple):
    """The setting chosen for a method.

    Attributes:
      settings: the chosen values on the axes; None if no setting can be chosen.
      score: the mean score of the chosen setting over the seeds of the search; NaN if no setting can be chosen.
      tries: number of settings that were tried, including settings that cannot be chosen.
      level_with: the other settings within one standard error of the chosen one, where differences of scores are paired
        over the seeds; with a single seed, the other settings with the same score.
      reason: the reason why no setting can be chosen; empty if one is chosen.
    """

    settings: Mapping[str, Value] | None
    score: float
    tries: int
    level_with: tuple[Mapping[str, Value], ...] = ()
    reason: str = ""


def select(records: Iterable[Record], seeds: Iterable[int]) -> dict[str, Choice]:
    """The best setting of each method by its task's headline on validation examples, mean over the search's seeds.

    A setting is chosen only if its runs with all of these seeds are done and have a finite score. Of settings with the
    same mean, the first in the order of the records is chosen (`sort_records`).

    Args:
      records: records of the sweep; records with other seeds are ignored.
      seeds: seeds of the search.

    Raises:
      JaxpflError: without seeds, and for runs with several headlines.
    """
    records = list(records)
    larger = not headline_of(records).lower
    return {method: choose(tried, larger=larger) for method, tried in validation_scores(records, seeds).items()}


def headline_of(records: Iterable[Record]) -> Headline:
    """The headline metric of the runs of a sweep.

    Raises:
      JaxpflError: for runs with several headlines, from data sets with different tasks.
    """
    found = {find_headline(record.metrics) for record in records if _HEADLINES & record.metrics.keys()}
    if len(found) > 1:
        names = " and ".join(sorted(one.words for one in found))
        raise JaxpflError(f"the sweep's scores are not comparable ({names}): sweep their data separately")
    return next(iter(found), ACCURACY)


def validation_scores(records: Iterable[Record], seeds: Iterable[int]) -> dict[str, list[Tried]]:
    """Each method's settings with their validation scores, and nothing else of their runs.

    Raises:
      JaxpflError: as `select`.
    """
    records = list(records)
    metric = headline_of(records).validation
    seeds = list(dict.fromkeys(seeds))
    if not seeds:
        raise JaxpflError("a selection needs at least one seed of the search")
    found: dict[str, list[Tried]] = {}
    for (method, _), runs in group_by_setting(records).items():
        by_seed = {run.seed: run for run in runs}
        of_search = [by_seed.get(seed) for seed in seeds]
        scores = np.array([None if run is None else run.metrics.get(metric) for run in of_search], float)
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
    best = max(range(len(eligible)), key=means.__getitem__)  # the first of equals
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


Problem = tuple[dict[str, Value], list[Record], dict[str, Choice]]
"""(settings that name a problem, its records, each method's choice on it)."""

DATA_FIELDS = frozenset(field.name for field in dataclasses.fields(DataConfig))
"""Names of the fields that make the data and their split."""


def problem_of(settings: Mapping[str, Value]) -> dict[str, Value]:
    """The part of a setting that names its problem."""
    return {name: value for name, value in settings.items() if name in DATA_FIELDS}


def select_each(records: Sequence[Record], seeds: Iterable[int]) -> list[Problem]:
    """Select on each problem alone, problems in the order of the records.

    Raises:
      JaxpflError: as `select`.
    """
    seeds = list(seeds)
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(setting_key(problem_of(record.settings)), []).append(record)
    return [(problem_of(own[0].settings), own, select(own, seeds)) for own in found.values()]


def setting_key(settings: Mapping[str, Value]) -> str:
    """Name of a setting by its content, in any order; 1, 1.0 and True are three values, as in `records.run_id`."""
    return json.dumps(dict(sorted(settings.items())))


def sort_records(
    records: Iterable[Record], methods: Sequence[str] = (), axes: Mapping[str, Sequence[Value]] | None = None
) -> list[Record]:
    """The records by method, then by their values on the axes, the first axis slowest, then by seed.

    A journal holds them in the order in which they ended.

    Args:
      records: records of the sweep.
      methods: methods in their order; others come after them as they appear.
      axes: the values on each axis, in their order; other axes and other values come after them as they appear.
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
    """The records of each method and setting, in the order of their first ones."""
    found: dict[tuple[str, str], list[Record]] = {}
    for one in records:
        found.setdefault((one.method, setting_key(one.settings)), []).append(one)
    return found


def _places(values: Sequence[Value]) -> dict[str, int]:
    return {text: place for place, text in enumerate(dict.fromkeys(map(json.dumps, values)))}
