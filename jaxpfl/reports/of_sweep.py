"""Report of a sweep folder, finished or not."""

from __future__ import annotations

import shlex

from jaxpfl import files
from jaxpfl.records import Journal
from jaxpfl.reports import sheets
from jaxpfl.reports.drawing import svg
from jaxpfl.reports.folders import COMPLETE, SUMMARY, Folder
from jaxpfl.reports.page import Section, code, facts, folded, listing, table
from jaxpfl.sweep import definition as definitions
from jaxpfl.sweep import plots, tables


def sections(folder: Folder) -> list[Section]:
    """Sections of the report.

    Raises:
      JaxpflError: for damaged files.
    """
    definition = definitions.read(folder.path)
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
    stored = str(folder.path / definitions.FILE)
    where = ("NEW_FOLDER",) if folder.status == COMPLETE else (str(folder.path), "--resume")
    again = shlex.join(["jaxpfl", "sweep", "--config", stored, "--output", *where])
    grid = {axis.name: ", ".join(map(str, axis.values)) for axis in definition.grid.axes}
    search = {name.replace("_", " "): value for name, value in vars(definition.search).items()}
    return [
        Section("Results", results),
        Section("Pictures", pictures),
        Section("Runs that are not done", [folded(f"{len(troubles)} runs", trouble)] if troubles else []),
        Section(
            "Settings, and how to run it again",
            [
                code(again),
                facts({"methods": ", ".join(definition.methods), **grid, "seeds": len(definition.seeds), **search}),
                folded("The definition", code((folder.path / definitions.FILE).read_text())),
            ],
        ),
    ]
