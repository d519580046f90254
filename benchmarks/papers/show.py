"""Tables of results beside published values, for the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxpfl.support.console import new_table, unmarked

from .compare import Row
from .declared import Experiment
from .results import Result

HEADER = ("setting", "method", "jaxpfl", "paper", "difference")
CAPTION = "± one standard deviation; difference: in joint standard deviations"
QUICK = "QUICK RUN, scaled down: not comparable with the paper"


def title(result: Result) -> str:
    """Return the title of a result's table."""
    return f"{result.name}: {result.paper}. {result.what}" + (f" [{QUICK}]" if result.quick else "")


def cells(row: Row) -> tuple[str, str, str, str, str]:
    """Return the strings of a row, in the order of `HEADER`."""
    gap = "-" if row.difference is None else f"{row.difference:+.1f}"
    return row.setting, row.method, _value(row.ours, row.std), _value(row.printed, row.printed_std), gap


def _value(value: float | None, std: float | None) -> str:
    if value is None:
        return "-"
    text = f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return text if std is None else f"{text} ±{std:.2g}"


def notes(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Return each distinct note once, with a description of the rows that have it."""
    rows = list(rows)
    found: dict[str, list[Row]] = {}
    for row in rows:
        for note in row.note.split("; "):
            if note:
                found.setdefault(note, []).append(row)
    return [(_whose(own, rows), note) for note, own in found.items()]


def _whose(own: list[Row], every: list[Row]) -> str:
    if len(own) == len(every):
        return "all rows"
    for name in ("method", "setting"):
        of = {getattr(row, name) for row in own}
        if all(row in own for row in every if getattr(row, name) in of):
            return ", ".join(dict.fromkeys(getattr(row, name) for row in own))
    return ", ".join(f"{row.method} ({row.setting})" for row in own)


def print_result(console: Any, result: Result) -> None:
    """Print a result's table, its notes, and how it was computed."""
    table = new_table(unmarked(title(result)), CAPTION)
    for place, name in enumerate(HEADER):
        table.add_column(name, justify="left" if place < 2 else "right", no_wrap=place >= 2)
    for row in result.rows:
        table.add_row(*map(unmarked, cells(row)))
    console.print(table)
    for line in (*(f"{whose}: {note}" for whose, note in notes(result.rows)), _origin(result)):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def print_list(console: Any, experiments: Iterable[Experiment], measured: Mapping[str, float]) -> None:
    """Print the experiments, their papers, and their minutes (``measured``, by name; otherwise an estimate)."""
    said = "minutes; ~: estimated for two cores, others: measured (jaxpfl papers show NAME names the machine)"
    table = new_table("tables and figures of the papers", said)
    for name in ("name", "paper", "what"):
        table.add_column(name, no_wrap=name == "name")
    table.add_column("minutes", justify="right", no_wrap=True)
    for one in experiments:
        minutes = f"{measured[one.name]:.3g}" if one.name in measured else f"~{one.minutes:g}"
        table.add_row(one.name, one.paper, one.what, minutes)
    console.print(table)


def markdown(results: Iterable[Result]) -> str:
    """Return the tables in Markdown."""
    return "\n".join(_markdown(result) for result in results)


def _markdown(result: Result) -> str:
    lines = [f"### {result.name}", "", title(result) + ".", ""]
    lines += [f"| {' | '.join(HEADER)} |", "|---|---|---:|---:|---:|"]
    lines += [f"| {' | '.join(cells(row))} |" for row in result.rows]
    lines += ["", *(f"- {whose}: {note}" for whose, note in notes(result.rows))]
    lines += [f"- {CAPTION}", f"- {_origin(result)}", ""]
    return "\n".join(lines)


def _origin(result: Result) -> str:
    made = ", ".join(f"{name} {value}" for name, value in result.versions.items())
    return f"{result.command}: {result.minutes:g} minutes; {made}"
