"""Signs that a file does not match its layout: statistics for samples, several headers, clients in columns."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from jaxpfl.data.sources import csv_text
from jaxpfl.data.sources.csv_text import Table
from jaxpfl.errors import JaxpflError, shown, warn
from jaxpfl.studies.own_data.csv_header import (
    Column,
    counts_up,
    is_name,
    is_nameless,
    is_of_samples,
    is_row_number,
    names_clients,
    series_of,
)

_STATISTICS = {
    *("total", "totals", "sum", "subtotal", "mean", "average", "avg", "median", "min", "max", "sd", "std", "stdev"),
    *("stddev", "se", "stderr", "sem", "var", "variance", "n", "count", "weight", "weights", "err", "error", "ci"),
    *("lower", "upper", "low", "high", "lo", "hi", "lcl", "ucl", "moe"),
    *("summe", "gesamt", "mittelwert", "mittel", "anzahl"),
}
"""Words for statistics of samples and their counts."""
_ROWS = {
    *("total", "totals", "sum", "subtotal", "mean", "average", "avg", "median", "sd", "std", "stdev"),
    *("stddev", "variance", "n", "count", "weight", "weights", "summe", "gesamt", "mittelwert", "mittel", "anzahl"),
    *("overall", "all clients", "source", "quelle", "note", "notes"),
}
"""Words for a row that summarises the clients; Max may be a client."""
_COMPUTED = _ROWS - {"n", "count", "weight", "weights", "note", "notes", "source", "quelle", "overall", "all clients"}
"""Words for what is computed of samples, and hardly ever is one."""
_CODES = frozenset(sign * (10**digits - 1) for digits in range(2, 7) for sign in (-1, 1))
"""Numbers that stand for a missing value in many files: -99, 999, -9999, ..."""
_FAR = 5.0
"""Spans of the other numbers that lie between them and such a code."""
_MADE = re.compile(r"(v|var|column|col|spalte|x|c|f|field|feature|)[_. ]?(\d{1,6})", re.ASCII | re.IGNORECASE)


def is_statistic(name: str) -> bool:
    """True if a column's name indicates a statistic of samples: mean, value_se, sd.x."""
    words = re.split(r"[_. ]", name.lower())
    return words[0] in _STATISTICS or words[-1] in _STATISTICS


def is_machine_made(columns: list[Column]) -> bool:
    """True if all names are defaults of R, Excel or pandas: V1, V2; Column1; x0; 0, 1."""
    found = [_MADE.fullmatch(c.name) for c in columns]
    places = [int(match[2]) for match in found if match]
    stems = {match[1].lower() for match in found if match}
    first = places[0] if places else 0
    in_turn = places == [*range(first, first + len(columns))]
    return in_turn and len(stems) == 1 and first <= 2


def refuse_thousands(table: Table, columns: list[Column], body: list[tuple[int, list[str]]]) -> None:
    """Refuse columns with thousands marks in their numbers.

    Raises:
      JaxpflError: the first such cell.
    """
    for column in columns:
        for (line, _), cell, number in zip(body, column.cells, column.numbers, strict=True):
            if number is None and csv_text.has_thousands(cell):
                raise JaxpflError(
                    f"{table.path} line {line}: {cell[:40]!r} has thousands separators: remove them, or say "
                    f"--id {column.flag} if it is a name"
                )


def refuse_second_header(table: Table, own: Column | None, values: list[Column]) -> None:
    """Refuse a pandas pivot: names above the names, and the index's name in a row by itself.

    Raises:
      JaxpflError: with the row that is not a client's.
    """
    if own is None or len(values) < 2:
        return
    for i, cell in enumerate(own.cells[:2]):
        numbers = [c.numbers[i] for c in values]
        if (is_name(cell) or is_of_samples(cell) or csv_text.is_missing(cell)) and (
            all(x is None for x in numbers) or counts_up(numbers)
        ):
            line = table.rows[i + 1][0]
            raise JaxpflError(f"{table.path} line {line}: a second row of names, {shown(cell)}: keep one header row")


def refuse_pivot(table: Table, own: Column | None, values: list[Column]) -> None:
    """Refuse columns of equal names beside one without a name.

    Raises:
      JaxpflError: the name.
    """
    name, count = Counter(c.name for c in values).most_common(1)[0]
    if count > 1 and own is not None and is_nameless(own.name):
        raise JaxpflError(
            f"{table.path}: {count} columns are called {shown(name)}, and the clients' column has no name, as in a "
            f"header of several rows: keep one, or give --id {own.flag} --wide"
        )


