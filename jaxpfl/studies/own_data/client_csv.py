"""The user's own clients from a CSV file, and a description of how it was read."""

from __future__ import annotations

import csv
import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.data.sources import csv_text
from jaxpfl.data.sources.csv_text import Table
from jaxpfl.errors import JaxpflError, printable, shown
from jaxpfl.studies.own_data import csv_columns, csv_doubts
from jaxpfl.studies.own_data.csv_columns import Column, Columns, CsvLayout

_SHOWN = 6
"""Largest number of the first client's samples, columns, or left-out clients that are shown."""


class Clients(NamedTuple):
    """Clients of a file.

    Attributes:
      names: [m].
      samples: a list of arrays [n_i, d], or [n_i] where a sample is one number.
      columns: names of a sample's d numbers; ``["value"]`` of a wide file.
      understood: how the file was read, as JSON; see `told`.
    """

    names: list[str]
    samples: list[np.ndarray]
    columns: list[str]
    understood: dict[str, Any]


def read(path: Path, given: CsvLayout | None = None) -> Clients:
    """Read clients from a CSV file.

    A long file has a row for each sample: a column names the client, another one (or several: samples of d numbers)
    has the value; a client's rows need not stand together. A wide file has a row for each client, and in it the
    client's samples, one number each. Separator, decimal mark, header, layout and columns are found in the file where
    only one reading is possible, and what is given wins. Cells that are empty, lacking, or say NA, NaN, null or none
    hold no sample: the client has one less (of several numbers, the whole sample is left out), and clients without any
    are left out.

    Raises:
      JaxpflError: a file that cannot be read, that can be read in two ways (with the flags that choose one), a cell
        that is no finite number (with its line), or no clients.
    """
    given = given or CsvLayout()
    table = csv_text.read(path, given.sep, given.decimal)
    if not table.rows:
        raise JaxpflError(f"{path}: no clients in it")
    columns = csv_columns.decide(table, given)
    _refuse_one_name(path, columns)
    lines = [line for line, _ in table.rows[columns.header :]]
    values = [_numbers(table, column, lines, columns.header) for column in columns.values]
    names = _names(table, columns, lines)
    if columns.id is not None:
        csv_doubts.refuse_summary_rows(path, lines, names)
        if given.id is None:
            csv_doubts.refuse_one_number(path, columns.id, lines)
    _warn_of_codes(path, columns, values)
    found: dict[str, list[Any]] = {name: [] for name in names}
    missing = 0
    for i, name in enumerate(names):
        row = [column[i] for column in values]
        missing += sum(map(math.isnan, row))
        if not columns.long:
            found[name] += [x for x in row if not math.isnan(x)]
        elif not any(map(math.isnan, row)):
            found[name].append(row[0] if len(row) == 1 else row)
    samples = {name: np.array(own) for name, own in found.items() if own}
    if not samples:
        raise JaxpflError(f"{path}: no client has a sample")
    without = [name for name in found if name not in samples]
    entries = [_called(column, columns.header) for column in columns.values] if columns.long else ["value"]
    understood = _understood(table, columns, samples, missing, without)
    return Clients(list(samples), list(samples.values()), entries, understood)


def told(understood: dict[str, Any]) -> list[str]:
    """Description of how a file was read, in a few lines."""
    of, first = understood["samples"], understood["first"]
    layout = "long, a row for each sample" if understood["layout"] == "long" else "wide, a row for each client"
    marks = f"separator {understood['separator']}, decimal {understood['decimal']}"
    lines = [
        f"read as: {layout}; {'a' if understood['header'] else 'no'} header; {marks}",
        f"clients: {printable(understood['id'] or 'a number for each row')}; samples: {_list(understood['values'])}",
    ]
    if understood["ignored"]:
        lines[1] += f"; not used: {_list(understood['ignored'])}"
    sizes = f"{of['min']}" if of["min"] == of["max"] else f"{of['min']} to {of['max']} (median {of['median']:g})"
    numbers = ", ".join(_sample(x) for x in first["samples"])
    more = ", ..." if first["size"] > len(first["samples"]) else ""
    lines.append(
        f"{understood['clients']} clients of {sizes} samples; the first, {printable(first['client'])}: {numbers}{more}"
    )
    if understood["missing"]:
        lines.append(f"cells without a number, left out: {understood['missing']}")
    if understood["without_samples"]:
        left = understood["without_samples"]
        lines.append(f"clients without a sample, left out: {len(left)} ({_list(left)})")
    return lines


