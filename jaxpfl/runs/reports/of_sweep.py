"""Report of a sweep folder, finished or not."""

from __future__ import annotations

import shlex
from pathlib import Path

from jaxpfl.support import files
from jaxpfl.runs.records import Journal
from jaxpfl.runs.reports import sheets
from jaxpfl.runs.reports.drawing import svg
from jaxpfl.runs.reports.folders import COMPLETE, SUMMARY, Folder
from jaxpfl.runs.reports.page import Section, code, facts, folded, listing, table
from jaxpfl.studies.arguments import arguments
from jaxpfl.runs.sweep import plots, stored, tables
from jaxpfl.runs.sweep.definition import FILE, Definition
from jaxpfl.runs.sweep.estimate import StudyDefinition
from jaxpfl.runs.sweep.grid import Grid


def sections(folder: Folder) -> list[Section]:
    """Sections of the report.

    Raises:
      JaxpflError: for damaged files.
    """
    definition = stored.read(folder.path)
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
    again = shlex.join(["jaxpfl", "sweep", *_arguments(folder.path, definition), "--output", *where])
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


def _arguments(folder: Path, definition: Definition | StudyDefinition) -> list[str]:
    """Arguments of ``jaxpfl sweep`` that give the definition."""
    if isinstance(definition, Definition):
        return ["--config", str(folder / FILE)]
    seeds = ["--seeds", str(definition.seeds)] if definition.seeds > 1 else []
    given = [*arguments(definition.study, definition.settings, definition.options), *_flags(definition.grid), *seeds]
    return ["estimate", definition.name, *given]


def _flags(grid: Grid) -> list[str]:
    """Flags of a sweep that give the grid."""
    found = []
    for axis in grid.axes:
        ends = f"{'log' if axis.log else 'linear'}:{axis.low!r}:{axis.high!r}"
        found += ["--grid", f"{axis.name}={','.join(map(tables.value_words, axis.values)) or ends}"]
    if grid.draws:
        found += ["--random", str(grid.draws), "--random-draw", grid.draw, "--random-seed", str(grid.seed)]
    return found


def _settings(definition: Definition | StudyDefinition) -> dict[str, object]:
    """Methods or study, axes, seeds, and what all runs share."""
    grid = {axis.name: ", ".join(map(str, axis.values)) for axis in definition.grid.axes}
    if isinstance(definition, Definition):
        search = {name.replace("_", " "): value for name, value in vars(definition.search).items()}
        return {"methods": ", ".join(definition.methods), **grid, "seeds": len(definition.seeds), **search}
    fixed = {name: value for name, value in definition.to_json()["settings"].items() if name not in grid}
    common = {name.replace("_", " "): value for name, value in fixed.items() if value is not None}
    return {"study": definition.name, **grid, "seeds": definition.seeds, **common}
