"""The user's own clients from a CSV file, by the names of its columns: options of a study, and the reader."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.data.sources import csv_text
from jaxpfl.data.sources.csv_text import Decimal, Separator, Table
from jaxpfl.studies.study import Options, Results, refuse_given
from jaxpfl.support.errors import JaxpflError, printable, shown

VALUE = "value"
"""Column of samples that is taken without being asked for, in any case."""
LEVEL = 0.95
"""Level of intervals, unless another is asked for."""
_SHOWN = 6
"""Largest number of the first client's samples that are shown."""
_LEAST, _MOST = 1e-70, 1e70
"""Range of magnitudes whose fourth powers, used in tests of variances, fit in double precision."""


@dataclass(frozen=True)
class CsvTable(Options):
    """Marks of a CSV file, and the column of its clients."""

    client: str | None = None
    """Column of --csv that names the clients; one called client or id is taken unless given."""
    sep: Separator | None = None
    """Separator of the cells of --csv, detected from its header unless given."""
    decimal: Decimal | None = None
    """Decimal mark of the numbers of --csv, detected unless given."""
    encoding: str | None = None
    """Encoding of --csv, such as latin-1; UTF-8 unless given."""
    missing_words: str | None = None
    """Words of --csv for missing values, with commas between them; NA, N/A, NaN, null and none unless given."""


@dataclass(frozen=True)
class CsvLayout(CsvTable):
    """Columns of a CSV file with samples."""

    value: str | None = None
    """Columns of --csv with the samples, a row for each: NAME, or NAME,NAME for samples of several numbers; one called
    value is taken unless given."""
    values: str | None = None
    """Columns of --csv with the samples of the client of each row: NAME,NAME or FIRST..LAST."""


@dataclass(frozen=True)
class OwnFile(CsvLayout):
    """A CSV file of clients instead of simulated ones."""

    csv: Path | None = None
    """Clients of your own, by the names of its columns: --client, and --value or --values."""


@dataclass(frozen=True)
class OwnClients(OwnFile):
    """A CSV file of clients, whose estimates have intervals."""

    level: float = LEVEL
    """Level of the intervals of clients of your own."""


def own_or_simulated(name: str, simulated: Callable[[Any], Results]) -> Callable[[Any, Any], Results]:
    """Results of a study on the clients of a file where its options name one, else on simulated clients.

    Args:
      name: of the study, and of its module in `own_data`.
      simulated: ``settings -> Results``.

    Raises:
      JaxpflError: by the results, for an option that is not at its default without a file.
    """

    def results(given: Any, options: Any) -> Results:
        if options.csv is not None:
            own = importlib.import_module(f"jaxpfl.studies.own_data.{name}")
            return own.results(options.csv, given, options)
        refuse_given(options, [field.name for field in fields(options)], "requires --csv")
        return simulated(given)

    return results


class Clients(NamedTuple):
    """Clients of a file.

    Attributes:
      names: [m].
      samples: a list of arrays [n_i, d], or [n_i] where a sample is one number.
      columns: names of a sample's d numbers; ``["value"]`` for a row of samples.
      understood: how the file was read, as JSON.
    """

    names: list[str]
    samples: list[np.ndarray]
    columns: list[str]
    understood: dict[str, Any]


def read(path: Path, given: CsvLayout | None = None) -> Clients:
    """Read clients and their samples from a CSV file.

    A long file has a row for each sample: one column names the client, ``value`` (one or several columns: samples of d
    numbers) has the sample; a client's rows need not stand together. A wide file has a row for each client, and its
    samples in the columns ``values``. Cells that are empty, lacking, or a word for missing values hold no sample: the
    client has one less (of several numbers, the whole sample is left out), and clients without any are left out.

    Raises:
      JaxpflError: a file that cannot be read, clients or samples of which no column is named (with what to write), a
        cell that is no finite number (with its line), a client that is the sum of all others, or no clients.
    """
    given = given or CsvLayout()
    if given.value is not None and given.values is not None:
        raise JaxpflError("value is of a row for each sample, values of a row for each client: give one of them")
    table = csv_text.read(path, given.sep, given.decimal, given.encoding, given.missing_words)
    long = given.values is None
    chosen = given.value if long else given.values
    chosen = VALUE if chosen is None and VALUE in map(str.lower, table.names) else chosen
    if chosen is None:
        raise _unnamed(table, given.client)
    values = _several(table, chosen)
    own = table.clients(given.client, values)
    if own in values:
        raise JaxpflError(f"{path}: column {shown(own)} cannot be both the client and a value")
    names = table.texts(own) if long else distinct_clients(table, own)
    numbers = np.stack([table.numbers(name, missing=True) for name in values], axis=1)
    lacking = np.isnan(numbers)
    rows: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for name, row, gap in zip(names, numbers, lacking, strict=True):
        if not long:
            rows[name] = [row[~gap]]
        elif not gap.any():
            rows[name].append(row[:1] if len(values) == 1 else row[None])
    samples = {name: np.concatenate(own) for name, own in rows.items() if own and own[0].size}
    if not samples:
        raise JaxpflError(f"{path}: no client has a sample")
    if len(set(map(len, samples.values()))) == 1 and not np.isin(numbers[~lacking], (0, 1)).all():
        refuse_sum(path, list(samples), np.stack([each.ravel() for each in samples.values()]))
    sizes = np.array([len(each) for each in samples.values()])
    first, shown_first = next(iter(samples.items()))
    understood = {
        "layout": "long" if long else "wide",
        "separator": table.separator,
        "decimal": table.decimal,
        "client": own,
        "values": values,
        "ignored": [name for name in table.names if name != own and name not in values],
        "missing": int(lacking.sum()),
        "without_samples": [name for name in rows if name not in samples],
        "clients": len(samples),
        "samples": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
        "first": {"client": first, "size": len(shown_first), "samples": shown_first[:_SHOWN].tolist()},
    }
    return Clients(list(samples), list(samples.values()), values if long else [VALUE], understood)


