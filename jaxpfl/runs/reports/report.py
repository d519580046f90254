"""An HTML report about one or several result folders: runs and sweeps, finished or not, and studies."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl import __version__
from jaxpfl.engine.evaluate import Headline, client_means, find_headline, stored_headline
from jaxpfl.runs import plots, results, terminal
from jaxpfl.runs.config import RunConfig, flat, to_json
from jaxpfl.runs.records import Journal
from jaxpfl.runs.reports.folders import COMPLETE, DAMAGED, RUN, STUDY, Folder, look
from jaxpfl.runs.reports.page import (
    Section,
    code,
    facts,
    folded,
    listing,
    page,
    paragraph,
    picture,
    rich_table,
    sheet_table,
    svg,
    table,
)
from jaxpfl.runs.run_folder import SUMMARY
from jaxpfl.runs.stored_run import StoredRun, open_run
from jaxpfl.runs.sweep import plots as sweep_plots
from jaxpfl.runs.sweep import results as tables
from jaxpfl.runs.sweep.definition import FILE, Definition, read
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, expecting, label

_MOST_CLIENTS = 500
"""Largest number of clients in a report's table."""


def write(folders: Sequence[Path], output: Path, *, data_dir: str | None = None) -> None:
    """Write a self-contained HTML page about result folders; viewing it needs no network.

    Args:
      folders: folders of runs, sweeps and studies.
      output: HTML file to write.
      data_dir: current folder of the data sets, for the plots of the splits.

    Raises:
      JaxpflError: if a folder contains no results or damaged results, or the file cannot be written.
    """
    looked = [look(folder) for folder in folders]
    for folder in looked:
        if folder.status == DAMAGED:
            raise JaxpflError(folder.done)
    sections: list[Section] = []
    for folder in looked:
        with expecting(folder.path, f"a {folder.kind} of this version"):
            sections += _folder_sections(folder, data_dir, len(looked) > 1)
    title = _title(looked[0]) if len(looked) == 1 else f"{len(looked)} results"
    lead = [facts(_about(looked[0]))] if len(looked) == 1 else []
    text = page(title, lead, sections)
    with files.whole(output) as file:
        file.write(text)


def _folder_sections(folder: Folder, data_dir: str | None, named: bool) -> list[Section]:
    if folder.kind == RUN:
        found = _run_sections(folder, data_dir)
    else:
        found = (_study_sections if folder.kind == STUDY else _sweep_sections)(folder)
    if not named:
        return found
    first = Section(f"{_title(folder)}: {folder.path}", [facts(_about(folder))])
    return [first, *(one._replace(title=f"{folder.path.name}: {one.title}") for one in found)]


def _title(folder: Folder) -> str:
    names = ", ".join(folder.what)
    if folder.kind == STUDY:
        return f"Study {names}"
    of = f"{names} on {folder.data}" if folder.data else f"the study {names}"
    return of if folder.kind == RUN else f"Sweep of {of}"


def _about(folder: Folder) -> dict[str, object]:
    about: dict[str, object] = {
        "folder": folder.path,
        "kind": folder.kind,
        "status": folder.status,
        "progress": folder.done,
    }
    return {name: value for name, value in about.items() if str(value)} | {"report by": f"jaxpfl {__version__}"}


_OVER_ROUNDS = ("psi", "uploads", "loss-by-bytes")
_PRIVACY_OFF = "No noise was added, so nothing is guaranteed about what the server learns of a client."


