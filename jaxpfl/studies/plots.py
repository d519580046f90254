"""Curves of studies: measured points with their errors, and exact lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxpfl.support.presentation import COLORS, GRID, INK, new_axes, save

Values: TypeAlias = Sequence[float] | np.ndarray

FEW_ERRORS = 2
"""Half width of bars and bands in standard errors."""

_COLORS = {
    "local": COLORS[0],
    "personalized": COLORS[1],
    "private": COLORS[2],
    "private, plus one error": COLORS[6],
    "global": COLORS[3],
    "printed private": COLORS[4],
    "printed": COLORS[5],
    "one-bit": COLORS[6],
    "quantized": COLORS[7],
    "beta-binomial": COLORS[4],
    "known": COLORS[3],
    "alternating": COLORS[5],
    "local privacy": COLORS[6],
    "fedavg": COLORS[2],
    "algorithm-4": COLORS[4],
    "algorithm-1": COLORS[4],
    "algorithm-6": COLORS[5],
}


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
    """Colour of an estimator, the same in every plot, by the name up to a comma."""
    return _COLORS.get(name) or _COLORS.get(name.split(",")[0], INK)


def _apart(names: list[str]) -> list[str]:
    """Colours of the estimators of one plot: distinct unless one is a variant of the other."""
    whose: dict[str, str] = {}  # colour -> the estimator that has it
    found = []
    for name in names:
        base, own = name.split(",")[0], color(name)
        if whose.get(own, base) != base:
            spoken_for = {color(other) for other in names} | whose.keys()
            own = next((free for free in COLORS if free not in spoken_for), own)
        whose.setdefault(own, base)
        found.append(own)
    return found


def write_curves(
    path: Path,
    fine: Values,
    curves: Mapping[str, Curve],
    *,
    xlabel: str,
    title: str,
    ylabel: str = "mean squared error of an estimate",
    floor: Values | None = None,
    logarithmic: str = "",
    from_zero: bool = True,
) -> Path:
    """Plot curves to ``path`` (a PNG file).

    Args:
      fine: positions of the exact lines.
      curves: by estimator.
      floor: a lower bound at ``fine``, drawn as a dotted line.
      logarithmic: axes with a logarithmic scale, of "x" and "y".
      from_zero: whether an axis of errors that is not logarithmic begins at zero.
    """
    figure, axes = new_axes(xlabel, ylabel, title)
    drawn: list[str] = []
    for (name, curve), own in zip(curves.items(), _apart(list(curves)), strict=True):
        # A variant has the colour of what it is a variant of, dashed.
        style = {"color": own, "linestyle": "--" if own in drawn else "-"}
        drawn.append(own)
        if curve.line is not None:
            axes.plot(fine, curve.line, linewidth=1.8, label=name, **style)
        if len(curve.x):
            errors = FEW_ERRORS * np.asarray(curve.stderr, float)
            label = None if curve.line is not None else name
            dots = {"marker": "o", "markersize": 4.5, "capsize": 2.5}
            if curve.line is not None:
                dots["linestyle"] = "none"
            axes.errorbar(curve.x, curve.mean, yerr=errors, label=label, linewidth=1.2, **style | dots)
    if floor is not None:
        axes.plot(fine, floor, color=INK, linewidth=1.2, linestyle=":", label="lower bound, mu known")
    if "x" in logarithmic:
        log_ticks(axes.xaxis, fine)
    if "y" in logarithmic:
        axes.set_yscale("log")
        axes.grid(axis="y", which="both", color=GRID, linewidth=0.6)
    elif from_zero:
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    else:
        axes.axhline(0, color=INK, linewidth=0.8)
    bars = any(np.any(np.asarray(curve.stderr, float) > 0) for curve in curves.values())
    note = {"title": f"bars: ± {FEW_ERRORS:g} standard errors", "title_fontsize": 9} if bars else {}
    figure.legend(frameon=False, fontsize=9, loc="outside lower left", ncols=2, alignment="left", **note)
    return save(figure, path.parent, path.stem)


def log_ticks(axis: Any, values: Values) -> None:
    """Label a logarithmic axis with plain numbers, at 1, 2 and 5 times the powers of ten if there are few."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    few = max(values) / min(values) < 300
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
    axis.set_major_formatter("{x:,.10g}")
    axis.set_minor_formatter(NullFormatter())