def write(path: Path, columns: dict[str, list]) -> None:
    """Write columns of the same length under their names."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def _understood(
    table: Table, columns: Columns, samples: dict[str, np.ndarray], missing: int, without: list[str]
) -> dict[str, Any]:
    sizes = np.array([len(own) for own in samples.values()])
    name, own = next(iter(samples.items()))
    return {
        "layout": "long" if columns.long else "wide",
        "header": columns.header,
        "separator": table.separator,
        "decimal": table.decimal,
        "id": None if columns.id is None else _called(columns.id, columns.header),
        "values": [_called(column, columns.header) for column in columns.values],
        "ignored": [_called(column, columns.header) for column in columns.ignored],
        "missing": missing,
        "without_samples": without,
        "clients": len(samples),
        "samples": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
        "first": {"client": name, "size": len(own), "samples": own[:_SHOWN].tolist()},
    }


def _refuse_one_name(path: Path, columns: Columns) -> None:
    """Refuse several value columns that a result could not tell apart."""
    name, count = Counter(_called(c, columns.header) for c in columns.values).most_common(1)[0]
    if columns.long and count > 1:
        ways = [f"--value @{c.place + 1}" for c in columns.values if c.name == name]
        raise JaxpflError(
            f"{path}: {count} columns of values are called {shown(name)}: rename them, or give {', or '.join(ways[:4])}"
        )


def _warn_of_codes(path: Path, columns: Columns, values: list[list[float]]) -> None:
    """Warn of numbers that seem to stand for missing values, of each quantity by itself."""
    together = values if columns.long else [list(itertools.chain(*values))]
    for column, own in zip(columns.values, together, strict=False):
        where = f" of column {printable(_called(column, columns.header))}" if columns.long and len(values) > 1 else ""
        csv_doubts.warn_of_codes(path, [x for x in own if not math.isnan(x)], where)


def _names(table: Table, columns: Columns, lines: list[int]) -> list[str]:
    """Client of each row."""
    if columns.id is None:
        return [str(place) for place in range(len(lines))]
    seen: dict[str, int] = {}
    for line, name in zip(lines, columns.id.cells, strict=True):
        if csv_text.is_missing(name):
            raise JaxpflError(f"{table.path} line {line}: no client's name, got {shown(name)}")
        if name in seen and not columns.long:
            what = "a wide file has a row for each client, a long one needs --long"
            raise JaxpflError(f"{table.path} line {line}: client {shown(name)} is in line {seen[name]} too: {what}")
        seen.setdefault(name, line)
    return columns.id.cells


def _numbers(table: Table, column: Column, lines: list[int], header: bool) -> list[float]:
    """Numbers of a column; NaN where a cell has none."""
    found = []
    for line, cell, number in zip(lines, column.cells, column.numbers, strict=True):
        if number is None and not csv_text.is_missing(cell):
            hint = ": give --header yes if it is a column's name" if line == lines[0] and not header else ""
            mark = "" if table.decimal == "point" else " with a decimal comma"
            raise JaxpflError(f"{table.path} line {line}: {cell[:40]!r} is no finite number{mark}{hint}")
        found.append(math.nan if number is None else number)
    return found


def _called(column: Column, header: bool) -> str:
    return column.name if header and column.name else f"column {column.place + 1}"


def _list(names: list[str]) -> str:
    names = [*map(printable, names)]
    if len(names) <= _SHOWN:
        return ", ".join(names)
    return f"{names[0]}, {names[1]}, ... {names[-1]} ({len(names)})"


def _sample(x: Any) -> str:
    return f"({', '.join(f'{entry:g}' for entry in x)})" if isinstance(x, list) else f"{x:g}"
