"""Results of a sweep: each method's chosen setting, and a summary as JSON and as tables.

Settings are chosen by validation scores alone. First, `validation_scores` drops the test scores; then, `choose` makes
the choice by validation scores. Settings are compared only on the same clients. If a field of the data or the split
(``clients``, ``data``, ``split_seed``) is an axis, each of its values is a separate problem. A setting is chosen for
each problem, because the best score over all problems would merely belong to the easiest problem. Of settings with
equal scores, the first in the order of the grid is chosen.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.engine.evaluate import ACCURACY, HEADLINES, Headline, find_headline, stored_headline
from jaxpfl.runs.config import DataConfig
from jaxpfl.runs.records import DIVERGED, DONE, FAILED, STOPPED, Record, Value, value_words
from jaxpfl.support.console import format_seconds, new_table, unmarked
from jaxpfl.support.errors import JaxpflError, printable
from jaxpfl.support.files import jsonable

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
      level_with: other settings with about the same score. A setting's scores are subtracted seed by seed from the
        chosen setting's scores, and the mean of these differences must be at most its standard error. With a single
        seed, the scores must be equal.
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
        raise JaxpflError("a selection requires at least one search seed")
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
    """Return whether the mean difference of two settings' scores [S] is at most the standard error of this mean."""
    gaps = best - other
    error = gaps.std(ddof=1) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
    return abs(_mean(gaps)) <= error


def _mean(scores: np.ndarray) -> float:
    """Return the mean, computed independently of the order of the scores, so that rounding errors do not break ties."""
    return math.fsum(scores) / len(scores)


Problem = tuple[dict[str, Value], list[Record], dict[str, Choice]]
"""Settings of the data and split that identify the problem, records on the problem, and the choice of each method."""

DATA_FIELDS = frozenset(field.name for field in dataclasses.fields(DataConfig))
"""Names of the fields that determine the data and their split."""


def select_each(records: Sequence[Record], seeds: Iterable[int]) -> list[Problem]:
    """Choose the settings on each problem separately; the problems are in the order of the records.

    Raises:
      JaxpflError: as in `select`.
    """
    seeds = list(seeds)
    found: dict[str, tuple[dict[str, Value], list[Record]]] = {}
    for record in records:
        problem = {name: value for name, value in record.settings.items() if name in DATA_FIELDS}
        found.setdefault(setting_key(problem), (problem, []))[1].append(record)
    return [(problem, own, select(own, seeds)) for problem, own in found.values()]


def setting_key(settings: Mapping[str, Value]) -> str:
    """Return a key for a combination of settings that does not depend on their order.

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


UNFINISHED = "unfinished"
"""Status of a setting for which some runs of the search are missing."""

_WORST_FIRST = (FAILED, DIVERGED, STOPPED)


def summarize(
    records: Iterable[Record],
    choices: Mapping[str, Choice],
    *,
    seeds: Iterable[int],
    programs: int,
    seconds: float,
) -> dict[str, Any]:
    """Summarize the results of a sweep.

    Args:
      records: records of the sweep, in the order of the rows.
      choices: choices as `select` returns them; empty if no settings are chosen.
      seeds: seeds of the search.
      programs: number of programs compiled for the sweep.
      seconds: total seconds of compilation and execution of all runs.

    Returns:
      ``{"rows": [{"method", "settings", "seeds", "validation_accuracy", "validation_std", "personalized_accuracy":
      {"mean", "std", "min", "max"}, "metrics": {NAME: {"mean", "std"}}, "seconds", "status", "reason"}, ...], "best":
      {METHOD: {"settings", "validation_accuracy", "personalized_accuracy", "seeds", "tries", "level_with", "reason"}},
      "programs", "seconds"}``, as JSON values without NaN. There is a row for each method and setting. Its statistics
      are over the finished runs; the validation score is over the finished runs with the seeds of the search. A
      statistic is None if one of these runs lacks the metric. ``seeds`` is the number of finished runs, ``seconds`` the
      total over all runs, and ``status`` the worst status of the runs, or "unfinished" if all are done but some seeds
      of the search were not run. ``reason`` explains the status of a row, and is empty if ``status`` is "done". For
      the best setting, ``tries``, ``level_with`` and ``reason`` are as in `Choice`. If the headline metric is not
      accuracy, the entry ``metric`` names it, and keys such as ``validation_accuracy`` use its name instead.
    """
    records = list(records)
    seeds, groups, headline = list(dict.fromkeys(seeds)), group_by_setting(records), headline_of(records)
    rows = {key: _row(runs, seeds, headline) for key, runs in groups.items()}
    best = {method: _best(method, choice, rows, headline) for method, choice in choices.items()}
    found = {"rows": list(rows.values()), "best": best, "programs": programs, "seconds": seconds}
    return jsonable(found if headline == ACCURACY else found | {"metric": headline.name})


def choices_of(summary: Mapping[str, Any]) -> list[tuple[int, str, Mapping[str, Any]]]:
    """Return ``(index of the problem, method, entry of "best")`` for each problem and method."""
    problems = [problem["best"] for problem in summary.get("problems", ())] or [summary["best"]]
    return [(i, method, own) for i, best in enumerate(problems) for method, own in best.items()]


def chosen_settings(summary: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Return ``(method, key of the setting)`` for all chosen settings."""
    best = choices_of(summary)
    return {(method, setting_key(own["settings"])) for _, method, own in best if own["settings"] is not None}


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
    """Return the worst status among the runs of a setting, and the reasons given by the runs with that status."""
    for status in _WORST_FIRST:
        such = [run for run in runs if run.status == status]
        if such:
            numbers = ", ".join(str(run.seed) for run in such)
            which = f"seed{'s' * (len(such) > 1)} {numbers}" * (len(such) < len(runs))
            reasons = "; ".join(dict.fromkeys(run.reason for run in such if run.reason))
            return status, ": ".join(part for part in (which, reasons) if part)
    missing = set(seeds) - {run.seed for run in runs}
    if missing:
        return UNFINISHED, f"{len(missing)} of {len(seeds)} seeds of the search were not run"
    return DONE, ""


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
    """Return the mean, standard deviation, minimum and maximum of a metric over runs; all None if a run lacks it.

    The standard deviation has ddof 1, and is None for a single run.
    """
    values = np.array([run.metrics.get(name) for run in runs], float)
    if not len(values) or not np.isfinite(values).all():
        return dict.fromkeys(("mean", "std", "min", "max"))
    return {
        "mean": math.fsum(values) / len(values),
        "std": float(values.std(ddof=1)) if len(values) > 1 else None,
        "min": float(values.min()),
        "max": float(values.max()),
    }


