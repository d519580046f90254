"""One summary of each client from a CSV file: an estimate with its standard error, successes of trials, or a count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from jaxpfl.data.sources import csv_text
from jaxpfl.errors import JaxpflError, shown, unknown_name
from jaxpfl.studies.own_data import csv_doubts

Row: TypeAlias = tuple[int, list[str]]
"""A line's number, and its cells."""
Kind: TypeAlias = Literal["estimate", "successes", "count"]

PAIRS: dict[Kind, tuple[str, str]] = {
    "estimate": ("estimate", "se"),
    "successes": ("successes", "trials"),
    "count": ("count", "exposure"),
}
"""The names of the two columns of each kind."""
_CLIENT = "client"
_SAMPLES = "; a row for each sample, of which clients have several, is for: jaxpfl estimate gaussian --csv"
_UNKNOWN = {"covariate": "covariate", "groups": "column of groups", "weights": "column of weights"}
_REFUSED = {"covariate": "no covariate", "groups": "not of groups", "weights": "not of weights"}


class Summaries(NamedTuple):
    """Clients of a file.

    Attributes:
      kind: by the names of its columns.
      names: of the clients, [m]; their numbers where no column names them.
      first, second: the two columns, [m] each.
      ignored: names of the other columns.
      covariate_names: as asked for, [k].
      covariates: their columns, [m, k].
      groups: names of the clients' groups, [m]; None unless asked for.
      weights: of the clients, [m]; None unless asked for.
    """

    kind: Kind
    names: list[str]
    first: np.ndarray
    second: np.ndarray
    ignored: list[str]
    covariate_names: list[str]
    covariates: np.ndarray
    groups: list[str] | None = None
    weights: np.ndarray | None = None


def read(
    path: Path,
    covariates: Sequence[str] = (),
    *,
    groups: str | None = None,
    weights: str | None = None,
    table: csv_text.Table | None = None,
) -> Summaries:
    """Read a file with a header, of which two columns are a pair of `PAIRS`, in any order and case.

    A column ``client``, or the only one that is neither of the pair nor asked for, names the clients.

    Args:
      path: of the file.
      covariates: names of further columns of numbers, in any case.
      groups: name of a column that names each client's group.
      weights: name of a column of numbers of at least zero.
      table: the file's contents; read here unless given.

    Raises:
      JaxpflError: a file that cannot be read, without such a pair or with two of them, a covariate, groups or weights
        that are no column of their own, a name twice, a cell that is no finite number, a standard error, trials or an
        exposure that is not above zero, a weight below zero, an empty name of a group (with the line), or a client that
        is named twice.
    """
    table = csv_text.read(path) if table is None else table
    if len(table.rows) < 2:
        raise JaxpflError(f"{path}: needs a header and a row for each client below it")
    header = [cell.lower() for cell in table.rows[0][1]]
    wanted = " or ".join(",".join(pair) for pair in PAIRS.values())
    found: list[Kind] = [kind for kind, pair in PAIRS.items() if set(pair) <= set(header)]
    if len(found) != 1:
        what = "no pair of columns" if not found else "several pairs of columns"
        more = _SAMPLES if not found and _is_long(table) else ""
        raise JaxpflError(f"{path}: {what} in {shown(','.join(table.rows[0][1]))}: needs {wanted}{more}")
    pair = PAIRS[found[0]]
    wished = [name.strip().lower() for name in covariates]
    for name in wished:
        if wished.count(name) > 1:
            raise JaxpflError(f"covariates must differ, got {name} {wished.count(name)} times")
    asked = [("covariate", name) for name in wished]
    asked += [(kind, of.strip().lower()) for kind, of in (("groups", groups), ("weights", weights)) if of is not None]
    named = [name for _, name in asked]
    for kind, name in asked:
        if name not in header:
            error = unknown_name(_UNKNOWN[kind], name, set(header) - {"", *pair, _CLIENT})
            raise JaxpflError(f"{path}: {error}")
        if name in (*pair, _CLIENT):
            raise JaxpflError(f"{path}: column {name} is {_REFUSED[kind]}")
        if named.count(name) > 1:
            raise JaxpflError(f"{path}: column {name} is asked for {named.count(name)} times")
    for name in (*pair, *named, _CLIENT):
        if header.count(name) > 1:
            raise JaxpflError(f"{path}: {header.count(name)} columns are called {name}")
    others = [name for name in header if name not in (*pair, *named)]
    own = _CLIENT if _CLIENT in others else others[0] if len(others) == 1 else None
    rows = table.rows[1:]
    for line, cells in rows:
        if len(cells) > len(header):
            raise JaxpflError(f"{path} line {line}: more cells than the header has names ({len(header)})")

    def column(name: str) -> np.ndarray:
        place, values = header.index(name), []
        for line, cells in rows:
            cell = cells[place] if place < len(cells) else ""
            value = table.number(cell)
            if value is None:
                raise JaxpflError(f"{path} line {line}: {name} must be a finite number, got {shown(cell)}")
            if name == pair[1] and value <= 0:
                raise JaxpflError(f"{path} line {line}: {name} must be > 0, got {shown(cell)}")
            if ("weights", name) in asked and value < 0:
                raise JaxpflError(f"{path} line {line}: {name} must be at least 0, got {shown(cell)}")
            values.append(value)
        csv_doubts.warn_of_codes(path, values, f" of column {name}")
        return np.array(values)

    names = client_names(path, rows, None if own is None else header.index(own))
    csv_doubts.refuse_summary_rows(path, [line for line, _ in rows], names)
    ignored = [name for name in others if name != own]
    columns = np.array([column(name) for name in wished]).reshape(len(wished), len(rows)).T
    more = dict(asked[len(wished) :])
    return Summaries(
        found[0], names, column(pair[0]), column(pair[1]), ignored, wished, columns,
        _texts(path, rows, header.index(more["groups"]), "group") if "groups" in more else None,
        column(more["weights"]) if "weights" in more else None,
    )  # fmt: skip


def client_names(path: Path, rows: Sequence[Row], place: int | None) -> list[str]:
    """Names of the clients from a column, their numbers without one.

    Raises:
      JaxpflError: for an empty name, or one twice, with the line.
    """
    if place is None:
        return [str(i) for i in range(len(rows))]
    names, lines = _texts(path, rows, place, "client"), {}
    for (line, _), name in zip(rows, names, strict=True):
        if name in lines:
            raise JaxpflError(f"{path} line {line}: client {shown(name)} is in line {lines[name]} too")
        lines[name] = line
    return names


def _is_long(table: csv_text.Table) -> bool:
    """True if a column repeats its cells and another one has numbers: rows of samples, not of clients."""
    columns = list(zip(*(cells for _, cells in table.rows[1:]), strict=False))
    repeats = [len(set(column)) < len(column) for column in columns]
    numeric = [all(table.number(cell) is not None for cell in column) for column in columns]
    return any(repeats[i] and any(numeric[:i] + numeric[i + 1 :]) for i in range(len(columns)))


def _texts(path: Path, rows: Sequence[Row], place: int, what: str) -> list[str]:
    found = []
    for line, cells in rows:
        cell = cells[place] if place < len(cells) else ""
        if not cell:
            raise JaxpflError(f"{path} line {line}: no {what}'s name")
        found.append(cell)
    return found
