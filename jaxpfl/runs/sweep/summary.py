"""Summary of a sweep as JSON: a row for each method and setting, and each method's best setting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpfl.runs.records import DIVERGED, DONE, FAILED, STOPPED, Record
from jaxpfl.runs.scores import ACCURACY, Headline
from jaxpfl.runs.sweep.order import by_setting, setting_key
from jaxpfl.runs.sweep.selection import Choice, headline_of
from jaxpfl.support.files import jsonable

UNFINISHED = "unfinished"
"""Status of a row that lacks runs of the search."""

_WORST_FIRST = (FAILED, DIVERGED, STOPPED)


def summarize(
    records: Iterable[Record],
    choices: Mapping[str, Choice],
    *,
    seeds: Iterable[int],
    programs: int,
    seconds: float,
) -> dict[str, Any]:
    """The results of a sweep.

    Statistics of a row are of its runs that are done, test scores over all seeds that were run; a statistic is None
    where one of these runs lacks the metric.

    Args:
      records: of the sweep, in the order wanted of the rows.
      choices: as `select` gives them; empty where nothing is selected.
      seeds: of the search; a validation accuracy is the mean over these, as in the selection.
      programs: compiled for the sweep.
      seconds: of the sweep.

    Returns:
      ``{"rows": [{"method", "settings", "seeds", "validation_accuracy", "validation_std", "personalized_accuracy":
      {"mean", "std", "min", "max"}, "metrics": {NAME: {"mean", "std"}}, "seconds", "status", "reason"}, ...], "best":
      {METHOD: {"settings", "validation_accuracy", "personalized_accuracy", "seeds", "tries", "level_with", "reason"}},
      "programs", "seconds"}``, strict JSON. Where the headline is not the accuracy, ``metric`` names it, and its name
      stands in place of ``accuracy``. ``seeds`` counts the runs that are done, ``seconds`` of a row are those of
      all its runs, and ``status`` is the worst of them.
    """
    records = list(records)
    seeds, groups, headline = list(dict.fromkeys(seeds)), by_setting(records), headline_of(records)
    rows = {key: _row(runs, seeds, headline) for key, runs in groups.items()}
    best = {method: _best(method, choice, rows, headline) for method, choice in choices.items()}
    found = {"rows": list(rows.values()), "best": best, "programs": programs, "seconds": seconds}
    return jsonable(found if headline == ACCURACY else found | {"metric": headline.name})


def choices_of(summary: Mapping[str, Any]) -> list[tuple[int, str, Mapping[str, Any]]]:
    """Number of the problem, method and best setting: of each problem's clients, or of the only one."""
    problems = [problem["best"] for problem in summary.get("problems", ())] or [summary["best"]]
    return [(i, method, own) for i, best in enumerate(problems) for method, own in best.items()]


def _row(runs: Sequence[Record], seeds: Sequence[int], headline: Headline) -> dict[str, Any]:
    done = [run for run in runs if run.status == DONE]
    of_search = [run for run in done if run.seed in seeds]
    names = dict.fromkeys(
        name for run in runs for name in run.metrics if name not in (headline.validation, headline.personalized)
    )
    status, reason = _status(runs, seeds)
    validation = _statistics(of_search, headline.validation)
    return {
        "method": runs[0].method,
        "settings": dict(runs[0].settings),
        "seeds": len(done),
        headline.validation: validation["mean"],
        "validation_std": validation["std"],
        headline.personalized: _statistics(done, headline.personalized),
        "metrics": {name: {key: _statistics(done, name)[key] for key in ("mean", "std")} for name in names},
        "seconds": math.fsum(run.seconds for run in runs),
        "status": status,
        "reason": reason,
    }


def _status(runs: Sequence[Record], seeds: Sequence[int]) -> tuple[str, str]:
    """The worst status of some runs, with the reasons of those that have it."""
    for status in _WORST_FIRST:
        such = [run for run in runs if run.status == status]
        if such:
            which = "" if len(such) == len(runs) else f"seed{'s' * (len(such) > 1)} {_listed(such)}"
            reasons = "; ".join(dict.fromkeys(run.reason for run in such if run.reason))
            return status, ": ".join(part for part in (which, reasons) if part)
    missing = set(seeds) - {run.seed for run in runs}
    if missing:
        return UNFINISHED, f"{len(missing)} of {len(seeds)} seeds of the search were not run"
    return DONE, ""


def _listed(runs: Sequence[Record], most: int = 5) -> str:
    named = ", ".join(str(run.seed) for run in runs[:most])
    return named if len(runs) <= most else f"{named} and {len(runs) - most} more"


def _best(
    method: str, choice: Choice, rows: Mapping[tuple[str, str], dict[str, Any]], headline: Headline
) -> dict[str, Any]:
    row = None if choice.settings is None else rows[method, setting_key(choice.settings)]
    return {
        "settings": None if choice.settings is None else dict(choice.settings),
        headline.validation: None if row is None else row[headline.validation],
        headline.personalized: _statistics([], "") if row is None else row[headline.personalized],
        "seeds": 0 if row is None else row["seeds"],
        "tries": choice.tries,
        "level_with": [dict(other) for other in choice.level_with],
        "reason": choice.reason,
    }


def _statistics(runs: Sequence[Record], name: str) -> dict[str, float | None]:
    """Mean, standard deviation, smallest and largest of a metric over runs; all None where one lacks it.

    The standard deviation divides by the number of runs less one, and is None for a single run.
    """
    found = [run.metrics.get(name) for run in runs]
    values = np.array([math.nan if value is None else value for value in found], float)
    if not len(values) or not np.isfinite(values).all():
        return dict.fromkeys(("mean", "std", "min", "max"))
    return {
        "mean": math.fsum(values) / len(values),
        "std": float(values.std(ddof=1)) if len(values) > 1 else None,
        "min": float(values.min()),
        "max": float(values.max()),
    }