MOST_ROWS = 40
"""Maximum number of settings of a sweep that the terminal lists; if there are more, it lists only the best."""
_COMPILING = "compile_seconds"
_MOST_NAMED = 3
_NARROWEST = 20
"""Minimum width, in characters, of the column of settings, whose text is wrapped."""


class Sheet(NamedTuple):
    """A table whose cells are strings.

    Attributes:
      header: names of the columns.
      rows: the cells' strings.
      words: number of text columns, which come first; all other columns are numbers.
      bold: (row, column) of every cell in bold.
      note: sentence that explains the numbers.
    """

    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    words: int
    bold: frozenset[tuple[int, int]]
    note: str


def print_sweep(console: Any, summary: Mapping[str, Any], most: int = MOST_ROWS) -> None:
    """Print the best setting of each method, a table of all settings, and notes about unfinished settings.

    Args:
      console: rich console.
      summary: summary as `summarize` returns it.
      most: maximum number of settings for which the table of all settings is printed.
    """
    rows, best = summary["rows"], summary["best"]
    if best:
        console.print(_rich(best_sheet(summary), "best setting of each method, chosen on validation examples"))
        console.print()
    if len(rows) <= most:
        console.print(_rich(rows_sheet(summary, joined=True), f"{len(rows)} setting{'s' * (len(rows) != 1)}"))
        console.print()
    for _, method, own in choices_of(summary):
        if level := own["level_with"]:
            named = "; ".join(setting_words(one, method) for one in level[:_MOST_NAMED])
            more = f" and {len(level) - _MOST_NAMED} more" * (len(level) > _MOST_NAMED)
            text = f"{method}: within one standard error of the chosen setting: {named}{more}"
            console.print(_line(text), highlight=False)
    for method, text in _not_done(rows):
        console.print(_line(f"{method}: {text}"), highlight=False)
    for caveat in summary.get("caveats", ()):
        console.print(_line(caveat), highlight=False)
    said = f"{len(rows)} settings" * (len(rows) > most)
    said += ("; " if said else "") + f"{summary['programs']} program{'s' * (summary['programs'] != 1)}"
    console.print(f"{said}, {format_seconds(summary['seconds'])} s", highlight=False)


def setting_words(settings: Mapping[str, Value], method: str = "") -> str:
    """Return a setting as a string, such as ``lr=0.1, psi_init=3.5``, without the prefix ``METHOD.`` of ``method``."""
    return ", ".join(f"{name.removeprefix(f'{method}.')}={value_words(value)}" for name, value in settings.items())


