"""Output of own clients: lines below the table, ``estimates.csv``, and a plot of each client's estimate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpfl.estimators.pictures import Shrunken, draw_shrinkage
from jaxpfl.studies.own_data import client_csv
from jaxpfl.studies.own_data.common import Own, Picture
from jaxpfl.studies.report import beside, estimator_table
from jaxpfl.studies.study import Block, Results
from jaxpfl.support.console import literal, new_axes, save, unmarked
from jaxpfl.support.errors import printable

_SIGNIFICANT = 0.05
_MOST_PICTURES = 12

FILES = "summary.json, estimates.csv, plots/"
"""Contents of the output folder."""


def results(own: Own, notes: Sequence[str]) -> Results:
    """Results of a study of the user's own clients.

    Args:
      own: estimates, scores and pictures.
      notes: lines below the table of the last column.
    """
    return Results(
        json=own.result,
        tables=lambda: _tables(own.result, notes),
        plots=lambda folder: write(folder, own),
        files=FILES,
        hint=f"estimates of every client, with {percent(own.result['level'])} intervals: --output FOLDER",
    )


def how_it_was_read(result: dict[str, Any]) -> list[str]:
    """Lines on the reading of the file and its oddities, followed by an empty one."""
    return [*client_csv.told(result["read"]), *result.get("notes", []), ""]


def _tables(result: dict[str, Any], notes: Sequence[str]) -> list[Block]:
    title = printable(f"{result['csv']}: {result['clients']} clients")
    found: list[Block] = how_it_was_read(result)
    for column, block in blocks(result).items():
        of = f"{title}, {printable(column)}" if column else title
        lines = said(block, result["level"])
        if "not_scored" in result:
            found += [of, f"no errors on held-out samples: {result['not_scored']}", *lines]
        else:
            found += estimator_table(
                block, f"{unmarked(of)}: squared error about {result['of']}; ± over clients", lines
            )
    return [*found, *notes]


def said_of_privacy(privacy: dict[str, Any]) -> str:
    """Facts that privacy takes for public, and results that are not private."""
    public = [f"{name} {privacy[name]:g}" for name in ("sigma_theta", "sigma_x", "radius") if name in privacy]
    known = ", ".join([*public, "the clients' numbers of samples"])
    return f"taken for public: {known}; not private: the rest, with what is learned of all and the intervals"


def blocks(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Results by column name; a single unnamed column has an empty name."""
    return result.get("columns") or {"": result}


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


def percent(level: float) -> str:
    """A level, as 95 %."""
    return f"{100 * level:g} %"


def write(folder: Path, own: Own) -> list[Path]:
    """Write ``estimates.csv`` beside the folder of plots, and plot each client's own and personalised estimate."""
    folder.mkdir(parents=True, exist_ok=True)
    client_csv.write(folder.parent / "estimates.csv", own.columns)
    title = literal(f"{own.result['csv']}: {own.result['clients']} clients")
    of_one = len(own.pictures) == 1
    return [
        _draw(picture, folder, title, own.result["level"], "shrinkage" if of_one else f"shrinkage-{number}")
        for number, picture in enumerate(own.pictures[:_MOST_PICTURES], start=1)
    ]


def _draw(of: Picture, folder: Path, title: str, level: float, name: str) -> Path:
    title = f"{title}, {literal(of.column)}" if of.column else title
    figure, axes = new_axes("local estimate", "personalised estimate", title)
    shrunken = Shrunken(of.local, of.personalized, of.low, of.high, of.sizes, of.mean)
    draw_shrinkage(axes, shrunken, level)
    figure.legend(frameon=False, fontsize=9, loc="outside lower left", ncols=2)
    return save(figure, folder, name)
