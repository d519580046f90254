"""Output of own clients: lines below the table, ``estimates.csv``, and a plot of each client's estimate."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.studies.report import beside, estimator_table
from jaxpfl.studies.study import Block, Results
from jaxpfl.support.console import COLORS, INK, literal, new_axes, save, unmarked
from jaxpfl.support.errors import printable

_SIGNIFICANT = 0.05
_MOST_PICTURES = 12
_FEW = 60  # clients, beyond which bars are fainter and points smaller
_LISTED = 6


class Picture(NamedTuple):
    """Estimates and interval ends of a column, [m] each, numbers of samples [m], and the mean of all, for a plot."""

    column: str
    local: np.ndarray
    personalized: np.ndarray
    low: np.ndarray
    high: np.ndarray
    sizes: np.ndarray
    mean: float


class Own(NamedTuple):
    """Results for a file.

    Attributes:
      result: for the table and JSON. What is of one column is at the top where there is no other, else by the column's
        name in ``columns``.
      columns: one for each fact of a client, for ``estimates.csv``.
      pictures: one for each column.
      public: public settings of private Gaussian messages, by which they are clipped and accounted for.
    """

    result: dict[str, Any]
    columns: dict[str, list]
    pictures: list[Picture]
    public: Any = None


def results(
    own: Own, tables: Callable[[], Sequence[Block]], files: Mapping[str, dict[str, list]] | None = None
) -> Results:
    """Results of a study of the user's own clients.

    Args:
      own: estimates, scores and pictures.
      tables: makes the printed tables and lines.
      files: further tables, by the name of their file.
    """
    more = {} if files is None else files

    def plots(folder: Path) -> list[Path]:
        for name, columns in more.items():
            write_table(folder.parent / name, columns)
        return write(folder, own)

    return Results(
        json=own.result,
        tables=tables,
        plots=plots,
        files=", ".join(["summary.json", "estimates.csv", *more, "plots/"]),
        hint=f"estimates of every client, with {percent(own.result['level'])} intervals: --output FOLDER",
    )


def how_it_was_read(result: dict[str, Any]) -> list[str]:
    """Lines on the reading of a file of samples and its oddities, followed by an empty one."""
    read = result["read"]
    sizes, first = read["samples"], read["first"]
    layout = "a row for each sample" if read["layout"] == "long" else "a row for each client"
    lines = [
        f"read as: {layout}; separator {read['separator']}, decimal {read['decimal']}",
        f"clients: {printable(read['client'])}; samples: {_list(read['values'])}{_unused(read)}",
    ]
    range_ = f"{sizes['min']}" if sizes["min"] == sizes["max"] else f"{sizes['min']} to {sizes['max']}"
    range_ += "" if sizes["min"] == sizes["max"] else f" (median {sizes['median']:g})"
    numbers = ", ".join(_sample(x) for x in first["samples"])
    more = ", ..." if first["size"] > len(first["samples"]) else ""
    lines.append(
        f"{read['clients']} clients of {range_} samples; the first, {printable(first['client'])}: {numbers}{more}"
    )
    if read["missing"]:
        lines.append(f"cells without a number, left out: {read['missing']}")
    if read["without_samples"]:
        left = read["without_samples"]
        lines.append(f"clients without a sample, left out: {len(left)} ({_list(left)})")
    return [*lines, *result.get("notes", []), ""]


def summaries_read(result: dict[str, Any]) -> str:
    """A line on the reading of a file with a summary of each client."""
    read = result["read"]
    columns, client = ",".join(read["columns"]), printable(read["client"])
    return f"read as: {columns} of {result['clients']} clients, named by {client}{_unused(read)}"


def tables(result: dict[str, Any], notes: Sequence[str]) -> list[Block]:
    """Tables of errors on held-out samples by column, with ``notes`` below the last."""
    title = printable(f"{result['csv']}: {result['clients']} clients")
    found: list[Block] = how_it_was_read(result)
    for column, block in (result.get("columns") or {"": result}).items():
        of = f"{title}, {printable(column)}" if column else title
        lines = said(block, result["level"])
        if "not_scored" in result:
            found += [of, f"no errors on held-out samples: {result['not_scored']}", *lines]
        else:
            about = f"{unmarked(of)}: squared error about {result['of']}; ± over clients"
            found += estimator_table(block, about, lines)
    return [*found, *notes]


def said(block: dict[str, Any], level: float) -> list[str]:
    """Lines below a column's table: population estimates, rounded by the samples' spread, and test results."""
    estimated = dict(block["estimated"])
    spread, ends = estimated.get("sigma_x", 0.0), estimated.pop("sigma_theta_interval", None)
    texts = {name: f"{name} {beside(value, spread)}" for name, value in estimated.items()}
    if ends is not None and ends[1] > 0:
        texts["sigma_theta"] += f" ({percent(level)}: {ends[0]:.3g} to {ends[1]:.3g})"
    test, noise = block["clients_differ"], block.get("noise")
    differ = test["p_value"] < _SIGNIFICANT
    lines = [
        f"learned of all: {', '.join(texts.values())}",
        f"{'clients differ' if differ else 'no sign that clients differ'}: {test['name']}, p = {test['p_value']:.2g}",
    ]
    if ends is not None and ends[1] == 0:
        lines.append(
            f"no sigma_theta at {percent(level)} explains the file: clients' means are closer to each other than their "
            "samples' spread allows: check the file"
        )
    if noise is not None and not noise["one_for_all"]:
        lines.append(
            f"the noise differs between clients: Bartlett's test, p = {noise['p_value']:.2g}; each client's own "
            f"sigma_x is taken, drawn to {noise['prior_sigma_x']:.4g} as by {noise['prior_degrees']:.3g} samples more"
        )
    return lines


def said_test(test: dict[str, Any], what: str) -> str:
    """A line on a test that clients, or groups, differ."""
    differ = f"{what} differ" if test["p_value"] < _SIGNIFICANT else f"no sign that {what} differ"
    return f"{differ}: {test['name']} = {test['statistic']:.4g}, p = {test['p_value']:.2g}"


def said_of_privacy(privacy: dict[str, Any]) -> str:
    """Facts that privacy takes for public, and results that are not private."""
    public = [f"{name} {privacy[name]:g}" for name in ("sigma_theta", "sigma_x", "radius") if name in privacy]
    known = ", ".join([*public, "the clients' numbers of samples"])
    return f"taken for public: {known}; not private: the rest, with what is learned of all and the intervals"


def coefficients(covariates: Sequence[str], beta: Any, covariance: Any) -> list[dict[str, Any]]:
    """Coefficients, the intercept first, with standard errors and p-values, as JSON."""
    from scipy import special

    estimates, errors = np.asarray(beta), np.sqrt(np.diag(covariance))
    p_values = 2 * special.ndtr(-np.abs(estimates) / errors)
    return [
        {"name": name, "estimate": float(b), "stderr": float(error), "p_value": float(p)}
        for name, b, error, p in zip(("intercept", *covariates), estimates, errors, p_values, strict=True)
    ]


def said_coefficients(result: dict[str, Any]) -> str:
    """A line on the coefficients of a result."""
    terms = ", ".join(
        f"{printable(row['name'])} {row['estimate']:.4g} ± {row['stderr']:.2g}" for row in result["coefficients"]
    )
    return f"regression: {terms}; ± is a standard error"


def percent(level: float) -> str:
    """A level, as 95 %."""
    return f"{100 * level:g} %"


def write(folder: Path, own: Own) -> list[Path]:
    """Write ``estimates.csv`` beside the folder of plots, and plot each client's own and personalised estimate."""
    folder.mkdir(parents=True, exist_ok=True)
    write_table(folder.parent / "estimates.csv", own.columns)
    title = literal(f"{own.result['csv']}: {own.result['clients']} clients")
    alone = len(own.pictures) == 1
    return [
        _draw(picture, folder, title, own.result["level"], "shrinkage" if alone else f"shrinkage-{number}")
        for number, picture in enumerate(own.pictures[:_MOST_PICTURES], start=1)
    ]


