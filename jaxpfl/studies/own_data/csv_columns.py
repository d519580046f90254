"""Columns that name clients and that hold their samples, detected by clear signs or refused with the flags to give."""

from __future__ import annotations

import csv
import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxpfl.data.sources.csv_text import Decimal, Separator, Table
from jaxpfl.errors import JaxpflError, shown, unknown_name
from jaxpfl.studies.own_data import csv_doubts
from jaxpfl.studies.own_data.csv_header import (
    Column,
    columns_of,
    has_header,
    is_name,
    is_nameless,
    is_of_samples,
    is_row_number,
    series_of,
)

NO_ID = "none"


@dataclass(frozen=True)
class CsvLayout:
    """Layout of a CSV file; everything is detected unless given."""

    id: str | None = None
    """Column of --csv that names the clients, by its name or place (@1 is the first); none: each row is a client."""
    value: str | None = None
    """Columns of --csv with the samples: NAME,NAME or FIRST..LAST, by names or places."""
    long: bool = False
    """Each row of --csv is one sample, of as many numbers as --value has columns."""
    wide: bool = False
    """Each row of --csv is a client, each number in it a sample."""
    header: Literal["yes", "no"] | None = None
    """The first row of --csv names the columns, yes or no; detected unless given."""
    sep: Separator | None = None
    """Separator of the cells of --csv."""
    decimal: Decimal | None = None
    """The decimal mark in the numbers of --csv."""

    def check(self) -> None:
        """Check that there is one layout.

        Raises:
          JaxpflError.
        """
        if self.long and self.wide:
            raise JaxpflError("long and wide are two layouts: give one of them")
        if self.long and self.id == NO_ID:
            raise JaxpflError("long needs a column that names the clients, got id none")


class Columns(NamedTuple):
    """Roles of the columns.

    Attributes:
      header: whether the first row is one.
      id: whose cells name the clients; None where each row is a client.
      values: with the samples.
      ignored: neither.
      long: whether a row is a sample, not a client.
    """

    header: bool
    id: Column | None
    values: list[Column]
    ignored: list[Column]
    long: bool


def decide(table: Table, given: CsvLayout) -> Columns:
    """Detect the header, the clients' column, the samples' columns and the layout.

    Raises:
      JaxpflError: if the layout is ambiguous, with the flags that decide; for flags without a matching column.
    """
    given.check()
    header = has_header(table) if given.header is None else given.header == "yes"
    columns = columns_of(table, header)
    values = None if given.value is None else _several(table, columns, given.value)
    chosen = [] if given.id in (None, NO_ID) else [_one(table, columns, given.id, "id")]
    numeric = [c for c in values or columns if c not in chosen and not (header and is_name(c.name))]
    csv_doubts.refuse_thousands(table, numeric, table.rows[header:])
    if given.id is None:
        own = _find_id(table, columns, values, header)
    else:
        own = None if given.id == NO_ID and not _named(columns, NO_ID) else _one(table, columns, given.id, "id")
    if values is None:
        numbered = header and len(columns) > 2 and series_of(columns)[:1] != columns[:1]
        values = [c for c in columns if c is not own and not (numbered and is_row_number(c))]
        if not values:
            raise JaxpflError(f"{table.path}: no column of numbers beside the one that names the clients")
        text = [c for c in values if c.is_text]
        numeric = [c for c in values if not c.is_text]
        if text and not numeric:
            raise JaxpflError(f"{table.path}: no column of numbers beside {label(text[0], header)}")
        if text:
            given_id = NO_ID if own is None else own.flag
            raise JaxpflError(
                f"{table.path}: column {label(text[0], header)} holds text, not samples: give --id {given_id} --value "
                f"{_flags(csv_doubts.samples_among(numeric) or numeric)}"
            )
    elif own is not None and own in values:
        raise JaxpflError(f"{table.path}: column {label(own, header)} cannot be both id and value")
    ignored = [c for c in columns if c is not own and c not in values]
    long = _is_long(table, own, values, given, header)
    if header and not long:
        csv_doubts.refuse_second_header(table, own, values)
    if header and long and own is not None and given.id is None:
        csv_doubts.refuse_samples_for_clients(table, own)
    if header and given.value is None:
        csv_doubts.refuse_copies(table, values, long=long)
    if header and long and own is not None and given.value is None and len(values) == 1:
        csv_doubts.refuse_computed(table, own, values[0])
    if header and not long and not given.wide:
        csv_doubts.refuse_pivot(table, own, values)
        csv_doubts.refuse_transposed(table, own, values)
    return Columns(header, own, values, ignored, long)


