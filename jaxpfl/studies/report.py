"""Tables and plots for studies: every estimator's error, exact error if known, and gain over the local estimate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np

from jaxpfl.studies.study import Block
from jaxpfl.support.console import COLORS, GRID, INK, new_axes, new_table, save

Values: TypeAlias = Sequence[float] | np.ndarray

FEW_ERRORS = 2
"""Number of standard errors in half an error bar."""

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


def estimator_table(result: dict[str, Any], title: str, notes: Iterable[str] = ()) -> list[Block]:
    """Table of the estimators' errors and gains, followed by lines of text.

    Args:
      result: study's summary, with ``mse`` and ``gains`` by estimator.
      title: title of the table.
      notes: lines below the table.
    """
    exact = any(row["closed_form"] is not None for row in result["mse"].values())
    table = new_table(title, "± one standard error; gain: fraction of the local error that is avoided")
    table.add_column("estimator", style="bold", no_wrap=True)
    for name in ("MSE", *["exact"] * exact, "gain over local"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in result["mse"].items():
        gained = result["gains"].get(name)
        theory = [number(row["closed_form"])] * exact
        table.add_row(name, plus_minus(row), *theory, "-" if gained is None else plus_minus(gained, percent=True))
    return [table, *notes]


def number(value: float | None) -> str:
    """Format a number with four significant figures; a dash for None."""
    return "-" if value is None else f"{value:.4g}"


def beside(value: float, spread: float) -> str:
    """Format a number with four significant figures, or more if a thousandth of ``spread`` would otherwise be
    invisible.
    """
    larger = math.log10(abs(value) / spread) if value and spread > 0 else 0
    return f"{value:.{max(4, math.ceil(larger) + 3)}g}"


def plus_minus(row: dict[str, float | None], *, percent: bool = False) -> str:
    """Format ``mean ± stderr``. The standard error gets one significant figure.

    With ``percent``, both numbers are percentages with one decimal, or two if the standard error is below 0.05 %.
    """
    mean, error = row["mean"], row["stderr"]
    if mean is None or mean != mean:
        return "-"
    if percent:
        mean, error = 100 * mean, None if error is None else 100 * error
        digits = 1 if error is None or error >= 0.05 else 2
        text = f"{mean:.{digits}f}"
        return f"{text} %" if error is None else f"{text} ± {error:.{digits}f} %"
    return number(mean) if error is None else f"{mean:.4g} ± {error:.1g}"


class Curve(NamedTuple):
    """One estimator's curve in a plot against a setting.

    Attributes:
      x, mean, stderr: x coordinates, measured means and standard errors, [points] each; empty without measurements.
      line: values known in closed form, or None.
      at: x coordinates of ``line``; if None, the argument ``fine`` of `write_curves`.
    """

    x: Values
    mean: Values
    stderr: Values
    line: Values | None = None
    at: Values | None = None

    @classmethod
    def measured(cls, x: Values, rows: Iterable[Any], line: Values | None = None, scale: float = 1) -> Self:
        """Make a curve from measured means.

        Args:
          x: x coordinates.
          rows: mean and standard error at each x coordinate, as `repetitions.Measured` or its dictionary.
          line: exact values.
          scale: factor by which means and errors are multiplied.
        """
        pairs = [(row["mean"], row["stderr"]) if isinstance(row, dict) else row[:2] for row in rows]
        return cls(x, [scale * mean for mean, _ in pairs], [scale * (error or 0) for _, error in pairs], line)

    @classmethod
    def level(cls, value: float, fine: Values) -> Self:
        """Make a horizontal line at an exact value."""
        return cls((), (), (), [value] * len(fine))


def color(name: str) -> str:
    """Color of an estimator in every plot; text after a comma in the name denotes a variant, and is ignored."""
    return _COLORS.get(name) or _COLORS.get(name.split(",")[0], INK)


def _apart(names: list[str]) -> list[str]:
    """Choose colors for the estimators in one plot; only variants of the same estimator have the same color."""
    whose: dict[str, str] = {}  # color -> estimator drawn in it
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
    logarithmic: str = "",
    from_zero: bool = True,
) -> Path:
    """Plot curves, and write the plot to ``path``, a PNG file.

    Args:
      path: file to write.
      fine: x coordinates of the exact lines.
      curves: curves by estimator.
      xlabel, title, ylabel: labels and title of the plot.
      logarithmic: axes with a logarithmic scale: "", "x", "y" or "xy".
      from_zero: whether a vertical axis that is not logarithmic starts at zero.
    """
    figure, axes = new_axes(xlabel, ylabel, title)
    drawn: list[str] = []
    for (name, curve), own in zip(curves.items(), _apart(list(curves)), strict=True):
        # A variant has the same color as its base estimator, and a dashed line.
        style = {"color": own, "linestyle": "--" if own in drawn else "-"}
        drawn.append(own)
        if curve.line is not None:
            axes.plot(fine if curve.at is None else curve.at, curve.line, linewidth=1.8, label=name, **style)
        if len(curve.x):
            errors = FEW_ERRORS * np.asarray(curve.stderr, float)
            label = None if curve.line is not None else name
            dots = {"marker": "o", "markersize": 4.5, "capsize": 2.5}
            if curve.line is not None:
                dots["linestyle"] = "none"
            axes.errorbar(curve.x, curve.mean, yerr=errors, label=label, linewidth=1.2, **style | dots)
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


def write_bars(folder: Path, rows: dict[str, Any], ylabel: str, title: str, *, least: float | None = None) -> Path:
    """Plot every estimator's mean error with bars of two standard errors; write the plot to ``folder/errors.png``.

    Args:
      folder: folder of the plot.
      rows: estimator -> dict with the ``mean`` of its squared errors and the mean's ``stderr`` (None if unknown).
      ylabel, title: label and title of the plot.
      least: Bayes risk, drawn as a line; if None, the axis is logarithmic.
    """
    figure, axes = new_axes("", ylabel, title)
    bars = [FEW_ERRORS * (row["stderr"] or 0) for row in rows.values()]
    axes.bar(list(rows), [row["mean"] for row in rows.values()], yerr=bars, color=color("personalized"), capsize=3)
    if least is None:
        axes.set_yscale("log")
    else:
        axes.axhline(least, color=color("local"), linestyle="--", linewidth=1.2, label=f"Bayes risk {least:.3g}")
    note = f"bars: ± {FEW_ERRORS:g} standard errors" if any(bars) else None
    axes.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=9, title=note, title_fontsize=9)
    axes.tick_params(axis="x", labelrotation=20, labelsize=8)
    return save(figure, folder, "errors")


def write_gains(path: Path, fine: Values, curves: Mapping[str, Curve], *, xlabel: str, title: str) -> Path:
    """Plot gains over the local estimate, in percent, by `write_curves` with a logarithmic x axis."""
    style: dict[str, Any] = {"ylabel": "gain over the local estimate, %", "logarithmic": "x", "from_zero": False}
    return write_curves(path, fine, curves, xlabel=xlabel, title=title, **style)


def log_ticks(axis: Any, values: Values) -> None:
    """Make an axis logarithmic, with ticks at powers of ten and, on a short axis, at 2 and 5 times these powers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    few = max(values) / min(values) < 300
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
    axis.set_major_formatter("{x:,.10g}")
    axis.set_minor_formatter(NullFormatter())
