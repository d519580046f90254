"""Panels of a sweep's plots: their frame, the scale of an axis of settings, and the legend beside them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.runs.sweep.points import Axis
from jaxpfl.support.console import INK, literal, plain

MARKERS = "os^DvPX<>hp*"
"""Markers of lines, which tell them apart without colours."""
BAD = {"diverged": "x", "failed": "+", "stopped": "|", "unfinished": "_"}
"""Marks of settings that are not done."""
RING = {"markerfacecolor": "none", "markeredgecolor": INK, "markeredgewidth": 1.4}
"""Look of the mark around a chosen setting."""
_MOST_TICKS = 12


class Marks(NamedTuple):
    """Marks of a plot that its legend explains: bands over the seeds, and rings around chosen settings."""

    spread: bool
    chosen: bool


def new_panels(count: int, title: str, *, share: bool, beside: int = 0) -> tuple[Any, list[Any]]:
    """A figure with panels side by side, and room for a legend of so many entries at the right."""
    from matplotlib.figure import Figure

    width = {1: 6.4, 2: 10.0, 3: 13.0}[count] + 1.6
    figure = Figure(figsize=(width, max(4.4, 1.2 + 0.23 * beside)), layout="constrained")
    axes = figure.subplots(1, count, sharey=share, squeeze=False)[0]
    figure.suptitle("\n".join(textwrap.wrap(literal(title), int(9 * width))), x=0.01, ha="left", fontsize=11)
    for one in axes:
        plain(one)
    return figure, list(axes)


def set_scale(panel: Any, axis: Axis) -> None:
    """Set the scale, the limits and the ticks of an axis of settings."""
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    places = axis.places
    if axis.scale == "log":
        panel.set_xscale("log")
        margin = (places[-1] / places[0]) ** 0.05
        panel.set_xlim(places[0] / margin, places[-1] * margin)
    else:
        margin = 0.05 * (places[-1] - places[0])
        panel.set_xlim(places[0] - margin, places[-1] + margin)
    if axis.scale == "even" or _apart(axis):
        words = [literal(word) for word in axis.words]
        slanted = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if sum(map(len, words)) > 36 else {}
        if len(words) > 15:
            slanted = {"rotation": 90}
        panel.xaxis.set_major_locator(FixedLocator(places))
        panel.set_xticks(places, words, fontsize=9 if len(words) <= 15 else 7, **slanted)
        panel.xaxis.set_minor_locator(NullLocator())
    else:
        panel.xaxis.set_minor_formatter(NullFormatter())


def _apart(axis: Axis) -> bool:
    """True if the values themselves are ticks that do not overlap."""
    places = np.log(axis.places) if axis.scale == "log" else np.array(axis.places)
    return len(places) <= _MOST_TICKS and np.diff(places).min() > 0.05 * (places[-1] - places[0])


def add_legend(figure: Any, panel: Any, marks: Marks, bad: Sequence[str] = ()) -> None:
    """Name the lines of a panel, and the marks, at the right of the panels."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = panel.get_legend_handles_labels()[0]
    if marks.spread:
        handles.append(Patch(color="#888888", alpha=0.3, linewidth=0, label="± 1 standard\ndeviation over\nseeds"))
    if marks.chosen:
        handles.append(Line2D([], [], marker="o", markersize=10, label="chosen", linestyle="none", **RING))
    for status in bad:
        handles.append(Line2D([], [], marker=BAD[status], label=status, color="#888888", linestyle="none"))
    figure.legend(handles=handles, frameon=False, loc="outside right upper", fontsize=9)