def best_sheet(summary: Mapping[str, Any]) -> Sheet:
    """Return the table of each method's best setting on each problem; each problem's best test score is bold."""
    best, rows, headline = choices_of(summary), [], stored_headline(summary)
    problems = [problem["settings"] for problem in summary.get("problems", ())] or [{}]
    constants, unbeaten = dict[str, None](), ""
    for i, method, own in best:
        chosen = own["settings"]
        words = f"none: {own['reason']}" if chosen is None else setting_words(chosen, method) or "-"
        ours = [
            row for row in summary["rows"] if row["method"] == method and problems[i].items() <= row["settings"].items()
        ]
        scores = headline.number(own[headline.validation]), _spread(own[headline.personalized], headline)
        rows.append((method, words, *scores, str(own["seeds"]), str(own["tries"]), *_times(ours)))
        of_chosen = [row["metrics"] for row in ours if chosen is not None and row["settings"] == problems[i] | chosen]
        constant = next((found.get(f"constant_{headline.name}", {}).get("mean") for found in of_chosen), None)
        mean = own[headline.personalized]["mean"]
        if constant is not None and mean is not None:
            constants[headline.number(constant)] = None
            if headline.better(mean - constant) <= 0:
                unbeaten += f"; {method} does not beat it"
    bold: set[tuple[int, int]] = set()
    for problem in {problem for problem, _, _ in best}:
        means = {i: one[2][headline.personalized]["mean"] for i, one in enumerate(best) if one[0] == problem}
        top = max((mean for mean in means.values() if mean is not None), key=headline.better, default=None)
        if top is not None and len(means) > 1:  # all scores that look equal to the best in the table are bold
            bold |= {(i, 3) for i, mean in means.items() if headline.number(mean) == headline.number(top)}
    note = f"{_plural(headline)}, of personalized models, mean over clients and seeds"
    note += " ± standard deviation over seeds" * any(own["seeds"] > 1 for _, _, own in best)
    if constants:
        note += f"; constant predictor: {', '.join(constants)}{unbeaten}"
    note += "; tries: number of settings that were tried; compile, run: seconds of all their runs"
    header = ("method", "setting", "validation", "test", "seeds", "tries", "compile", "run")
    return Sheet(header, rows, 2, frozenset(bold), f"{note}.")


def rows_sheet(summary: Mapping[str, Any], *, joined: bool = False) -> Sheet:
    """Return the table of all settings; the chosen setting of each method is bold.

    Args:
      summary: summary as `summarize` returns it.
      joined: whether the table has one column with the whole setting, which a terminal can wrap, instead of a column
        for each axis.
    """
    every = summary["rows"]
    axes = list(dict.fromkeys(name for row in every for name in row["settings"]))
    headline = stored_headline(summary)
    chosen = chosen_settings(summary)
    rows, bold = [], set()
    for i, row in enumerate(every):
        words = [setting_words(row["settings"], row["method"]) or "-"]
        cells = [row["method"], *(words if joined else (value_words(row["settings"].get(name)) for name in axes))]
        cells += [headline.number(row[headline.validation]), _spread(row[headline.personalized], headline)]
        cells += [str(row["seeds"]), *_times([row]), row["status"]]
        if (row["method"], setting_key(row["settings"])) in chosen:
            bold |= {(i, column) for column in range(len(cells))}
        rows.append(tuple(cells))
    columns = ["setting"] if joined else axes
    header = ("method", *columns, "validation", "test", "seeds", "compile", "run", "status")
    note = f"{_plural(headline)}, mean over clients and seeds"
    note += " ± standard deviation over seeds" * any(row["seeds"] > 1 for row in every)
    note += "; compile, run: seconds of all runs"
    note += "; bold: chosen on validation examples" * bool(chosen)
    return Sheet(header, rows, 1 + joined, frozenset(bold), f"{note}.")


def _line(text: str) -> str:
    """Escape a line of text so that rich prints it without interpreting markup."""
    from rich.markup import escape

    return escape(printable(text, 2000))


def _not_done(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return notes about unfinished settings, one for each method, status and reason, as (method, note)."""
    bad = [row for row in rows if row["status"] != DONE]
    counts = Counter((row["method"], row["status"], row["reason"]) for row in bad)
    said = []
    for (method, status, reason), count in counts.items():
        such = (row for row in bad if (row["method"], row["status"], row["reason"]) == (method, status, reason))
        named = setting_words(next(such)["settings"], method)
        first = f"{count} settings, the first {named}" if count > 1 else named or "its setting"
        said.append((method, f"{first}: {status}{f' ({reason})' * bool(reason)}"))
    return said


def _rich(sheet: Sheet, title: str) -> Any:
    table = new_table(title, sheet.note)
    for i, name in enumerate(sheet.header):
        side = "left" if i < sheet.words or name == "status" else "right"
        if name == "setting":
            widest = max(map(len, (name, *(row[i] for row in sheet.rows))))
            table.add_column(name, justify=side, overflow="fold", min_width=min(widest, _NARROWEST))
        else:
            table.add_column(unmarked(name), justify=side, style="bold" if i == 0 else None, no_wrap=True)
    for i, row in enumerate(sheet.rows):
        cells = (unmarked(cell) for cell in row)
        table.add_row(*(f"[bold]{cell}[/]" if (i, j) in sheet.bold else cell for j, cell in enumerate(cells)))
    return table


def _plural(headline: Headline) -> str:
    return "Accuracies in %" if headline == ACCURACY else f"{headline.words}{headline.unit}"


def _spread(stats: Mapping[str, float | None], headline: Headline) -> str:
    if stats["mean"] is None:
        return "-"
    return headline.number(stats["mean"]) + ("" if stats["std"] is None else f" ± {headline.number(stats['std'])}")


def _times(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the total compilation time and execution time of the runs in the rows, in seconds, as text."""
    compiling = [row["metrics"].get(_COMPILING, {}).get("mean") for row in rows]
    known = None if None in compiling else sum(mean * row["seeds"] for mean, row in zip(compiling, rows, strict=True))
    return format_seconds(known), format_seconds(sum(row["seconds"] for row in rows))