def _run_sections(folder: Folder, data_dir: str | None) -> list[Section]:
    """Return the report's sections about a run.

    Args:
      folder: description of the run folder.
      data_dir: folder that now contains the data sets, for the plot of the split.

    Raises:
      JaxpflError: if a file is damaged.
    """
    run = open_run(folder.path)
    summary = files.read_json(folder.path / SUMMARY) if folder.status == COMPLETE else None
    records = files.Records(folder.path / "metrics.jsonl").read()
    done = folder.path / "methods"
    arrays = {
        name: results.read_arrays(folder.path, name)[1] for name in run.methods if (done / f"{name}.json").is_file()
    }
    recorded = (name for record in records for name in record)
    headline = find_headline(recorded) if summary is None else stored_headline(summary)
    every, who = {name: arrays.get(name, {}) for name in run.methods}, results.read_clients(folder.path)
    drawn = plots.figures(records, every, headline, who) if records else {}
    shown = {name: svg(figure, f"{folder.path}-{name}") for name, figure in drawn.items()}
    return [
        Section("Results", _results(summary, shown, headline)),
        Section("Clients", _clients(folder.path, arrays, shown, headline, who)),
        Section("Over the rounds", [shown[name] for name in _OVER_ROUNDS if name in shown]),
        Section("Costs", _costs(summary, shown, headline)),
        Section("The split", _split(run, data_dir)),
        Section("Privacy", _privacy(summary)),
        Section("Settings, and how to run it again", _run_settings(folder.path, run)),
    ]


def _results(summary: dict[str, Any] | None, shown: dict[str, str], headline: Headline) -> list[str]:
    parts = [] if summary is None else [rich_table(one) for one in terminal.tables(summary)[:-1]]
    parts += [shown[headline.name]] if headline.name in shown else []
    if summary is not None:
        parts.append(listing(terminal.notes(summary)))
    return parts


def _clients(
    folder: Path, arrays: dict[str, Any], shown: dict[str, str], headline: Headline, who: Mapping[str, np.ndarray]
) -> list[str]:
    parts = [shown[name] for name in ("clients", "unseen") if name in shown]
    figure = plots.gains(arrays, headline, who.get("client_names"))
    if figure is not None:
        parts.append(svg(figure, f"{folder}-gains"))
    if arrays and who:
        scores = {name: client_means(own[f"after_{headline.name}"]) for name, own in arrays.items()}
        names = who.get("client_names", who["client_ids"])
        worst = np.argsort(headline.better(np.sum([*scores.values()], axis=0)), kind="stable")[:_MOST_CLIENTS]
        rows = [
            (
                label(str(names[i])),
                *(headline.number(float(own[i]) if np.isfinite(own[i]) else None) for own in scores.values()),
            )
            for i in worst
        ]
        caption = f"test {headline.words}{headline.unit}, mean over seeds, from the worst client"
        parts.append(folded(f"{len(rows)} of {len(names)} clients", table(("client", *scores), rows, caption=caption)))
    return parts


def _costs(summary: dict[str, Any] | None, shown: dict[str, str], headline: Headline) -> list[str]:
    if summary is None:
        return []
    return [rich_table(terminal.tables(summary)[-1]), shown.get(f"{headline.name}-by-bytes", "")]


def _split(run: StoredRun, data_dir: str | None) -> list[str]:
    """Return a plot of the clients' classes, or a paragraph that says why there is none."""
    from jaxpfl import data
    from jaxpfl.runs.setup import clients_of, has_checksum, load_federation

    try:
        config = run.config if data_dir is None else replace(run.config, data_dir=data_dir)
        source, federation = load_federation(config)
        trained, unseen, *_ = clients_of(config, source, federation)
        if not has_checksum(run.record["data"], trained, unseen):
            return [paragraph("Not drawn: the data have changed since the run.")]
        figure = data.split_figure(data.summary(federation, source.num_classes))
    except JaxpflError as error:
        return [paragraph(f"Not drawn: {error}")]
    return [svg(figure, f"{run.folder}-split")]


