"""Difference of two finished runs: in their settings, and in the scores of each method that both have."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from jaxpfl.runs import results
from jaxpfl.runs.reports.folders import SUMMARY
from jaxpfl.runs.scores import Headline, stored_headline
from jaxpfl.runs.stored_run import StoredRun, flat, open_run
from jaxpfl.support import files
from jaxpfl.support.console import new_table, unmarked
from jaxpfl.support.errors import JaxpflError, expecting, printable

CONFIDENCE = 0.95
_ATTACK = ("attack", "attackers")


class Change(NamedTuple):
    """A setting that differs."""

    name: str
    first: Any
    second: Any


class Scores(NamedTuple):
    """Scores of a method in two runs.

    Attributes:
      first_method, second_method: the methods' names, which differ where each run has a single method.
      first, second: means over clients and seeds; None without scores.
      difference: second less first; None without both.
      low, high: confidence interval of the mean difference over clients (Student's t); None unless the runs are paired.
      better: share of the clients that are better off in the second run; None unless the runs are paired.
    """

    first_method: str
    second_method: str
    first: float | None
    second: float | None
    difference: float | None
    low: float | None = None
    high: float | None = None
    better: float | None = None


class Comparison(NamedTuple):
    """Two runs side by side.

    Attributes:
      folders: the two runs.
      metric: of the scores.
      settings: those that differ.
      unpaired: reasons why clients cannot be compared one by one; empty if they can.
      methods: scores of the methods that both have.
      only: methods of one of the runs alone.
    """

    folders: tuple[str, str]
    metric: str
    settings: list[Change]
    unpaired: list[str]
    methods: list[Scores]
    only: tuple[list[str], list[str]]

    def to_json(self) -> dict[str, Any]:
        """JSON-able content."""
        rows = {
            "settings": [one._asdict() for one in self.settings],
            "methods": [one._asdict() for one in self.methods],
        }
        return self._asdict() | rows


def compare(first: Path, second: Path) -> Comparison:
    """Compare two finished runs.

    Scores are those of the personalised models on test examples, means over clients and then over seeds. Where clients,
    examples, split and seeds are the same, clients are compared one by one, each by its mean over the seeds.

    Raises:
      JaxpflError: for folders without a finished run, with damaged files, of different tasks, or without a method in
        common.
    """
    runs = open_run(first), open_run(second)
    summaries = [_summary(run) for run in runs]
    with expecting(f"{first} or {second}", "a run of this version"):
        return _compared(runs, summaries)


def _compared(runs: tuple[StoredRun, StoredRun], summaries: list[dict[str, Any]]) -> Comparison:
    first, second = (run.folder for run in runs)
    headlines = [stored_headline(summary) for summary in summaries]
    if headlines[0] != headlines[1]:
        names = " and ".join(one.words for one in headlines)
        raise JaxpflError(f"the scores of {first} and {second} are different metrics: {names}")
    names = [list(summary["methods"]) for summary in summaries]
    both = [(name, name) for name in names[0] if name in names[1]]
    if not both and len(names[0]) == len(names[1]) == 1:
        both = [(names[0][0], names[1][0])]
    if not both:
        has, other = (printable(", ".join(of)) for of in names)
        raise JaxpflError(f"{first} has {has}, and {second} {other}: none in common")
    unpaired = _unpaired(runs)
    scores = [_scores(runs, summaries, one, headlines[0], not unpaired) for one in both]
    only = tuple([name for name in own if name not in {pair[i] for pair in both}] for i, own in enumerate(names))
    return Comparison(
        (str(first), str(second)), headlines[0].name, _settings(runs), unpaired, scores, (only[0], only[1])
    )


def print_comparison(console: Any, found: Comparison, headline: Headline) -> None:
    """Print the settings that differ, and a table of scores."""
    settings = new_table("settings that differ" if found.settings else "the settings are the same")
    for name in ("setting", *map(unmarked, found.folders)):
        settings.add_column(name, overflow="fold")
    for one in found.settings:
        settings.add_row(*(unmarked(str(cell)) for cell in one))
    console.print(settings)
    paired = not found.unpaired
    how = f"difference: second less first, with {100 * CONFIDENCE:.0f} % intervals over clients, each by its mean over "
    how += "the seeds; better: clients better off in the second"
    why = f"not paired, so without intervals: {'; '.join(found.unpaired)}"
    table = new_table(f"test {headline.words}{headline.unit}, mean over clients and seeds", how if paired else why)
    for name in ("method", "first", "second", "difference", *["interval", "better"] * paired):
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in found.methods:
        same = row.first_method == row.second_method
        cells = [row.first_method if same else f"{row.first_method}, {row.second_method}"]
        cells += [_shown(value, headline) for value in (row.first, row.second, row.difference)]
        if paired:
            interval = f"{_shown(row.low, headline)} to {_shown(row.high, headline)}" if row.low is not None else "-"
            cells += [interval, "-" if row.better is None else f"{100 * row.better:.0f}%"]
        table.add_row(*cells)
    console.print(table)
    for folder, names in zip(found.folders, found.only, strict=True):
        if names:
            console.print(f"only in {unmarked(folder)}: {', '.join(names)}", highlight=False, soft_wrap=True)


def _shown(value: float | None, headline: Headline) -> str:
    return "-" if value is None else headline.number(value)


def _summary(run: StoredRun) -> dict[str, Any]:
    if not (run.folder / SUMMARY).is_file():
        raise JaxpflError(f"the run in {run.folder} is not finished: --resume it first")
    return files.read_json(run.folder / SUMMARY)


def _settings(runs: tuple[StoredRun, StoredRun]) -> list[Change]:
    """Settings, hyper-parameters and versions that differ."""
    first, second = ({**flat(run.record["config"]), **_more(run)} for run in runs)
    names = dict.fromkeys((*first, *second))
    return [Change(n, first.get(n), second.get(n)) for n in names if first.get(n) != second.get(n)]


def _more(run: StoredRun) -> dict[str, Any]:
    """Hyper-parameters and versions of a run by their full names."""
    return flat(run.record["hyper"]) | flat(run.record.get("versions") or {}, "version of ")


def _unpaired(runs: tuple[StoredRun, StoredRun]) -> list[str]:
    """Reasons why the clients of two runs cannot be compared one by one."""
    first, second = runs
    reasons = []
    if first.record["data"] != second.record["data"]:
        reasons.append("the examples of the clients differ")
    if first.seeds != second.seeds:
        reasons.append(f"seeds {first.seeds[0]} to {first.seeds[-1]}, and {second.seeds[0]} to {second.seeds[-1]}")
    attacks = [{name: run.record["config"].get(name) for name in _ATTACK} for run in runs]
    if attacks[0] != attacks[1]:
        reasons.append("the attackers differ, who have no scores")
    return reasons


def _scores(
    runs: tuple[StoredRun, StoredRun],
    summaries: list[dict[str, Any]],
    names: tuple[str, str],
    headline: Headline,
    paired: bool,
) -> Scores:
    rows = [summary["methods"][name][headline.personalized] for summary, name in zip(summaries, names, strict=True)]
    first, second = (None if row is None else row["mean"] for row in rows)
    difference = None if first is None or second is None else second - first
    found = Scores(*names, first, second, difference)
    if not paired or difference is None:
        return found
    stacked = [
        results.read_arrays(run.folder, name)[1][f"after_{headline.name}"]
        for run, name in zip(runs, names, strict=True)
    ]
    gaps = stacked[1] - stacked[0]  # [S, m]
    gaps = gaps[:, np.isfinite(gaps).all(axis=0)].mean(axis=0)
    if len(gaps) < 2:
        return found
    half = stats.t.ppf(0.5 + CONFIDENCE / 2, len(gaps) - 1) * gaps.std(ddof=1) / math.sqrt(len(gaps))
    better = float((headline.better(gaps) > 0).mean())
    return found._replace(low=float(gaps.mean() - half), high=float(gaps.mean() + half), better=better)