def refuse_transposed(table: Table, own: Column | None, values: list[Column]) -> None:
    """Refuse wide files whose names indicate clients in columns.

    Raises:
      JaxpflError: the names.
    """
    series = series_of(values)
    of_clients = bool(series) and len(series) == len(values) and names_clients(series[0].name)
    if own is not None and (is_name(own.name) or not (of_clients or is_of_samples(own.name))):
        return
    if own is None and not of_clients:
        return
    rows = shown(own.name) if own is not None and own.name else "rows"
    ways = f"--id {own.flag}" if own is not None else "--id none"
    raise JaxpflError(
        f"{table.path}: transposed, clients in columns ({shown(values[0].name)} to {shown(values[-1].name)}) and "
        f"samples in {rows}? transpose it, or give {ways} --wide"
    )


def refuse_samples_for_clients(table: Table, own: Column) -> None:
    """Refuse a column of client names that by its own name distinguishes samples.

    Raises:
      JaxpflError: the name.
    """
    if is_of_samples(own.name):
        raise JaxpflError(
            f"{table.path}: column {shown(own.name)} seems to tell samples apart, not clients: give --id {own.flag} if "
            "it names the clients"
        )


def refuse_summary_rows(path: Path, lines: list[int], names: list[str]) -> None:
    """Refuse rows of totals and means among the clients.

    Raises:
      JaxpflError: the first one.
    """
    letters = sum(len(name) == 1 for name in set(names)) > 1  # among a, b, c, ... n is a client
    for line, name in zip(lines, names, strict=True):
        word = re.sub(r"^(grand|over-?all) +", "", name.lower().rstrip(" .:"))
        source = re.match(r"(source|quelle|note)s?:", name.lower())
        if (word in _ROWS or source) and not (letters and len(word) == 1):
            raise JaxpflError(
                f"{path} line {line}: {shown(name)} seems to be a row about the clients, not a client: remove it, or "
                "rename it if it is one"
            )


def refuse_computed(table: Table, own: Column, value: Column) -> None:
    """Refuse a single column of values, a row each, whose name suggests that they were computed from samples.

    Raises:
      JaxpflError: its name.
    """
    words = re.split(r"[_. ]", value.name.lower())
    if {words[0], words[-1]} & _COMPUTED:
        raise JaxpflError(
            f"{table.path}: column {shown(value.name)} seems to be computed of samples, not samples: give --id "
            f"{own.flag} --value {value.flag} if they are samples"
        )


def refuse_copies(table: Table, values: list[Column], *, long: bool) -> None:
    """Refuse columns that shared a name before pandas renamed them (``x``, ``x.1``): in long files, or with equal
    numbers.

    Raises:
      JaxpflError: both names.
    """
    named = {c.name.lower(): c for c in values}
    for column in values:
        mangled = re.fullmatch(r"(.+)\.[1-9]\d*", column.name.lower())
        first = named.get(mangled[1]) if mangled else None
        if first is not None and (long or first.numbers == column.numbers):
            what = "seem to have had one name" if long else "hold the same numbers"
            ways = f"--value {first.flag}, or --value {first.flag},{column.flag}"
            raise JaxpflError(f"{table.path}: columns {shown(first.name)} and {shown(column.name)} {what}: give {ways}")


def refuse_one_number(path: Path, own: Column, lines: list[int]) -> None:
    """Refuse clients whose names are one number in two spellings, such as 7, 007 and 7.0.

    Raises:
      JaxpflError: the two names.
    """
    seen: dict[str, str] = {}
    for line, name in zip(lines, own.cells, strict=True):
        number = re.fullmatch(r"0*(\d+)(?:[.,]0*)?", name, re.ASCII)
        if number and seen.setdefault(number[1], name) != name:
            raise JaxpflError(
                f"{path} line {line}: clients {shown(seen[number[1]])} and {shown(name)} are one number in two ways: "
                f"write them alike, or give --id {own.flag} if they are two clients"
            )


def missing_codes(values: list[float]) -> dict[float, int]:
    """Codes for a missing value among numbers, and how often each is there: -999 or 9999, far from all others."""
    found = Counter(x for x in values if x in _CODES)
    if not found:
        return {}
    rest = [x for x in values if x not in found]
    if len(set(rest)) < 2:
        return {}
    low, high = min(rest), max(rest)
    far = _FAR * (high - low)
    return {code: times for code, times in found.items() if code < low - far or code > high + far}


def warn_of_codes(path: Path, values: list[float], where: str = "") -> None:
    """Warn of numbers that seem to stand for missing values; ``where`` names their column."""
    for code, times in missing_codes(values).items():
        what = f"{times} cells{where} say" if times > 1 else f"a cell{where} says"
        warn(
            f"{path}: {what} {code:g}, far from all others: where that is a code for a missing value, leave them empty"
        )


def samples_among(columns: list[Column]) -> list[Column]:
    """Columns that a refusal may suggest as samples: numbers, no statistics, no numbers of rows or samples."""
    return [
        c
        for c in columns
        if not c.is_text and not is_statistic(c.name) and not is_of_samples(c.name) and not is_row_number(c)
    ]
