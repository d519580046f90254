"""Comparison of two finished runs: settings that differ, and differences in scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from jaxpfl.engine.evaluate import Headline, stored_headline, words_of_clients, worst
from jaxpfl.runs import results
from jaxpfl.runs.config import flat
from jaxpfl.runs.run_folder import SUMMARY
from jaxpfl.runs.stored_run import StoredRun, open_run
from jaxpfl.support import files
from jaxpfl.support.console import new_table, unmarked
from jaxpfl.support.errors import JaxpflError, expecting, printable

CONFIDENCE = 0.95
_ATTACK = ("attack", "attackers")


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Compare two finished runs.

    The compared scores are the personalized models' scores on test examples, averaged over clients and seeds. If
    clients, their examples, attackers and seeds are the same in both runs, the runs are paired: each client's mean over
    the seeds is compared with the same client's mean in the other run.

    Returns:
      A dict with the entries:

      - ``folders``: paths of the two runs;
      - ``metric``: name of the scores' metric, and ``lower_is_better``, whether smaller scores are better;
      - ``settings``: settings that differ, each with its ``name`` and its values ``first`` and ``second``;
      - ``unpaired``: reasons why the runs are not paired;
      - ``methods``: a list with a dict for each method that both runs have. If each run has a single method, these two
        are compared even if they differ; ``first_method`` and ``second_method`` are their names. The dict contains the
        mean scores ``first`` and ``second``, and their ``difference`` (second minus first). ``low`` and ``high`` are
        the endpoints of the confidence interval of the clients' mean difference (Student's t), and ``better`` is the
        fraction of clients that are better off in the second run; all three are None unless the runs are paired and at
        least two clients have scores. If the clients of paired runs have names, ``worse`` lists up to five clients that
        are hurt most in the second run;
      - ``only``: methods that only the first run has, and methods that only the second run has.

    Raises:
      JaxpflError: if a folder contains no finished run or has damaged files, or if the runs have different metrics or
        no method in common.
    """
    runs = open_run(first), open_run(second)
    summaries = [_summary(run) for run in runs]
    with expecting(f"{first} or {second}", "a run of this version"):
        return _compared(runs, summaries)


def _compared(runs: tuple[StoredRun, StoredRun], summaries: list[dict[str, Any]]) -> dict[str, Any]:
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
        raise JaxpflError(f"{first} ({has}) and {second} ({other}) have no method in common")
    unpaired = _unpaired(runs)
    scores = [_scores(runs, summaries, one, headlines[0], not unpaired) for one in both]
    only = [[name for name in own if name not in {pair[i] for pair in both}] for i, own in enumerate(names)]
    return {
        "folders": [str(first), str(second)],
        "metric": headlines[0].name,
        "lower_is_better": headlines[0].lower,
        "settings": _settings(runs),
        "unpaired": unpaired,
        "methods": scores,
        "only": only,
    }


def print_comparison(console: Any, found: Mapping[str, Any]) -> None:
    """Print the result of `compare`: the settings that differ and the scores, as tables."""
    headline, paired = stored_headline(found), not found["unpaired"]
    settings = new_table("settings that differ" if found["settings"] else "the settings are the same")
    for name in ("setting", *map(unmarked, found["folders"])):
        settings.add_column(name, overflow="fold")
    for one in found["settings"]:
        settings.add_row(*(unmarked(str(cell)) for cell in one.values()))
    console.print(settings)
    how = f"difference: second minus first, with {100 * CONFIDENCE:.0f} % intervals over clients, whose scores are "
    how += "means over seeds; better: clients better off in the second"
    why = f"not paired, so without intervals: {'; '.join(found['unpaired'])}"
    table = new_table(f"test {headline.words}{headline.unit}, mean over clients and seeds", how if paired else why)
    for name in ("method", "first", "second", "difference", "from", "to", "better"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in found["methods"]:
        numbers = (row[name] for name in ("first", "second", "difference", "low", "high"))
        better = "-" if row["better"] is None else f"{100 * row['better']:.0f}%"
        names = dict.fromkeys((row["first_method"], row["second_method"]))
        table.add_row(", ".join(names), *map(headline.number, numbers), better)
    console.print(table)
    for row in (one for one in found["methods"] if one.get("worse")):
        words = f"{row['second_method']}: most hurt in the second: {words_of_clients(row['worse'], headline)}"
        console.print(words, highlight=False, soft_wrap=True, markup=False)
    for folder, names in zip(found["folders"], found["only"], strict=True):
        if names:
            console.print(f"only in {unmarked(folder)}: {', '.join(names)}", highlight=False, soft_wrap=True)


def _summary(run: StoredRun) -> dict[str, Any]:
    if not (run.folder / SUMMARY).is_file():
        raise JaxpflError(f"the run in {run.folder} is not finished: --resume it first")
    return files.read_json(run.folder / SUMMARY)


def _settings(runs: tuple[StoredRun, StoredRun]) -> list[dict[str, Any]]:
    """Return the settings, hyper-parameters and versions that differ between two runs."""
    first, second = (
        flat(run.record["config"]) | flat(run.record["hyper"]) | flat(run.record.get("versions") or {}, "version of ")
        for run in runs
    )
    names = [name for name in dict.fromkeys((*first, *second)) if first.get(name) != second.get(name)]
    return [{"name": name, "first": first.get(name), "second": second.get(name)} for name in names]


def _unpaired(runs: tuple[StoredRun, StoredRun]) -> list[str]:
    """Return the reasons why the clients of two runs cannot be paired; empty if they can."""
    first, second = runs
    reasons = []
    if first.record["data"] != second.record["data"]:
        reasons.append("the examples of the clients differ")
    if first.seeds != second.seeds:
        reasons.append(
            f"the seeds differ: {first.seeds[0]} to {first.seeds[-1]}, and {second.seeds[0]} to {second.seeds[-1]}"
        )
    attacks = [{name: run.record["config"].get(name) for name in _ATTACK} for run in runs]
    if attacks[0] != attacks[1]:
        reasons.append("the attackers, which have no scores, differ")
    return reasons


def _scores(
    runs: tuple[StoredRun, StoredRun],
    summaries: list[dict[str, Any]],
    names: tuple[str, str],
    headline: Headline,
    paired: bool,
) -> dict[str, Any]:
    rows = [summary["methods"][name][headline.personalized] for summary, name in zip(summaries, names, strict=True)]
    first, second = (None if row is None else row["mean"] for row in rows)
    difference = None if first is None or second is None else second - first
    found: dict[str, Any] = {"first_method": names[0], "second_method": names[1], "first": first, "second": second}
    found |= {"difference": difference, "low": None, "high": None, "better": None}
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
    found |= {"low": float(gaps.mean() - half), "high": float(gaps.mean() + half), "better": better}
    who = results.read_clients(runs[1].folder)
    return found | ({"worse": worst(stacked[1], who, headline, stacked[0])} if "client_names" in who else {})