def label(column: Column, header: bool) -> str:
    """Name of a column in messages."""
    return shown(column.name) if header and column.name else f"number {column.place + 1}"


def _find_id(table: Table, columns: list[Column], values: list[Column] | None, header: bool) -> Column | None:
    """The one column that can name the clients; None if there is clearly none."""
    pool = [c for c in columns if values is None or c not in values]
    if not pool:
        return None
    if not header:
        return _find_nameless_id(table, pool, values)
    made = [c for c in pool if not is_row_number(c) and not is_nameless(c.name)]
    if values is None and made and csv_doubts.is_machine_made(made):
        own = _find_nameless_id(table, made, values)
        if own is not None:
            return own
    series = series_of(pool) if values is None else []
    found = [c for c in pool if c.is_text or is_name(c.name) or is_nameless(c.name)]
    if series or (values is not None and not found):  # what is clearly no sample is an id, too
        found = [c for c in pool if c in found or not (c in series or csv_doubts.is_statistic(c.name))]
    if len(found) > 1:  # beside another one, numbers of rows name no client
        found = [c for c in found if not is_row_number(c)] or found
    if not found and len(series) == len(pool) > 1:
        return None
    clear = len(found) == 1 and (found[0].is_text or found[0].is_whole)
    if clear and values is None and not found[0].is_text and not series and not is_name(found[0].name):
        clear = False  # a column without a name, beside columns that are no series: the id may be one of those
    if clear:
        return found[0]
    whole = [c for c in columns if (c.is_text or c.is_whole) and (values is None or c not in values)]
    ids = [c for c in (found if len(found) > 1 else whole) if c in whole and not is_row_number(c)]
    ids = [c for c in ids if c.is_text or c not in series]
    ids = [c for c in ids if not is_of_samples(c.name) and not csv_doubts.is_statistic(c.name)] or ids
    ways = []
    for c in ids[:4]:
        rest = values or csv_doubts.samples_among([v for v in columns if v is not c])
        rest = [v for v in rest if v not in ids] or rest
        ways += [f"--id {c.flag} --value {_flags(rest)}"] if rest else []
    samples = csv_doubts.samples_among(columns)
    if values is None and len(samples) == len(columns):
        ways.append(f"--id {NO_ID} --wide")
    elif values is None and len(samples) > 1 and not ids:
        ways.append(f"--id {NO_ID} --wide --value {_flags(samples)}")
    if len(columns) == 1:
        raise JaxpflError(f"{table.path}: one column alone: no column names the clients")
    what = f"{' and '.join(label(c, header) for c in found[:3])} could" if len(found) > 1 else "no column is sure to"
    if not ways:
        raise JaxpflError(f"{table.path}: {what} name the clients, or no other one holds numbers")
    raise JaxpflError(f"{table.path}: {what} name the clients: {_give(ways)}")


def _find_nameless_id(table: Table, pool: list[Column], values: list[Column] | None) -> Column | None:
    text = [c for c in pool if c.is_text]
    if len(text) == 1:
        return text[0]
    rest = [c for c in pool if not c.is_text] if values is None else values
    if text and not rest:
        raise JaxpflError(f"{table.path}: no column of numbers")
    if text:
        ways = [f"--id {c.flag} --value {_flags(rest)}" for c in text[:4]]
        raise JaxpflError(f"{table.path}: {len(text)} columns hold text, each could name the clients: {_give(ways)}")
    whole = [c for c in pool if c.is_whole and c in (pool[0], pool[-1])]  # names stand at an end
    if not whole:
        return None
    bits = all(x in (0, 1, None) for c in pool for x in c.numbers)
    first = whole[0].numbers
    if bits and len(pool) > 2 and len(set(first)) < len(first):
        return None  # zeros and ones throughout are samples: as names they would be of two clients
    if all(c.is_whole for c in pool):
        whole = whole[:1]
    ways = [f"--id {c.flag}" + ("" if values is None else f" --value {_flags(values)}") for c in whole[:4]]
    ways += [f"--id {NO_ID}"]
    raise JaxpflError(
        f"{table.path}: whole numbers in column {_flags(whole)} could name the clients or be samples: {_give(ways)}"
    )