def distinct_clients(table: Table, column: str) -> list[str]:
    """Names of the clients of a table with a row for each.

    Raises:
      JaxpflError: for an empty name, or one twice, with the line.
    """
    seen: dict[str, int] = {}
    for line, name in zip(table.lines, table.texts(column), strict=True):
        if name in seen:
            raise JaxpflError(f"{table.path} line {line}: client {shown(name)} is in line {seen[name]} too")
        seen[name] = line
    return list(seen)


def refuse_sum(path: Path, names: Sequence[str], numbers: np.ndarray) -> None:
    """Refuse a client whose numbers [k] are the sums of all others', a row of totals among the clients [m, k].

    Raises:
      JaxpflError: the first one.
    """
    apart = np.abs(2 * numbers - numbers.sum(axis=0)) <= 1e-12 * np.abs(numbers).sum(axis=0)
    same = np.flatnonzero(apart.all(axis=1) & numbers.any(axis=1))
    if len(names) > 2 and len(same):
        raise JaxpflError(f"{path}: client {shown(names[same[0]])} is the sum of all others: remove that row")


def check_squares(path: Path, columns: list[str], samples: list[np.ndarray]) -> None:
    """Refuse columns [d] of samples whose squares would overflow or underflow in double precision.

    Raises:
      JaxpflError: the column, its largest number, and the range.
    """
    for column, values in zip(columns, _by_column(samples), strict=True):
        largest = float(np.abs(values).max())
        if largest and not _LEAST <= largest <= _MOST:
            raise JaxpflError(
                f"{path}: {printable(column)} must be of a size between {_LEAST:g} and {_MOST:g}, got {largest:g}: "
                "take another unit, squares of these cannot be computed"
            )


def alike(columns: list[str], samples: list[np.ndarray]) -> list[str]:
    """A line for each column of equal numbers."""
    one = len(columns) == 1
    return [
        f"every sample {'of the file' if one else 'in column ' + printable(column)} is {values[0]:g}"
        for column, values in zip(columns, _by_column(samples), strict=True)
        if not np.ptp(values)
    ]


def _unnamed(table: Table, client: str | None) -> JaxpflError:
    """The error for a table of which no column of samples is named, with what to write."""
    rest = [name for name in table.names if name != client]
    own = next((name for name in rest if name.lower() in csv_text.CLIENT_NAMES), None) if client is None else client
    rest = [name for name in rest if name != own]
    flag = "" if own is not None else "--client COLUMN "
    if own is None and len(rest) == 2:
        flag = f"--client {shlex.quote(rest.pop(0))} "
    ways = f"{flag}--value {shlex.quote(rest[0]) if len(rest) == 1 else 'COLUMN[,COLUMN]'} (a row for each sample)"
    if len(rest) > 1:
        ends = f"{rest[0]}..{rest[-1]}" if own is not None else "FIRST..LAST"
        ways += f", or {flag}--values {shlex.quote(ends)} (a row for each client)"
    return JaxpflError(f"{table.path}: no column is called value, of {table.listed}: write {ways}")


def _several(table: Table, text: str) -> list[str]:
    """Columns by a list of names and ranges; the name of a single column may hold commas and points."""
    found: list[str] = []
    for part in [text] if text in table.names else text.split(","):
        first, dots, last = part.strip().partition("..")
        ends = [part.strip()] if not dots or part.strip() in table.names else [first, last]
        places = [table.names.index(table.find(end)) for end in ends]
        found += [name for name in table.names[places[0] : places[-1] + 1] if name not in found]
    if not found:
        raise JaxpflError(f"{table.path}: no column in {shown(text)}: the first of a range stands before its last")
    return found


def _by_column(samples: list[np.ndarray]) -> np.ndarray:
    """Samples of all clients by column, [d, N]."""
    return np.concatenate([own.reshape(len(own), -1) for own in samples]).T
