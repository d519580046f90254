"""Curves of studies: measured points with their errors, and the lines that theory draws through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from jaxpfl.presentation import COLORS, new_axes, save

Values: TypeAlias = Sequence[float] | np.ndarray

FEW_ERRORS = 2
"""Standard errors that bars and bands reach to either side."""

_ORDER = ("local", "personalized", "private", "global", "quantized", "printed", "one-bit")


class Curve(NamedTuple):
    """One estimator over a setting.

    Attributes:
      x, mean, stderr: measured, [points] each; empty where nothing was.
      line: exact values at `Curves.x`, [fine points], or None.
    """

    x: Values
    mean: Values
    stderr: Values
    line: Values | None = None


def color(name: str) -> str:
    """An estimator's colour, the same in every plot."""
    first = name.split(",")[0]
    place = _ORDER.index(first) if first in _ORDER else sum(map(ord, name))
    return COLORS[place % len(COLORS)]


def write_curves(
    path: Path,
    fine: Values,
    curves: Mapping[str, Curve],
    *,
    xlabel: str,
    title: str,
    ylabel: str = "mean squared error of a client's estimate",
    floor: Values | None = None,
    logarithmic: str = "",
) -> Path:
    """Draws curves to ``path`` (a PNG file).

    Args:
      fine: where the exact lines are given.
      curves: by estimator.
      floor: a lower bound at ``fine``, drawn as a dotted line.
      logarithmic: axes with a logarithmic scale, of "x" and "y".
    """
    figure, axes = new_axes(xlabel, ylabel, title)
    for name, curve in curves.items():
        style = {"color": color(name)}
        if curve.line is not None:
            axes.plot(fine, curve.line, linewidth=1.8, label=name, **style)
        if len(curve.x):
            errors = FEW_ERRORS * np.asarray(curve.stderr, float)
            label = None if curve.line is not None else name
            dots = {"fmt": "o" if curve.line is not None else "o-", "markersize": 4.5, "capsize": 2.5}
            axes.errorbar(curve.x, curve.mean, yerr=errors, label=label, linewidth=1.2, **dots, **style)
    if floor is not None:
        axes.plot(fine, floor, color="#333333", linewidth=1.2, linestyle=":", label="lower bound")
    if "x" in logarithmic:
        axes.set_xscale("log")
    if "y" in logarithmic:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    axes.legend(frameon=False, fontsize=9)
    return save(figure, path.parent, path.stem)