def _is_long(table: Table, own: Column | None, values: list[Column], given: CsvLayout, header: bool) -> bool:
    """True if rows are samples; refuses ambiguous files."""
    if given.long or given.wide:
        if given.long and own is None:
            raise JaxpflError(f"{table.path}: --long needs a column that names the clients: give --id COLUMN")
        return given.long
    if own is None:
        return False
    if len(values) == 1:
        return True
    name, count = Counter(own.cells).most_common(1)[0]
    names = f"{label(values[0], header)} to {label(values[-1], header)}"
    samples = csv_doubts.samples_among(values) if header and given.value is None else values
    series = series_of(values)
    if count == 1:
        if not header or given.value is not None or len(series) == len(values):
            return False
        ways = f"--value {_flags(series)} --wide" if series and len(samples) < len(values) else "--wide"
        if len(samples) < len(values) and not series:
            ways = f"--value {_flags(samples)} --wide" if len(samples) > 1 else ""
        raise JaxpflError(
            f"{table.path}: columns {names} do not look like samples of one quantity, and each client has one row"
            + (f": give {ways} if they are" if ways else "")
        )
    same = all(c.name.lower().startswith("value") for c in values) and len(samples) == len(values)
    if given.value is not None or (header and same):
        return True
    ways = ["--long" + (f" --id {own.flag}" if given.id else "")] if len(samples) == len(values) else []
    ways += [f"--id {own.flag} --value {c.flag}" for c in (samples or values)[:4]]
    raise JaxpflError(
        f"{table.path}: client {shown(name)} has {count} rows of {len(values)} numbers ({names}): {_give(ways)}"
    )


def _named(columns: list[Column], name: str) -> list[Column]:
    return [c for c in columns if c.name == name] or [c for c in columns if c.name.lower() == name.lower() and name]


def _one(table: Table, columns: list[Column], text: str, flag: str) -> Column:
    """The column of that name or place."""
    named = _named(columns, text)
    place = re.fullmatch(r"@?(\d{1,9})", text, re.ASCII)
    if not named and place:
        named = [c for c in columns if c.place + 1 == int(place[1])]
    if len(named) > 1:
        places = " or ".join(f"@{c.place + 1}" for c in named)
        raise JaxpflError(
            f"{table.path}: {flag}: {len(named)} columns are called {shown(text)}: give their place, {places}"
        )
    if not named:
        if place or not any(c.name for c in columns):
            raise JaxpflError(
                f"{table.path}: {flag} must be a column's name or @1 to @{len(columns)}, got {shown(text)}"
            )
        raise unknown_name(f"column of {table.path}", text, [c.name for c in columns])
    return named[0]


def _several(table: Table, columns: list[Column], text: str) -> list[Column]:
    found: list[Column] = []
    for part in next(csv.reader([text], skipinitialspace=True), []):
        first, dots, last = part.partition("..")
        ends = [part] if not dots or _named(columns, part) else [first, last]
        places = [_one(table, columns, end, "value").place for end in ends]
        found += [c for c in columns if places[0] <= c.place <= places[-1] and c not in found]
    if not found:
        raise JaxpflError(f"{table.path}: value must name at least one column, got {shown(text)}")
    return found


_NAMED = 12
"""Largest number of columns that a suggestion lists one by one."""


def _flags(columns: list[Column]) -> str:
    places = [c.place for c in columns]
    if len(columns) > 2 and places == list(range(places[0], places[0] + len(places))):
        return f"{columns[0].flag}..{columns[-1].flag}"
    if len(columns) > _NAMED:  # a line has to stay one that is read
        return ",".join(c.flag for c in columns[:2]) + f",... ({len(columns)} columns)"
    return ",".join(c.flag for c in columns)


def _give(ways: list[str]) -> str:
    return f"give {', or '.join(ways)}"