def _privacy(summary: dict[str, Any] | None) -> list[str]:
    if summary is None:
        return []
    claims = terminal.claims(summary["methods"])
    without = [name for name, row in summary["methods"].items() if not row["privacy"]]
    parts = [paragraph(f"{', '.join(names)}: {claim}") for claim, names in claims.items()]
    if without:
        parts.append(paragraph(f"{', '.join(without)}: {_PRIVACY_OFF}" if claims else _PRIVACY_OFF))
    for name, what in summary.get("not_covered", {}).items():
        parts.append(paragraph(f"Not covered: {name} ({what})"))
    return parts


def _run_settings(folder: Path, run: StoredRun) -> list[str]:
    command = "compare" if len(run.methods) > 1 else "run"
    again = f"jaxpfl {command} --config {shlex.quote(str(folder / 'config.json'))} --output NEW_FOLDER"
    config, default = flat(run.record["config"]), flat(to_json(RunConfig()))
    chosen = {name: _word(value) for name, value in config.items() if value != default.get(name)}
    rows = [(method, name, _word(value)) for method, own in run.record["hyper"].items() for name, value in own.items()]
    versions = ", ".join(f"{name} {value}" for name, value in (run.record.get("versions") or {}).items())
    return [
        code(again),
        facts({**chosen, "versions": versions}),
        folded("Hyper-parameters of the methods", table(("method", "name", "value"), rows, words=2)),
        folded("All settings", facts({name: _word(value) for name, value in config.items()})),
    ]


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    if value is None:
        return "-"
    return ", ".join(map(str, value)) or "-" if isinstance(value, list) else str(value)


def _sweep_sections(folder: Folder) -> list[Section]:
    """Return the report's sections about a sweep.

    Raises:
      JaxpflError: if a file is damaged.
    """
    definition = read(folder.path)
    records = Journal(folder.path).read()
    results, pictures = [], []
    if folder.status == COMPLETE:
        summary = files.read_json(folder.path / SUMMARY)
        if summary["best"]:
            results.append(sheet_table(tables.best_sheet(summary)))
        results.append(sheet_table(tables.rows_sheet(summary)))
        results.append(listing(summary.get("caveats", ())))
        for name, figure in sweep_plots.figures(summary).items():
            pictures.append(svg(figure, f"{folder.path}-{name}"))
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
                facts(_sweep_settings(definition)),
                folded("The definition", code(files.contents(folder.path / FILE).decode())),
            ],
        ),
    ]


def _sweep_settings(definition: Definition) -> dict[str, object]:
    """Return a sweep's settings: methods, axes of the grid, number of seeds, and search."""
    grid = {axis.name: ", ".join(map(str, axis.values)) for axis in definition.grid.axes}
    search = {name.replace("_", " "): value for name, value in vars(definition.search).items()}
    return {"methods": ", ".join(definition.methods), **grid, "seeds": len(definition.seeds), **search}


_ABOUT = ("study", "settings", "plots", "files", "command")


def _study_sections(folder: Folder) -> list[Section]:
    """Return the report's sections about a study.

    Raises:
      JaxpflError: if the summary is damaged.
    """
    path = folder.path / SUMMARY
    summary = files.read_json(path)
    plots = summary.get("plots", [])
    if not isinstance(plots, list) or not all(isinstance(one, str) for one in plots):
        raise JaxpflError(f"{path} is damaged: 'plots' must list names of files in the folder")
    settings = summary.get("settings")
    settings = settings if isinstance(settings, Mapping) else {}
    results = {name: value for name, value in summary.items() if name not in _ABOUT}
    command = summary.get("command") if isinstance(summary.get("command"), list) else []
    return [
        Section("Results", [facts({name.replace("_", " "): _word(value) for name, value in flat(results).items()})]),
        Section("Pictures", [picture(files.inside(folder.path, one), one) for one in plots]),
        Section(
            "Settings, and how to run it again",
            [
                *([code(f"{shlex.join(map(str, command))} --output NEW_FOLDER")] if command else []),
                facts({str(name).replace("_", " "): "-" if v is None else v for name, v in settings.items()}),
                folded("All results", code(files.contents(path).decode())),
            ],
        ),
    ]
