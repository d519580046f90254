"""Columns of a table: their names, if the first row has any, and their appearance."""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from jaxpfl.data.sources import csv_text
from jaxpfl.data.sources.csv_text import Table
from jaxpfl.errors import JaxpflError

_NAMES = {
    *("client", "clients", "id", "ids", "name", "user", "subject", "patient", "participant", "person", "respondent"),
    *("customer", "student", "device", "sensor", "hospital", "clinic", "school", "county", "city", "country", "region"),
    *("household", "station", "writer"),
}
"""Words for the owner of a row, like names that end in id."""
_MANY = {*_NAMES, "subj", "ward", "site", "center", "centre", "klinik", "store", "shop", "plant", "pupil", "farm"} - {
    *("id", "ids", "name", "clients")
}
"""Words that, with a number, name one of many clients."""
_OF_SAMPLES = {
    *("sample", "samples", "time", "timepoint", "visit", "rep", "replicate", "repetition", "obs", "observation", "day"),
    *("trial", "measurement", "week", "month", "date", "hour", "round", "wave", "draw"),
}
"""Words that number a client's samples."""
_HEAD = 1_000
"""Number of rows from which a header is detected."""
_LONGEST = 60
"""Characters of a name that a flag repeats."""
_ROW_NUMBERS = ("", "unnamed: 0", "index", "row", "rownames", "x")


class Column(NamedTuple):
    """A column of a table.

    Attributes:
      name: in the header, "" without one.
      place: from 0.
      cells, numbers: below the header, [rows] each; None where a cell has no number.
      flag: its name in a flag, its place if the name is not unique.
      is_text: most of its cells that are not empty hold no number.
      is_whole: every cell holds a whole number.
    """

    name: str
    place: int
    cells: list[str]
    numbers: list[float | None]
    flag: str
    is_text: bool
    is_whole: bool


def has_header(table: Table) -> bool:
    """True if the first row names the columns; refuses a first row of numbers that may be names."""
    first, body = table.rows[0][1], [row for _, row in table.rows[1:_HEAD]]
    numbers = [table.number(cell) for cell in first]
    if not body:
        return all(x is None for x in numbers)
    if _lacks_a_name(table):
        return True
    columns = [_column(table, "", j, body) for j in range(max(map(len, body)))]
    named = [
        not csv_text.is_missing(cell) and x is None and j < len(columns) and not columns[j].is_text
        for j, (cell, x) in enumerate(zip(first, numbers, strict=True))
    ]
    fractions = any(x is not None and not x.is_integer() for x in numbers)
    if any(named) and not fractions:
        doubtful = any(own and _like_number(cell) for own, cell in zip(named, first, strict=True))
        if doubtful and not any(map(is_name, first)):
            raise _may_be_names(table)
        return True
    rest = numbers[1:] if numbers[0] is None else numbers
    if not _like_names(rest):
        return False
    if numbers[0] is None and not first[0] and not any(csv_text.is_missing(cell) for cell in columns[0].cells):
        return True  # else it would be the only client without a name
    counts = counts_up(rest)
    fractional = any(not c.is_whole for c in columns if not c.is_text)
    if numbers[0] is None and (is_name(first[0]) or (counts and len(rest) > 2 and fractional)):
        return True
    years = all(x is not None and 1800 <= x <= 2200 for x in rest)
    if not (fractional or years or (counts and len(rest) > 2)):
        return False
    raise _may_be_names(table)


def _may_be_names(table: Table) -> JaxpflError:
    line, first = table.rows[0]
    return JaxpflError(
        f"{table.path} line {line}: {','.join(first)[:60]!r} may be the columns' names or samples: give --header yes, "
        "or --header no"
    )


def _like_number(cell: str) -> bool:
    """True if a cell is a number with a unit, or with thousands marks."""
    return csv_text.has_thousands(cell) or bool(re.fullmatch(r"[+-]?\d[\d.,]*+ ?[a-zA-Z%€$£µ]{1,3}", cell))


