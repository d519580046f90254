"""Heat maps of a method's scores over pairs of axes."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpfl.runs.records import DONE
from jaxpfl.runs.scores import ACCURACY
from jaxpfl.runs.sweep.points import Axis, Point, best_of, is_drawn
from jaxpfl.support.console import entitle, literal

_MOST_PAIRS = 6
_MOST_WRITTEN = 15
"""Columns of a heat map beyond which its values are not written in."""
_FRAME = "#d8433f"
_SHORT = {"diverged": "div", "failed": "fail", "stopped": "stop", "unfinished": "?"}


def draw_pairs(method: str, points: Sequence[Point], axes: Mapping[str, Axis]) -> Any:
    """Heat maps of a method over each pair of axes, on validation and on test; None for fewer than two axes.

    With more than two axes a cell is the best setting over the others, chosen on validation. Settings drawn from ranges
    are dots.

    Args:
      method: its name.
      points: its settings.
      axes: along which they vary.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    pairs = list(itertools.combinations(axes.values(), 2))[:_MOST_PAIRS]
    # The longer axis lies along the page.
    pairs = [(x, y) if len(x.values) >= len(y.values) else (y, x) for x, y in pairs]
    drawn = is_drawn(points, axes)
    cells = [{} if drawn else _best_cells(points, x, y) for x, y in pairs]
    shown = points if drawn else [point for of_pair in cells for point, _ in of_pair.values() if point is not None]
    headline = next((point.headline for point in points), ACCURACY)
    finite = [score for point in shown for score in (_score(point, test) for test in (False, True))]
    finite = [score for score in finite if math.isfinite(score)]
    if not finite:
        return None
    parts = [False, True] if any(math.isfinite(_score(point, False)) for point in shown) else [True]
    heights = [4.0 if drawn else min(1.7 + 0.36 * len(y.values), 9.0) for _, y in pairs]
    wide = min(max(0.56 * (10 if drawn else max(len(x.values) for x, _ in pairs)), 3.0), 9.0)
    width, height = len(parts) * (wide + 0.9) + 0.9, sum(heights) + 0.7
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(len(pairs), len(parts), squeeze=False, height_ratios=heights)
    figure.suptitle(_title(method, points, len(axes), len(pairs), drawn, width), x=0.01, ha="left", fontsize=11)
    norm = Normalize(min(finite), max(finite))
    for row, (x, y), of_pair in zip(panels, pairs, cells, strict=True):
        for panel, test in zip(row, parts, strict=True):
            if drawn:
                _dots(panel, points, x, y, test, norm)
            else:
                _cells(panel, of_pair, x, y, test, norm)
            panel.set_xlabel(literal(x.name))
            panel.set_ylabel(literal(y.name))
            entitle(panel, "test" if test else "validation, chosen by")
    bar = {"label": headline.words, "format": headline.ticks, "aspect": height / 0.15}
    figure.colorbar(ScalarMappable(norm, "viridis"), ax=panels, **bar)
    return figure


def _score(point: Point, test: bool) -> float:
    """The mean score of a setting, in percent where it is a share."""
    return point.headline.scale * (point.test if test else point.validation).mean


def _title(method: str, points: Sequence[Point], count: int, pairs: int, drawn: bool, width: float) -> str:
    text = f"{method}, mean over clients and seeds"
    if any(point.chosen for point in points):
        text += f"; {'ringed' if drawn else 'framed'}: the chosen setting"
    if count > 2 and not drawn:
        text += "; a cell is the best over the other axes on validation"
    if pairs < math.comb(count, 2):
        text += f"; the first {pairs} of {math.comb(count, 2)} pairs"
    return "\n".join(textwrap.wrap(literal(text), int(9 * width)))


def _best_cells(points: Sequence[Point], x: Axis, y: Axis) -> dict[tuple[int, int], tuple[Point | None, str]]:
    """The best setting, or the status, at each (y, x) where there are settings."""
    groups: dict[tuple[int, int], list[Point]] = {}
    for point in points:
        if x.name in point.settings and y.name in point.settings:
            at = y.number(point.settings[y.name]), x.number(point.settings[x.name])
            groups.setdefault(at, []).append(point)
    return {at: best_of(group) for at, group in groups.items()}


def _cells(
    panel: Any, cells: Mapping[tuple[int, int], tuple[Point | None, str]], x: Axis, y: Axis, test: bool, norm: Any
) -> None:
    """Draw the grid of two axes: the score of each cell's best setting, hatched where none is done."""
    from matplotlib.patches import Rectangle

    values = np.full((len(y.values), len(x.values)), np.nan)
    written = len(x.values) <= _MOST_WRITTEN
    small = 9 if len(x.values) <= 9 else 7
    for (i, j), (best, status) in cells.items():
        if best is None:
            panel.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor="#eeeeee", edgecolor="#bbbbbb", hatch="///"))
            if written:
                panel.text(j, i, _SHORT.get(status, "-"), ha="center", va="center", fontsize=small, color="#555555")
            continue
        values[i, j] = _score(best, test)
        if written and math.isfinite(values[i, j]):
            color = "white" if norm(values[i, j]) < 0.55 else "black"
            panel.text(j, i, f"{values[i, j]:.1f}", ha="center", va="center", fontsize=small, color=color)
        if best.chosen:
            frame = {"fill": False, "edgecolor": _FRAME, "linewidth": 2.6, "zorder": 5}
            panel.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, **frame))
    panel.imshow(values, norm=norm, cmap="viridis", aspect="auto", origin="lower", interpolation="none")
    for axis, of_axis in ((panel.xaxis, x), (panel.yaxis, y)):
        step = math.ceil(len(of_axis.values) / 20)
        words = [literal(word) for word in of_axis.words][::step]
        axis.set_ticks(range(0, len(of_axis.values), step), words, fontsize=8)
    if sum(map(len, x.words)) > 4 * len(x.values):
        panel.tick_params(axis="x", rotation=40)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)


def _dots(panel: Any, points: Sequence[Point], x: Axis, y: Axis, test: bool, norm: Any) -> None:
    """Draw settings that were drawn from ranges as dots."""
    from matplotlib.ticker import NullFormatter

    def places(those: Sequence[Point]) -> list[list[float]]:
        return [[axis.places[axis.number(p.settings[axis.name])] for p in those] for axis in (x, y)]

    done = [point for point in points if point.status == DONE and math.isfinite(_score(point, test))]
    panel.scatter(*places([p for p in points if p.status != DONE]), marker="x", color="#888888", s=30)
    scores = [_score(point, test) for point in done]
    panel.scatter(*places(done), c=scores, norm=norm, cmap="viridis", s=46, edgecolors="#555555", linewidths=0.5)
    panel.scatter(*places([p for p in done if p.chosen]), s=190, facecolors="none", edgecolors=_FRAME, linewidths=2.2)
    for axis, of_axis, scale in ((panel.xaxis, x, panel.set_xscale), (panel.yaxis, y, panel.set_yscale)):
        if of_axis.scale == "log":
            scale("log")
            axis.set_minor_formatter(NullFormatter())
        elif of_axis.scale == "even":
            axis.set_ticks(range(len(of_axis.values)), [literal(word) for word in of_axis.words], fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
