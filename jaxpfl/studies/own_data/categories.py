"""Shares of categories of the user's own clients, from columns of counts called ``count:NAME``."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl.data.sources import csv_text
from jaxpfl.estimators import ebmultinomial, learned_bernoulli
from jaxpfl.studies.own_data import client_csv, output
from jaxpfl.studies.own_data.common import Own, Picture
from jaxpfl.studies.own_data.options import Intervals
from jaxpfl.studies.own_data.summary_csv import PAIRS
from jaxpfl.studies.study import Block, Results
from jaxpfl.support.errors import JaxpflError, printable, shown

PREFIX = "count:"
_SHOWN = 12
_MOST = 1e12


class Categories(NamedTuple):
    """Clients of a file.

    Attributes:
      client: name of the column of clients.
      names: clients, [m].
      categories: their names, [K].
      counts: [m, K].
      ignored: names of the other columns.
    """

    client: str
    names: list[str]
    categories: list[str]
    counts: np.ndarray
    ignored: list[str]


def given(table: csv_text.Table) -> bool:
    """Tell whether a table has columns of counts of categories."""
    return any(name.lower().startswith(PREFIX) for name in table.names)


def read(table: csv_text.Table, client: str | None = None) -> Categories:
    """Read a table with at least two columns ``count:NAME``, a client in each row.

    Args:
      table: contents, of which `given` is true.
      client: column with the clients' names; one called client or id unless given.

    Raises:
      JaxpflError: columns of a pair of `summary_csv.PAIRS` too, a category without a name, alone, or twice, clients of
        which no column is named, a cell that is no whole number of at least 0, a client or a category without any
        count, a client that is named twice, or one that is the sum of all others.
    """
    path, lower = table.path, [name.lower() for name in table.names]
    for pair in PAIRS.values():
        if set(pair) <= set(lower):
            raise JaxpflError(f"{path}: has columns {','.join(pair)} and {PREFIX}NAME: keep one kind")
    columns = [name for name in table.names if name.lower().startswith(PREFIX)]
    names = [name[len(PREFIX) :].strip() for name in columns]
    for name in names:
        if not name:
            raise JaxpflError(f"{path}: column {shown(PREFIX)} has no category's name")
        if names.count(name) > 1:
            raise JaxpflError(f"{path}: {names.count(name)} columns are called {PREFIX}{printable(name)}")
    if len(names) < 2:
        raise JaxpflError(f"{path}: needs at least two columns {PREFIX}NAME, got {PREFIX}{printable(names[0])} alone")
    own = table.clients(client, columns)
    counts = np.stack([table.numbers(name) for name in columns], axis=1)
    for row, column in np.argwhere((counts < 0) | (counts != np.round(counts)) | (counts > _MOST)):
        where = f"{path} line {table.lines[row]}: {PREFIX}{printable(names[column])}"
        raise JaxpflError(f"{where} must be a whole number of at least 0, got {counts[row, column]:g}")
    for row in np.flatnonzero(~counts.any(axis=1)):
        raise JaxpflError(f"{path} line {table.lines[row]}: a client without any count: leave it out")
    for column in np.flatnonzero(~counts.any(axis=0)):
        raise JaxpflError(f"{path}: category {shown(names[column])} has no counts: leave it out")
    clients = client_csv.distinct_clients(table, own)
    client_csv.refuse_sum(path, clients, counts)
    return Categories(own, clients, names, counts, [name for name in table.names if name not in (own, *columns)])


def integrated(counts: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Interval ends and standard errors of every share that integrate over the population, [m, K] each.

    A category against all others together is Beta-binomial under a Dirichlet prior too: each is taken by itself, with
    the size that its own counts speak for.
    """
    totals = counts.sum(axis=1)
    each = [learned_bernoulli.believed(own, totals, level) for own in counts.T]
    low, high, stderr = (np.stack(of, axis=1) for of in zip(*each, strict=True))
    return low, high, stderr


def results(
    table: csv_text.Table, client: str | None, seed: int, level: float, intervals: Intervals = "learned"
) -> Results:
    """Estimates of the shares of a table's clients; of intervals that are not to be ``"plug-in"``, see `integrated`.

    Raises:
      JaxpflError: as `read` and `ebmultinomial`.
    """
    path, data = table.path, read(table, client)
    try:
        with jax.enable_x64(True):
            fit = ebmultinomial(data.counts)
            low, high, stderr = (np.asarray(of) for of in (*fit.interval(level), fit.sd))
            fit = jax.tree.map(np.asarray, fit)
    except JaxpflError as error:
        raise JaxpflError(f"{path}: {error}") from None
    if intervals != "plug-in":
        low, high, stderr = integrated(data.counts, level)
    low, high = np.minimum(low, fit.mean), np.maximum(high, fit.mean)
    totals = data.counts.sum(axis=1)
    local = data.counts / totals[:, None]
    size = float(fit.prior_size)
    spread = np.sqrt(fit.prior_mean * (1 - fit.prior_mean) / (1 + size))
    result: dict[str, Any] = {
        "study": "normal-means",
        "csv": path.name,
        "read": {
            "client": data.client,
            "columns": [f"{PREFIX}{name}" for name in data.categories],
            "ignored": data.ignored,
        },
        "clients": len(data.names),
        "level": level,
        "settings": {"seed": seed},
        "prior": "dirichlet",
        "intervals": "plug-in" if intervals == "plug-in" else "integrated",
        "categories": [
            {"name": name, "mean": float(mean), "sigma_theta": float(sd)}
            for name, mean, sd in zip(data.categories, fit.prior_mean, spread, strict=True)
        ],
        "prior_size": size if np.isfinite(size) else None,
        "log_marginal": float(fit.log_marginal),
        "clients_differ": {
            "name": "likelihood ratio",
            "statistic": float(fit.ratio),
            "p_value": float(fit.p_value),
        },
    }
    columns: dict[str, list] = {"client": data.names, "counts": totals.astype(int).tolist()}
    columns["shrinkage"] = fit.shrinkage.tolist()
    parts = {"local": local, "personalized": fit.mean, "personalized_stderr": stderr, "low": low, "high": high}
    pictures = []
    for k, name in enumerate(data.categories):
        columns |= {f"{part}:{name}": values[:, k].tolist() for part, values in parts.items()}
        own, mean, ends = local[:, k], fit.mean[:, k], (low[:, k], high[:, k])
        pictures.append(Picture(name, own, mean, ends[0], ends[1], totals, float(fit.prior_mean[k])))
    made = Own(result, columns, pictures)
    hint = f"estimates of every client, with {output.percent(level)} intervals: --output FOLDER"
    return Results(
        result, lambda: _said(result), lambda folder: output.write(folder, made), files=output.FILES, hint=hint
    )


def _said(result: dict[str, Any]) -> list[Block]:
    found, test = result["categories"], result["clients_differ"]
    shares = ", ".join(
        f"{printable(row['name'])} {row['mean']:.4g} (sigma_theta {row['sigma_theta']:.3g})" for row in found[:_SHOWN]
    )
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    size = "without spread" if result["prior_size"] is None else f"of {result['prior_size']:.4g} pseudo-counts"
    differ = "clients differ" if test["p_value"] < 0.05 else "no sign that clients differ"
    return [
        client_csv.told_of_summaries(f"counts of {len(found)} categories", result),
        f"learned of all, prior dirichlet {size}, log likelihood {result['log_marginal']:.6g}: {shares}{more}",
        f"{differ}: {test['name']} = {test['statistic']:.4g}, p = {test['p_value']:.2g}",
    ]
