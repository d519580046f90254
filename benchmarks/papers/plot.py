"""Figures of the papers: jaxpfl's values on the paper's horizontal axis, with the published values as marks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxpfl.support.console import new_axes, save_png, shades, signed

from .compare import Row
from .declared import Case, Experiment
from .show import QUICK


def write_figure(path: Path, experiment: Experiment, found: Sequence[tuple[Case, list[Row]]], *, quick: bool) -> Path:
    """Draw a figure with a line per method, bars of one standard deviation, and the published values dashed.

    Args:
      path: PNG file to write.
      experiment: experiment with a figure.
      found: cases with their rows; cases without a position on the axis are left out.
      quick: whether the run was scaled down; the title then says so, and published values are left out.
    """
    about = experiment.figure
    assert about is not None
    title = f"{experiment.what}\n{QUICK}" if quick else experiment.what
    figure, axes = new_axes(about.xlabel, about.ylabel, title)
    placed = [(case.x, row) for case, rows in found if case.x is not None for row in rows]
    labels = list(dict.fromkeys(row.method for _, row in placed))
    for label, color in zip(labels, shades(len(labels)), strict=True):
        own = sorted(
            ((x, row) for x, row in placed if row.method == label and row.ours is not None), key=lambda p: p[0]
        )
        x, ours = [x for x, _ in own], [row.ours for _, row in own]
        bars = [row.std or 0.0 for _, row in own]
        axes.errorbar(x, ours, yerr=bars, color=color, label=label, marker="o", markersize=4, capsize=2.5)
        if not quick and (print_ := [(x, row.printed) for x, row in own if row.printed is not None]):
            axes.plot(*zip(*print_, strict=True), color=color, linestyle="--", linewidth=1.2, label=f"{label}, printed")
    figure.legend(frameon=False, fontsize=9, loc="outside lower left", ncols=3, alignment="left")
    with signed("jaxpfl papers run"):
        return save_png(figure, path)