def write_table(path: Path, columns: dict[str, list]) -> None:
    """Write columns of the same length under their names."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def _draw(of: Picture, folder: Path, title: str, level: float, name: str) -> Path:
    """Draw personalised estimates over the clients' own, with intervals and the mean of all."""
    title = f"{title}, {literal(of.column)}" if of.column else title
    figure, axes = new_axes("local estimate", "personalised estimate", title)
    ends = [float(min(of.local.min(), of.personalized.min())), float(max(of.local.max(), of.personalized.max()))]
    axes.plot(ends, ends, color=INK, linewidth=1, linestyle=":", zorder=1, label="no shrinkage")
    few = min(1.0, _FEW / len(of.sizes))
    bars = {"color": COLORS[1], "alpha": 0.15 + 0.4 * few, "linewidth": 0.6 + few}
    axes.vlines(of.local, of.low, of.high, label=f"{percent(level)} interval", **bars)
    points = {"s": (4 + 40 * of.sizes / of.sizes.max()) * (0.3 + 0.7 * few), "alpha": 0.5 + 0.4 * few, "linewidths": 0}
    label = "a client, larger for more samples"
    axes.scatter(of.local, of.personalized, color=COLORS[1], zorder=3, label=label, **points)
    axes.axhline(of.mean, color=COLORS[3], linewidth=1, linestyle="--", zorder=2, label="estimated mean of all")
    figure.legend(frameon=False, fontsize=9, loc="outside lower left", ncols=2)
    return save(figure, folder, name)


def _unused(read: dict[str, Any]) -> str:
    return f"; not used: {_list(read['ignored'])}" if read["ignored"] else ""


def _list(names: list[str]) -> str:
    names = [*map(printable, names)]
    if len(names) <= _LISTED:
        return ", ".join(names)
    return f"{names[0]}, {names[1]}, ... {names[-1]} ({len(names)})"


def _sample(x: Any) -> str:
    return f"({', '.join(f'{entry:g}' for entry in x)})" if isinstance(x, list) else f"{x:g}"