def columns_of(table: Table, header: bool) -> list[Column]:
    """Columns below the first row, or including it if it is no header; missing cells are empty.

    Raises:
      JaxpflError: nothing below the header, or more cells than it has.
    """
    first = table.rows[0][1]
    body = [row for _, row in table.rows[1:]] if header else [row for _, row in table.rows]
    if not body:
        raise JaxpflError(f"{table.path}: a header, and no clients below it")
    names = ["", *first] if header and _lacks_a_name(table) else first if header else []
    width = max(len(names), *map(len, body))
    columns = [_column(table, names[j] if j < len(names) else "", j, body) for j in range(width)]
    own = Counter(c.name.lower() for c in columns)
    columns = [c._replace(flag=f"@{c.place + 1}") if own[c.name.lower()] > 1 else c for c in columns]
    columns = [c for c in columns if c.name or any(c.cells)]  # a separator at the end of lines makes an empty one
    nameless = [c for c in columns if header and not c.name and c.place >= len(names)]
    if nameless:
        line = next(line for line, row in table.rows[1:] if len(row) > len(names))
        raise JaxpflError(f"{table.path} line {line}: more cells than the header has names ({len(names)})")
    return columns


def _column(table: Table, name: str, place: int, body: Sequence[Sequence[str]]) -> Column:
    cells = [row[place] if place < len(row) else "" for row in body]
    odd = not name or ".." in name or any(mark in name for mark in ',"')
    odd |= not name.isprintable() or len(name) > _LONGEST
    flag = f"@{place + 1}" if odd else shlex.quote(name)
    numbers = [table.number(cell) for cell in cells]
    found = sum(x is not None for x in numbers)
    filled = len(cells) if found == len(cells) else sum(not csv_text.is_missing(cell) for cell in cells)
    whole = found == len(cells) and all(x.is_integer() for x in numbers if x is not None)
    return Column(name, place, cells, numbers, flag, is_text=2 * found < filled, is_whole=whole)


def _lacks_a_name(table: Table) -> bool:
    """True if the first row has one cell less than all others, as in R's ``write.table``, which omits the row names'
    header.
    """
    first, *body = (row for _, row in table.rows)
    return (
        bool(body)
        and {len(row) - 1 for row in body} == {len(first)}
        and (all(table.number(cell) is None for cell in first))
    )


def series_of(columns: list[Column]) -> list[Column]:
    """The largest group of two or more columns distinguished by a running number (s0, s1, ...; 2000, 2004, ...; x,
    x.1).
    """
    names = [c.name.lower() for c in columns]
    stems = []
    for name in names:
        mangled = re.fullmatch(r"(.+)\.\d+", name)  # as pandas renames columns of equal names
        stems.append(mangled[1] if mangled and mangled[1] in names else re.sub(r"\d+", "#", name))
    stem, count = Counter(stems).most_common(1)[0]
    if count < 2 or ("#" not in stem and stem not in names):
        return []
    return [c for c, own in zip(columns, stems, strict=True) if own == stem]


def is_name(name: str) -> bool:
    """True if a column of that name contains client names."""
    if is_of_samples(name):
        return False
    known = name.lower() in _NAMES or _stem(name) in _NAMES
    return known or bool(re.search(r"(?i:[_. ]id$|^id[_. ])|[a-z]I[dD]$", name))


def is_of_samples(name: str) -> bool:
    """True if a column of that name distinguishes a client's samples: sample, visit, obs_id, sampleid."""
    return name.lower() in _OF_SAMPLES or _stem(name) in _OF_SAMPLES


def names_clients(name: str) -> bool:
    """True for the name of a client with a number, client1 or clinic_0."""
    return re.sub(r"[_. -]*\d+$", "", name.lower()) in _MANY


def _stem(name: str) -> str:
    """A name that ends in id, without it."""
    return re.sub(r"[_. ]?id$", "", name.lower()) if name.lower().endswith("id") else ""


def is_nameless(name: str) -> bool:
    """True for the name that row names get: none, or pandas' word for none."""
    return name.lower() in ("", "unnamed: 0")


def is_row_number(column: Column) -> bool:
    """True for the row numbers that R and pandas write before the data."""
    return column.place == 0 and column.name.lower() in _ROW_NUMBERS and counts_up(column.numbers)


def _like_names(numbers: list[float | None]) -> bool:
    """True if two or more whole numbers rise in equal steps."""
    if len(numbers) < 2 or any(x is None or not x.is_integer() for x in numbers):
        return False
    steps = {b - a for a, b in itertools.pairwise(numbers) if a is not None and b is not None}
    return len(steps) == 1 and min(steps) > 0


def counts_up(numbers: list[float | None]) -> bool:
    """True for 0, 1, 2, ... or 1, 2, 3, ..."""
    return any(numbers == list(range(start, start + len(numbers))) for start in (0, 1))
