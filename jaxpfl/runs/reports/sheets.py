"""Tables of the terminal as tables of a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpfl.runs.reports.page import facts, folded, table, text
from jaxpfl.runs.sweep.tables import Sheet

_MOST_SHOWN = 40


def of_rich(given: Any) -> str:
    """A rich table whose columns of words stand before those of numbers, its title as a heading."""
    columns = [[str(cell) for cell in column.cells] for column in given.columns]
    header = [str(column.header) for column in given.columns]
    words = sum(column.justify != "right" for column in given.columns)
    rows = list(zip(*columns, strict=True))
    title = f"<h3>{text(given.title)}</h3>" if given.title else ""
    return title + table(header, rows, caption=str(given.caption or ""), words=words)


def of_sheet(given: Sheet) -> str:
    """A sheet of a sweep; a long one is folded."""
    shown = table(given.header, given.rows, caption=given.note, words=given.words, bold=given.bold)
    return shown if len(given.rows) <= _MOST_SHOWN else folded(f"{len(given.rows)} rows", shown)


def of_json(name: str, value: Any) -> str:
    """A part of a study's results: numbers by name, or a table where several names have the same numbers."""
    if not isinstance(value, Mapping):
        return facts({_plain(name): _word(value)}) if not isinstance(value, list) or not _nested(value) else ""
    heading = f"<h3>{text(_plain(name))}</h3>"
    inner = [one for one in value.values() if isinstance(one, Mapping)]
    if inner and len(inner) == len(value) and not any(_nested(one.values()) for one in inner):
        columns = list(dict.fromkeys(column for one in inner for column in one))
        rows = [
            (_plain(key), *("-" if one.get(column) is None else _word(one[column]) for column in columns))
            for key, one in value.items()
        ]
        return heading + table([_plain(name), *map(_plain, columns)], rows)
    flat = {_plain(key): _word(one) for key, one in value.items() if not _nested([one])}
    deeper = "".join(of_json(key, one) for key, one in value.items() if isinstance(one, Mapping))
    return (heading + facts(flat) if flat else heading if deeper else "") + deeper


def _nested(values: Any) -> bool:
    return any(isinstance(one, Mapping) or (isinstance(one, list) and _nested(one)) for one in values)


def _plain(name: str) -> str:
    return str(name).replace("_", " ")


def _word(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "-" if value is None else "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, list):
        shown = ", ".join(_word(one) for one in value[:20])
        return shown + f", ... ({len(value)})" * (len(value) > 20)
    return str(value)
