"""Report of a sweep folder, finished or not."""

from __future__ import annotations

import shlex

from jaxpfl.runs.records import Journal
from jaxpfl.runs.reports import sheets
from jaxpfl.runs.reports.drawing import svg
from jaxpfl.runs.reports.folders import COMPLETE, SUMMARY, Folder
from jaxpfl.runs.reports.page import Section, code, facts, folded, listing, table
from jaxpfl.runs.sweep import plots, tables
from jaxpfl.runs.sweep.definition import FILE, Definition, read
from jaxpfl.support import files


def sections(folder: Folder) -> list[Section]:
    """Sections of the report.

    Raises:
      JaxpflError: for damaged files.
    """
    definition = read(folder.path)
    records = Journal(folder.path).read()
    results, pictures = [], []
    if folder.status == COMPLETE:
        summary = files.read_json(folder.path / SUMMARY)
        if summary["best"]:
            results.append(sheets.of_sheet(tables.best_sheet(summary)))
        results.append(sheets.of_sheet(tables.rows_sheet(summary)))
        results.append(listing(summary.get("caveats", ())))
        for name, figure in plots.figures(summary).items():
            pictures.append(svg(figure, f"{folder.path}-{name}", f"Scores of the sweep: {name.replace('-', ' ')}"))
    troubles = [
        (one.method, tables.setting_words(one.settings, one.method) or "-", str(one.seed), one.status, one.reason)
        for one in records
        if one.status != "done"
    ]
    trouble = table(("method", "setting", "seed", "status", "reason"), troubles, words=5)
    where = ("NEW_FOLDER",) if folder.status == COMPLETE else (str(folder.path), "--resume")
    again = shlex.join(["jaxpfl", "sweep", "--config", str(folder.path / FILE), "--output", *where])
    return [
        Section("Results", results),
        Section("Pictures", pictures),
        Section("Runs that are not done", [folded(f"{len(troubles)} runs", trouble)] if troubles else []),
        Section(
            "Settings, and how to run it again",
            [
                code(again),
                facts(_settings(definition)),
                folded("The definition", code(files.contents(folder.path / FILE).decode())),
            ],
        ),
    ]


def _settings(definition: Definition) -> dict[str, object]:
    """Methods, axes, seeds and search."""
    grid = {axis.name: ", ".join(map(str, axis.values)) for axis in definition.grid.axes}
    search = {name.replace("_", " "): value for name, value in vars(definition.search).items()}
    return {"methods": ", ".join(definition.methods), **grid, "seeds": len(definition.seeds), **search}
