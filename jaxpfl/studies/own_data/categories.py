"""Shares of categories of the user's own clients, from columns of counts called ``count:NAME``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl.data.sources import csv_text
from jaxpfl.errors import JaxpflError, printable, shown
from jaxpfl.estimators import ebmultinomial, learned_bernoulli
from jaxpfl.studies.own_data import csv_doubts, output
from jaxpfl.studies.own_data.common import Own, Picture
from jaxpfl.studies.own_data.options import Intervals
from jaxpfl.studies.own_data.summary_csv import PAIRS, client_names
from jaxpfl.studies.study import Block, Results

PREFIX = "count:"
_CLIENT = "client"
_SHOWN = 12
_MOST = 1e12


class Categories(NamedTuple):
    """Clients of a file.

    Attributes:
      names: of the clients, [m]; their numbers where no column names them.
      categories: their names, [K].
      counts: [m, K].
      ignored: names of the other columns.
    """

    names: list[str]
    categories: list[str]
    counts: np.ndarray
    ignored: list[str]


def given(table: csv_text.Table) -> bool:
    """Tell whether a file's header has columns of counts of categories."""
    return bool(table.rows) and any(cell.lower().startswith(PREFIX) for cell in table.rows[0][1])


def read(path: Path, table: csv_text.Table) -> Categories:
    """Read a file with a header and at least two columns ``count:NAME``, a client in each row.

    A column ``client``, or the only one besides, names the clients.

    Args:
      path: of the file.
      table: its contents, of which `given` is true.

    Raises:
      JaxpflError: columns of a pair of `summary_csv.PAIRS` too, a category without a name,
        alone, or twice, a cell that is no whole number of at least 0, a client or a category without any count, or a
        client that is named twice.
    """
    header, rows = table.rows[0][1], table.rows[1:]
    lower = [cell.lower() for cell in header]
    for pair in PAIRS.values():
        if set(pair) <= set(lower):
            raise JaxpflError(f"{path}: has columns {','.join(pair)} and {PREFIX}NAME: keep one kind")
    places = [i for i, cell in enumerate(lower) if cell.startswith(PREFIX)]
    names = [header[i][len(PREFIX) :].strip() for i in places]
    for name in names:
        if not name:
            raise JaxpflError(f"{path}: column {shown(PREFIX)} has no category's name")
        if names.count(name) > 1:
            raise JaxpflError(f"{path}: {names.count(name)} columns are called {PREFIX}{printable(name)}")
    if len(names) < 2:
        raise JaxpflError(f"{path}: needs at least two columns {PREFIX}NAME, got {PREFIX}{printable(names[0])} alone")
    others = [i for i in range(len(header)) if i not in places]
    own = [i for i in others if lower[i] == _CLIENT]
    if len(own) > 1:
        raise JaxpflError(f"{path}: {len(own)} columns are called {_CLIENT}")
    place = own[0] if own else others[0] if len(others) == 1 else None
    counts = np.zeros((len(rows), len(names)))
    for row, (line, cells) in enumerate(rows):
        if len(cells) > len(header):
            raise JaxpflError(f"{path} line {line}: more cells than the header has names ({len(header)})")
        for column, at in enumerate(places):
            cell = cells[at] if at < len(cells) else ""
            value = table.number(cell)
            if value is None or value < 0 or value != round(value) or value > _MOST:
                name = f"{PREFIX}{printable(names[column])}"
                raise JaxpflError(f"{path} line {line}: {name} must be a whole number of at least 0, got {shown(cell)}")
            counts[row, column] = value
        if not counts[row].any():
            raise JaxpflError(f"{path} line {line}: a client without any count: leave it out")
    clients = client_names(path, rows, place)
    csv_doubts.refuse_summary_rows(path, [line for line, _ in rows], clients)
    for name, of in zip(names, counts.T, strict=True):
        csv_doubts.warn_of_codes(path, of.tolist(), f" of column {PREFIX}{printable(name)}")
    for name, of in zip(names, counts.T, strict=True):
        if len(rows) and not of.any():
            raise JaxpflError(f"{path}: category {shown(name)} has no counts: leave it out")
    return Categories(clients, names, counts, [lower[i] for i in others if i != place])


def integrated(counts: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Interval ends and standard errors of every share that integrate over the population, [m, K] each.

    A category against all others together is Beta-binomial under a Dirichlet prior too: each is taken by itself, with
    the size that its own counts speak for.
    """
    totals = counts.sum(axis=1)
    each = [learned_bernoulli.believed(own, totals, level) for own in counts.T]
    low, high, stderr = (np.stack(of, axis=1) for of in zip(*each, strict=True))
    return low, high, stderr


def results(path: Path, table: csv_text.Table, seed: int, level: float, intervals: Intervals = "learned") -> Results:
    """Estimates of the shares of a file's clients; of intervals that are not to be ``"plug-in"``, see `integrated`.

    Raises:
      JaxpflError: as `read` and `ebmultinomial`.
    """
    data = read(path, table)
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
        "read": {"columns": [f"{PREFIX}{name}" for name in data.categories], "ignored": data.ignored},
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
    ignored = result["read"]["ignored"]
    unused = f"; not used: {printable(', '.join(ignored))}" if ignored else ""
    found, test = result["categories"], result["clients_differ"]
    shares = ", ".join(
        f"{printable(row['name'])} {row['mean']:.4g} (sigma_theta {row['sigma_theta']:.3g})" for row in found[:_SHOWN]
    )
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    size = "without spread" if result["prior_size"] is None else f"of {result['prior_size']:.4g} pseudo-counts"
    differ = "clients differ" if test["p_value"] < 0.05 else "no sign that clients differ"
    return [
        f"read as: counts of {len(found)} categories of {result['clients']} clients{unused}",
        f"learned of all, prior dirichlet {size}, log likelihood {result['log_marginal']:.6g}: {shares}{more}",
        f"{differ}: {test['name']} = {test['statistic']:.4g}, p = {test['p_value']:.2g}",
    ]
