"""Table and plot of the study of planted clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.studies.plots import FEW_ERRORS, log_ticks
from jaxpfl.studies.report import number, with_error
from jaxpfl.studies.study import Block
from jaxpfl.support.presentation import COLORS, INK, new_table, plain, save

_SHOWN = {"error": "parameter error", "ari": "adjusted Rand index", "clusters": "clusters"}


def tables(result: dict[str, Any]) -> list[Block]:
    """Table of the methods, and a line on the graph, from `network.run`'s result."""
    given = result["settings"]
    table = new_table(
        f"{given['clients']} clients of {given['samples']} samples in {given['clusters']} planted clusters, "
        f"d = {given['dim']}, {given['repetitions']} repetitions",
        "at the value that the validation loss chooses in each repetition; ± one standard error; ARI: adjusted Rand "
        "index of the clusters; best: the least mean error on the path, known only to who knows the truth",
    )
    table.add_column("method", style="bold", no_wrap=True)
    for name in ("chosen", "parameter error", "best", "ARI", "clusters", "accuracy"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in result["methods"].items():
        chosen = row["chosen"]
        values = sorted(set(row["chosen_values"]))
        table.add_row(
            name,
            f"{row['swept']} {', '.join(f'{value:g}' for value in values)}",
            with_error(chosen["error"]),
            number(min(point["mean"] for point in row["path"]["error"])),
            with_error(chosen["ari"]),
            f"{chosen['clusters']['mean']:.3g}",
            with_error(chosen["accuracy"], percent=True),
        )
    graph = {name: row["mean"] for name, row in result["graph"].items()}
    return [
        table,
        f"the graph alone ({given['graph']}, {given['neighbours']} neighbours): {100 * graph['crossing']:.1f} % of its "
        f"edges are between clusters, {graph['components']:.3g} components, ARI {graph['ari']:.3g}",
    ]


def write_plots(folder: Path, result: dict[str, Any]) -> list[Path]:
    """Plot the path into ``folder``: errors, Rand indices and numbers of clusters over lambda (or weight decay)."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(7.2, 9.0), layout="constrained")
    panels = figure.subplots(len(_SHOWN), 1, sharex=True)
    for axes, (part, label) in zip(panels, _SHOWN.items(), strict=True):
        axes.set_ylabel(label)
        for (name, row), color in zip(result["methods"].items(), COLORS, strict=False):
            if part != "clusters" or name == "network-lasso":  # the others are given the number, or have one
                _draw(axes, name, row, part, color)
        plain(axes)
    given = result["settings"]
    panels[0].set_title(
        f"{given['clients']} clients in {given['clusters']} planted clusters",
        loc="left",
        fontsize=11,
        fontweight="bold",
    )
    log_ticks(panels[0].yaxis, [1, 100])
    panels[1].set_ylim(-0.05, 1.05)
    log_ticks(panels[2].yaxis, [1, given["clients"]])
    panels[2].axhline(given["clusters"], color=INK, linewidth=1, linestyle=":", label="true")
    panels[-1].set_xlabel("lambda; weight decay of local and fedavg")
    log_ticks(panels[-1].xaxis, given["strengths"])
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside lower left", ncols=3)
    return [save(figure, folder, "path")]


def _draw(axes: Any, name: str, row: dict[str, Any], part: str, color: str) -> None:
    """A method's path, with bars; for a method with several starts, the chosen one as a dashed line."""
    if row["swept"] == "start":
        axes.axhline(
            row["chosen"][part]["mean"], color=color, linestyle="--", linewidth=1.5, label=f"{name}, chosen start"
        )
        return
    means = [point["mean"] for point in row["path"][part]]
    errors = FEW_ERRORS * np.array([point["stderr"] or 0.0 for point in row["path"][part]])
    axes.errorbar(row["values"], means, yerr=errors, color=color, marker="o", markersize=4, capsize=2, label=name)
