"""Outcome of a sweep whose runs are all there: its summary, written last."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpfl import __version__
from jaxpfl.runs.records import DONE, FAILED, Record, Value, rows
from jaxpfl.runs.scores import Headline
from jaxpfl.runs.sweep.axes import with_privacy
from jaxpfl.runs.sweep.best import best_config, write_best
from jaxpfl.runs.sweep.measures import UNDEFINED
from jaxpfl.runs.sweep.plots import write_plots
from jaxpfl.runs.sweep.problems import Problem, select_each
from jaxpfl.runs.sweep.selection import Choice, select
from jaxpfl.runs.sweep.summary import summarize
from jaxpfl.runs.sweep.sweep import SUMMARY, Sweep
from jaxpfl.support import files
from jaxpfl.support.console import signed

RESULTS, BEST, PLOTS = "results.parquet", "best", "plots"


def finish(sweep: Sweep) -> dict[str, Any]:
    """Summarise a sweep and write what its folder lacks, ``summary.json`` last.

    Returns:
      The summary, as `summarize` gives it, with the folder and the version.
    """
    definition = sweep.definition
    records = sweep.in_order(sweep.journal().read())
    chosen = select(records, definition.searched) if definition.search.select == "validation" else {}
    each = select_each(records, definition.searched) if chosen else []
    for problem, _, best in each:
        for method, choice in best.items():
            if choice.settings is not None:
                name = "-".join([method, *(f"{axis}={value}" for axis, value in problem.items())])
                text = _config(sweep, method, choice.settings, records)
                write_best(sweep.folder / BEST, re.sub(r"[^\w.=-]", "_", name), text)
    return written(sweep.folder, records, chosen, definition.searched, each if len(each) > 1 else ())


def written(
    folder: Path,
    records: Sequence[Record],
    chosen: Mapping[str, Choice],
    seeds: Sequence[int],
    problems: Sequence[Problem] = (),
) -> dict[str, Any]:
    """Summarise records and write the summary with the table and plots, ``summary.json`` last.

    Args:
      folder: of the sweep.
      records: of all runs, in the order of the grid.
      chosen: the settings chosen, as `select` gives them; empty where nothing is selected.
      seeds: of the search.
      problems: as `select_each` gives them, where there are several: ``problems`` of the summary is then a list of
        ``{"settings", "best"}``, ``best`` as that of the summary.
    """
    import pandas

    programs = {record.program or record.group for record in records if record.status != FAILED}
    seconds = math.fsum(one.seconds + (one.metrics.get("compile_seconds") or 0.0) for one in records)
    summary = summarize(records, chosen, seeds=seeds, programs=len(programs), seconds=seconds)
    summary["caveats"] = caveats(records, chosen)
    if problems:
        more = {"seeds": seeds, "programs": 0, "seconds": 0.0}
        summary["problems"] = [
            {"settings": named, "best": summarize(own, best, **more)["best"]} for named, own, best in problems
        ]
    files.write_table(folder / RESULTS, pandas.DataFrame(rows(records)))
    with signed("jaxpfl sweep"):
        write_plots(folder / PLOTS, summary)
    summary |= {"run_dir": str(folder), "version": __version__}
    files.write_json(folder / SUMMARY, summary)
    return summary


def caveats(records: Sequence[Record], chosen: Mapping[str, Choice]) -> list[str]:
    """Sentences on metrics that some clients have not, and weaknesses of the claims of private runs."""
    return [*_undefined(records), *_of_private(records, chosen)]


def _undefined(records: Sequence[Record]) -> list[str]:
    """Sentences about metrics that some clients' test examples do not define, of all runs that have such clients."""
    found: dict[str, list[tuple[int, int]]] = {}
    for record in records:
        for name, count in record.metrics.items():
            if name.endswith(UNDEFINED) and count:
                of = int(record.metrics.get("num_clients") or 0)
                found.setdefault(name.removesuffix(UNDEFINED), []).append((int(count), of))
    return [
        f"{Headline(name.removeprefix('personalized_')).words}: the test examples of {_range(own)} of "
        f"{_range(clients)} clients do not define it; its means leave them out"
        for name, (own, clients) in ((name, tuple(zip(*counts, strict=True))) for name, counts in found.items())
    ]


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _of_private(records: Sequence[Record], chosen: Mapping[str, Choice]) -> list[str]:
    """Weaknesses of the claims of private runs: each is of its run alone."""
    private = [record for record in records if record.metrics.get("epsilon") is not None]
    if not private:
        return []
    runs = Counter(record.method for record in private)
    most = ", ".join(f"{method} {count}" for method, count in runs.items())
    by_choice = " and the choice of a setting by their validation examples" * bool(chosen)
    return [
        f"epsilon is the claim of one run by itself: the other runs on the same clients (private ones: {most})"
        f"{by_choice} are not in it"
    ]


def _config(sweep: Sweep, method: str, settings: Mapping[str, Value], records: Sequence[Record]) -> str:
    """The chosen setting's run as a config file, shares of the clients and the rounds as numbers."""
    ran = next(r for r in records if r.method == method and r.settings == settings and r.status == DONE)
    share = isinstance(settings.get("cohort"), str)
    counts: dict[str, Value] = {"cohort": int(ran.metrics["cohort_size"] or 0)} if share else {}
    note = f"chosen for {method} on validation examples, jaxpfl {__version__}"
    base = with_privacy(sweep.definition.config, sweep.definition.grid)
    return best_config(base, method, {**settings, **counts}, ran.rounds, note)
