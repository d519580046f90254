"""Report of a run folder, finished or not."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.runs import plots, results, terminal
from jaxpfl.runs.config import RunConfig, completed, to_json
from jaxpfl.runs.reports import figures, sheets
from jaxpfl.runs.reports.drawing import svg
from jaxpfl.runs.reports.folders import COMPLETE, SUMMARY, Folder
from jaxpfl.runs.reports.page import Section, code, facts, folded, listing, paragraph, picture, table
from jaxpfl.runs.reports.settings import flat
from jaxpfl.runs.scores import Headline, find_headline, stored_headline
from jaxpfl.runs.stored_run import StoredRun, open_run
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError

_LABELS = {
    "clients": "Scores of every client after the last round, by method",
    "unseen": "Scores of every unseen client after its adaptation, by method",
    "psi": "Estimated spread of the clients over the rounds, by method",
    "uploads": "Norms of the uploads before clipping over the rounds, by method",
    "loss-by-bytes": "Training loss against the bytes uploaded so far, by method",
}
_OVER_ROUNDS = ("psi", "uploads", "loss-by-bytes")
_PRIVACY_OFF = "No noise was added: nothing is claimed about what the server learns of a client."


def sections(folder: Folder, data_dir: str | None) -> list[Section]:
    """Sections of the report.

    Args:
      folder: of the run.
      data_dir: present folder of the data, for the picture of the split.

    Raises:
      JaxpflError: for damaged files.
    """
    run = open_run(folder.path)
    summary = files.read_json(folder.path / SUMMARY) if folder.status == COMPLETE else None
    records = files.Records(folder.path / "metrics.jsonl").read()
    arrays = {name: results.read_arrays(folder.path, name)[1] for name in run.methods if _is_there(folder.path, name)}
    headline = find_headline(name for record in records for name in record) if summary is None else stored_headline(summary)
    drawn = plots.figures(records, {name: arrays.get(name, {}) for name in run.methods}, headline) if records else {}
    shown = {name: svg(figure, f"{folder.path}-{name}", _label(name, headline)) for name, figure in drawn.items()}
    return [
        Section("Results", _results(summary, shown, headline)),
        Section("Clients", _clients(folder.path, arrays, shown, headline)),
        Section("Over the rounds", [shown[name] for name in _OVER_ROUNDS if name in shown]),
        Section("Costs", _costs(folder.path, summary, shown, headline)),
        Section("The split", _split(run, data_dir)),
        Section("Privacy", _privacy(summary)),
        Section("Settings, and how to run it again", _settings(folder.path, run)),
    ]


def _is_there(folder: Path, method: str) -> bool:
    return (folder / "methods" / f"{method}.json").is_file()


def _label(name: str, headline: Headline) -> str:
    fallback = f"Test {headline.words} {'against uploaded bytes' if 'bytes' in name else 'over the rounds'}, by method"
    return _LABELS.get(name, fallback)


def _results(summary: dict[str, Any] | None, shown: dict[str, str], headline: Headline) -> list[str]:
    parts = [] if summary is None else [sheets.of_rich(one) for one in terminal.tables(summary)[:-1]]
    parts += [shown[headline.name]] if headline.name in shown else []
    if summary is not None:
        parts.append(listing(terminal.notes(summary)))
    return parts


def _clients(
    folder: Path, arrays: dict[str, dict[str, np.ndarray]], shown: dict[str, str], headline: Headline
) -> list[str]:
    parts = [shown[name] for name in ("clients", "unseen") if name in shown]
    figure = figures.gains(arrays, headline)
    if figure is not None:
        parts.append(svg(figure, f"{folder}-gains", "Each client's gain over local training, by method"))
    return parts


def _costs(folder: Path, summary: dict[str, Any] | None, shown: dict[str, str], headline: Headline) -> list[str]:
    if summary is None:
        return []
    parts = [sheets.of_rich(terminal.tables(summary)[-1])]
    figure = figures.costs(summary, headline)
    if figure is not None:
        parts.append(svg(figure, f"{folder}-costs", "Scores against gradients and bytes of a client, by method"))
    by_bytes = shown.get(f"{headline.name}-by-bytes")
    parts += [by_bytes] if by_bytes else []
    return [*parts, picture(folder / "plots" / "profile.png", "Where the time went, by phase")]


def _split(run: StoredRun, data_dir: str | None) -> list[str]:
    """Picture of the clients' classes; the reason where there is none."""
    from jaxpfl import data
    from jaxpfl.runs.inputs import has_checksum
    from jaxpfl.runs.setup import clients_of, load_federation

    try:
        config = run.config if data_dir is None else replace(run.config, data_dir=data_dir)
        source, federation = load_federation(config)
        trained, unseen, _ = clients_of(config, source, federation)
        if not has_checksum(run.record["data"], trained, unseen):
            return [paragraph("Not drawn: the data that are found now are not those of the run.")]
        figure = data.split_figure(data.summary(federation, source.num_classes))
    except JaxpflError as error:
        return [paragraph(f"Not drawn: {error}")]
    return [svg(figure, f"{run.folder}-split", "Training examples of each class that each client holds")]


def _privacy(summary: dict[str, Any] | None) -> list[str]:
    if summary is None:
        return []
    claims = terminal.claims(summary["methods"])
    without = [name for name, row in summary["methods"].items() if not row["privacy"]]
    parts = [paragraph(f"{', '.join(names)}: {claim}") for claim, names in claims.items()]
    if without:
        parts.append(paragraph(f"{', '.join(without)}: {_PRIVACY_OFF}" if claims else _PRIVACY_OFF))
    return parts


def _settings(folder: Path, run: StoredRun) -> list[str]:
    command = "compare" if len(run.methods) > 1 else "run"
    again = f"jaxpfl {command} --config {shlex.quote(str(folder / 'config.json'))} --output NEW_FOLDER"
    config, default = flat(completed(run.record["config"])), flat(to_json(RunConfig()))
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
    if value is None:
        return "-"
    return ", ".join(map(str, value)) or "-" if isinstance(value, list) else str(value)
