"""One summary of each client from a CSV file: an estimate with its standard error, successes of trials, or a count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from jaxpfl.data.sources.csv_text import Table
from jaxpfl.studies.own_data.client_csv import distinct_clients, refuse_sum
from jaxpfl.support.errors import JaxpflError, shown

Kind: TypeAlias = Literal["estimate", "successes", "count"]

PAIRS: dict[Kind, tuple[str, str]] = {
    "estimate": ("estimate", "se"),
    "successes": ("successes", "trials"),
    "count": ("count", "exposure"),
}
"""The names of the two columns of each kind."""


class Summaries(NamedTuple):
    """Clients of a file.

    Attributes:
      kind: name of the pair of columns.
      client: name of the column of clients.
      names: clients, [m].
      first, second: the two columns, [m] each.
      ignored: names of the other columns.
      covariate_names: as asked for, [k].
      covariates: their columns, [m, k].
      groups: names of the clients' groups, [m]; None unless asked for.
      weights: numbers of at least zero, [m]; None unless asked for.
    """

    kind: Kind
    client: str
    names: list[str]
    first: np.ndarray
    second: np.ndarray
    ignored: list[str]
    covariate_names: list[str]
    covariates: np.ndarray
    groups: list[str] | None = None
    weights: np.ndarray | None = None


def read(
    table: Table,
    covariates: Sequence[str] = (),
    *,
    client: str | None = None,
    groups: str | None = None,
    weights: str | None = None,
) -> Summaries:
    """Read the clients of a table, of which two columns are a pair of `PAIRS`, in any order and case.

    Args:
      table: a row for each client.
      covariates: names of further columns of numbers.
      client: column with the clients' names; one called client or id unless given.
      groups: name of a column that names each client's group.
      weights: name of a column of numbers of at least zero.

    Raises:
      JaxpflError: a table without such a pair or with two of them, clients of which no column is named, a covariate,
        groups or weights that are no column of their own, a cell that is no finite number, a standard error, trials or
        an exposure that is not above zero, a weight below zero, an empty name (with the line), a client that is named
        twice, or one that is the sum of all others.
    """
    path, known = table.path, [name.lower() for name in table.names]
    found: list[Kind] = [kind for kind, pair in PAIRS.items() if set(pair) <= set(known)]
    if len(found) != 1:
        what = "several pairs of columns" if found else "no pair of columns"
        ways = " or ".join(",".join(pair) for pair in PAIRS.values())
        root = "; yi,vi are an effect and its variance: call yi estimate, and the root of vi se"
        more = root if {"yi", "vi"} <= set(known) else "; a row for each sample is for jaxpfl estimate gaussian"
        raise JaxpflError(f"{path}: {what} in {table.listed}: needs {ways}{'' if found else more}")
    kind = found[0]
    first, second = (table.find(name) for name in PAIRS[kind])
    wished = [table.find(name.strip(), "covariate") for name in covariates]
    group = None if groups is None else table.find(groups.strip(), "groups")
    weight = None if weights is None else table.find(weights.strip(), "weights")
    used = [first, second, *wished, *(name for name in (group, weight) if name is not None)]
    own = table.clients(client, used)
    for name in (own, *used):
        if [own, *used].count(name) > 1:
            raise JaxpflError(f"{path}: column {shown(name)} is asked for twice")
    columns = {name: table.numbers(name) for name in used if name != group}
    names, x, s = distinct_clients(table, own), columns[first], columns[second]
    rules = [(second, s > 0, "> 0")]
    if kind != "estimate":
        rules.append((first, (x >= 0) & (x == np.round(x)), "a whole number of at least 0"))
    if kind == "successes":
        rules += [(second, s == np.round(s), "a whole number"), (first, x <= s, f"at most the {second}")]
    if weight is not None:
        rules.append((weight, columns[weight] >= 0, "at least 0"))
    for name, good, words in rules:
        for row in np.flatnonzero(~good):
            got = shown(table.cells[name].iloc[row])
            raise JaxpflError(f"{path} line {table.lines[row]}: {name} must be {words}, got {got}")
    with np.errstate(over="ignore"):  # of independent totals the variances add
        refuse_sum(path, names, np.stack([x, s**2 if kind == "estimate" else s], axis=1))
    return Summaries(
        kind, own, names, x, s, [name for name in table.names if name not in (own, *used)], wished,
        np.stack([columns[name] for name in wished], axis=1) if wished else np.zeros((len(x), 0)),
        None if group is None else table.texts(group), None if weight is None else columns[weight],
    )  # fmt: skip
