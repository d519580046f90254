"""Plots of a sweep: scores along each axis, and heat maps over pairs of axes."""

from __future__ import annotations

import itertools
import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.engine.evaluate import ACCURACY, Headline, stored_headline
from jaxpfl.runs.records import DONE, Value, value_words
from jaxpfl.runs.sweep.results import chosen_settings, setting_key
from jaxpfl.support.console import INK, entitle, literal, plain, shades


def figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Plot the results of a sweep.

    For each axis with several values, ``by-AXIS`` shows the validation and test score of each method. At each value of
    the axis, the other axes are set to their best values by validation score. For a method with two or more axes,
    ``pairs-METHOD`` shows heat maps.

    Args:
      summary: summary as `summarize` returns it.

    Returns:
      Name of the plot -> matplotlib figure.
    """
    points = points_of(summary)
    every = list(itertools.chain(*points.values()))
    axes = axes_of(every)
    if not summary["best"] and not any(math.isfinite(point.test.mean) for point in every):
        return {}
    looks = zip(shades(len(points)), itertools.cycle(MARKERS), strict=False)
    styles = {method: {"color": color, "marker": marker} for method, (color, marker) in zip(points, looks, strict=True)}
    drawn = {f"by-{name.replace('/', '-')}": _axis_plot(points, axis, axes, styles) for name, axis in axes.items()}
    for method, own in points.items():
        figure = draw_pairs(method, own, axes_of(own))
        if figure is not None:
            drawn[f"pairs-{method}"] = figure
    return drawn


def _axis_plot(
    points: Mapping[str, Sequence[Point]], axis: Axis, axes: Mapping[str, Axis], styles: Mapping[str, dict[str, Any]]
) -> Any:
    """Plot the methods' scores along one axis, on validation examples (if there are any) and on test examples."""
    every = {method: along(own, axis, axes) for method, own in points.items()}
    series = {method: own for method, own in every.items() if own.picked}  # only the methods that have this axis
    headline = next((point.headline for own in points.values() for point in own), ACCURACY)
    parts = [True]
    if any(math.isfinite(point.validation.mean) for method in series for point in points[method]):
        parts = [False, True]
    figure, panels = _new_panels(len(parts), _about(headline.words, axis, axes, points, series), len(series) + 5)
    for panel, test in zip(panels, parts, strict=True):
        set_scale(panel, axis)
        _lines(panel, series, axis, styles, test)
        entitle(panel, _PARTS[test])
        panel.set_xlabel(literal(axis.name))
        panel.yaxis.set_major_formatter(headline.ticks)
    panels[0].set_ylabel(f"{headline.words}, mean over clients and seeds")
    _add_legend(figure, panels[0], series)
    return figure


_PARTS = {False: "validation, chosen by", True: "test"}


def _about(
    words: str,
    axis: Axis,
    axes: Mapping[str, Axis],
    points: Mapping[str, Sequence[Point]],
    series: Mapping[str, Series],
) -> str:
    """Return the title of a plot along one axis; it explains which settings are shown if other axes vary too."""
    there = {name for method in series for point in points[method] for name in point.settings}
    others = ", ".join(name for name in axes if name != axis.name and name in there)
    title = f"{words[0].upper()}{words[1:]} by {axis.name}"
    if not others:
        return title
    every = any(own.every for own in series.values())
    return title + (f"; every setting, with any {others}" if every else f"; the best over {others} on validation")


def _lines(
    panel: Any, series: Mapping[str, Series], axis: Axis, styles: Mapping[str, dict[str, Any]], test: bool
) -> None:
    """Draw a line for each method with a band of one standard deviation, and a ring at the method's chosen setting."""
    for method, own in series.items():
        shown = [(axis.places[number], point) for number, point in own.picked]
        x = [place for place, _ in shown]
        mean = np.array([_score_value(point, test) for _, point in shown])
        std = np.array([point.headline.scale * (point.test if test else point.validation).std for _, point in shown])
        style = {**styles[method], "linewidth": 1.6, "markersize": 5 if len(x) <= 15 else 3.5}
        panel.plot(x, mean, label=method, **style, linestyle="-" if own.joined else "none")
        color, std = style["color"], np.nan_to_num(std)
        if own.joined and len(x) > 1:
            panel.fill_between(x, mean - std, mean + std, color=color, alpha=0.12, linewidth=0)
        elif std.any():
            panel.errorbar(x, mean, std, fmt="none", ecolor=color, alpha=0.5, capsize=2)
        for place, point in shown:
            if point.chosen:
                panel.plot(place, _score_value(point, test), "o", markersize=12, zorder=5, **RING)


_DECADE = 10


class Score(NamedTuple):
    """Mean and standard deviation of a score over seeds; NaN for a missing value."""

    mean: float = math.nan
    std: float = math.nan


class Point(NamedTuple):
    """One setting of a method, with its scores.

    Attributes:
      settings: axis name -> value.
      status: status of the runs with this setting.
      chosen: whether the setting is chosen for the method.
      validation, test: scores on validation and test examples, averaged over clients.
      headline: metric of the scores.
    """

    settings: Mapping[str, Value]
    status: str
    chosen: bool
    validation: Score
    test: Score
    headline: Headline = ACCURACY


def points_of(summary: Mapping[str, Any]) -> dict[str, list[Point]]:
    """Return the settings of each method in a sweep's summary, with their scores."""
    found: dict[str, list[Point]] = {}
    headline = stored_headline(summary)
    best = chosen_settings(summary)
    for row in summary["rows"]:
        chosen = (row["method"], setting_key(row["settings"])) in best
        point = Point(
            row["settings"],
            row["status"],
            chosen,
            Score(*np.array([row[headline.validation], row["validation_std"]], float)),
            Score(*np.array([row[headline.personalized][name] for name in ("mean", "std")], float)),
            headline,
        )
        found.setdefault(row["method"], []).append(point)
    return found


@dataclass(frozen=True)
class Axis:
    """Axis of a plot for a setting that varies.

    Attributes:
      name: name of the setting.
      values: numbers in ascending order, followed by other values in the order of the grid.
      scale: ``log``, ``linear``, or ``even`` to draw all values at equal distances.
    """

    name: str
    values: tuple[Value, ...]
    scale: str

    @cached_property
    def places(self) -> list[float]:
        """Coordinate of each value on the plot's axis."""
        if self.scale == "even":
            return [float(i) for i in range(len(self.values))]
        return [float(value) for value in self.values]

    @property
    def words(self) -> list[str]:
        """Short string for each value: four significant digits of a float, the last characters of a long string."""
        texts = (f"{value:.4g}" if isinstance(value, float) else value_words(value) for value in self.values)
        return [text if len(text) <= 14 else f"...{text[-12:]}" for text in texts]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Map from the JSON string of a value to the value's index in ``values``."""
        return {json.dumps(value): number for number, value in enumerate(self.values)}


def axes_of(points: Iterable[Point]) -> dict[str, Axis]:
    """Return the axes on which the points have several values, by name."""
    found: dict[str, dict[str, Value]] = {}
    for point in points:
        for name, value in point.settings.items():
            found.setdefault(name, {})[json.dumps(value)] = value
    return {name: _axis(name, list(values.values())) for name, values in found.items() if len(values) > 1}


def _axis(name: str, values: Sequence[Value]) -> Axis:
    numbers = sorted(value for value in values if isinstance(value, int | float) and not isinstance(value, bool))
    if len(numbers) < len(values):
        return Axis(name, (*numbers, *(v for v in values if isinstance(v, str | bool))), "even")
    # If a value is 0 or negative and the others span decades, neither a linear nor a log axis can separate them.
    spread = [abs(value) for value in numbers if value]
    decades = bool(spread) and max(spread) > _DECADE * min(spread)
    return Axis(name, tuple(numbers), "linear" if not decades else "log" if min(numbers) > 0 else "even")


class Series(NamedTuple):
    """Settings of a method that are plotted along an axis.

    Attributes:
      picked: (index of the value, setting) for each plotted setting, in the order of the values. If ``every`` is False,
        only the setting with the best validation score is plotted for each value. Settings without finished runs are
        left out.
      joined: whether a line joins the points, because the values are numbers and each has one setting.
      every: whether all settings are plotted, because they are drawn from ranges or have no validation scores.
    """

    picked: list[tuple[int, Point]]
    joined: bool
    every: bool


def along(points: Sequence[Point], axis: Axis, axes: Mapping[str, Axis]) -> Series:
    """Choose the settings of a method to plot along an axis (see `Series`)."""
    groups: dict[int, list[Point]] = {}
    for point in points:
        if axis.name in point.settings:
            groups.setdefault(axis.numbers[json.dumps(point.settings[axis.name])], []).append(point)
    several = any(len(group) > 1 for group in groups.values())
    unscored = all(math.isnan(point.validation.mean) for point in points)
    every = is_drawn(points, axes) or (several and unscored)
    split = [(n, [one]) for n in sorted(groups) for one in groups[n]] if every else sorted(groups.items())
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in axis.values)
    picked = [(n, best) for n, group in split if (best := best_of(group)) is not None]
    return Series(picked, numbers and not every, every)


def best_of(points: Sequence[Point]) -> Point | None:
    """Return the setting with the best validation score; None if no setting is finished.

    The sweep's chosen setting counts as the best. If there are several settings without validation scores, return None.
    """
    done = [point for point in points if point.status == DONE]
    scored = done if len(done) == 1 else [point for point in done if not math.isnan(point.validation.mean)]
    return max(scored, key=lambda one: (one.chosen, one.headline.better(one.validation.mean)), default=None)


def is_drawn(points: Sequence[Point], axes: Mapping[str, Axis]) -> bool:
    """Return whether settings seem to be drawn from ranges: they are fewer than half of all combinations of values."""
    sizes = [len({json.dumps(p.settings[name]) for p in points if name in p.settings}) for name in axes]
    return len(points) > 1 and sum(size > 1 for size in sizes) > 1 and 2 * len(points) < math.prod(filter(None, sizes))


MARKERS = "os^DvPX<>hp*"
"""Markers of the methods' lines, so that lines can be told apart without colors."""
RING = {"markerfacecolor": "none", "markeredgecolor": INK, "markeredgewidth": 1.4}
"""Style of the ring around a chosen setting."""
_MOST_TICKS = 12


def _new_panels(count: int, title: str, beside: int) -> tuple[Any, list[Any]]:
    """Return a figure with a row of panels, and the panels.

    Args:
      count: number of panels.
      title: title of the figure.
      beside: number of lines in the legend on the right; the figure is tall enough for them.
    """
    from matplotlib.figure import Figure

    width = 6.4 * count + 1.6
    figure = Figure(figsize=(width, max(4.4, 1.2 + 0.23 * beside)), layout="constrained")
    axes = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    figure.suptitle("\n".join(textwrap.wrap(literal(title), int(9 * width))), x=0.01, ha="left", fontsize=11)
    for one in axes:
        plain(one)
    return figure, list(axes)


def set_scale(panel: Any, axis: Axis) -> None:
    """Set the scale, limits and ticks of a panel's horizontal axis."""
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    places = axis.places
    if axis.scale == "log":
        panel.set_xscale("log")
        margin = (places[-1] / places[0]) ** 0.05
        panel.set_xlim(places[0] / margin, places[-1] * margin)
    else:
        margin = 0.05 * (places[-1] - places[0])
        panel.set_xlim(places[0] - margin, places[-1] + margin)
    if axis.scale == "even" or len(places) <= _MOST_TICKS:
        words = [literal(word) for word in axis.words]
        slanted = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if sum(map(len, words)) > 36 else {}
        panel.xaxis.set_major_locator(FixedLocator(places))
        panel.set_xticks(places, words, fontsize=9 if len(words) <= _MOST_TICKS else 7, **slanted)
        panel.xaxis.set_minor_locator(NullLocator())
    else:
        panel.xaxis.set_minor_formatter(NullFormatter())


def _add_legend(figure: Any, panel: Any, series: Mapping[str, Series]) -> None:
    """Add a legend of the lines and markers on the right of the panels."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = panel.get_legend_handles_labels()[0]
    shown = [point for own in series.values() for _, point in own.picked]
    if any(math.isfinite(point.test.std) for point in shown):
        handles.append(Patch(color="#888888", alpha=0.3, linewidth=0, label="± 1 standard\ndeviation over\nseeds"))
    if any(point.chosen for point in shown):
        handles.append(Line2D([], [], marker="o", markersize=10, label="chosen", linestyle="none", **RING))
    figure.legend(handles=handles, frameon=False, loc="outside right upper", fontsize=9)


_MOST_WRITTEN = 15
"""Maximum number of columns of a heat map whose values are written into the cells."""
_FRAME = "#d8433f"


def draw_pairs(method: str, points: Sequence[Point], axes: Mapping[str, Axis]) -> Any:
    """Draw heat maps of a method's validation and test scores over each pair of axes, at most six pairs.

    If there are more than two axes, a cell shows the setting with the best validation score over the other axes.

    Args:
      method: name of the method.
      points: settings of the method.
      axes: axes on which the settings vary, by name.

    Returns:
      The matplotlib figure; None if there are fewer than two axes or no scores, or if settings are drawn from ranges.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    pairs = list(itertools.combinations(axes.values(), 2))[:6]
    # The axis with more values is horizontal.
    pairs = [(x, y) if len(x.values) >= len(y.values) else (y, x) for x, y in pairs]
    cells = [_best_cells(points, x, y) for x, y in pairs]
    shown = [point for of_pair in cells for point in of_pair.values() if point is not None]
    headline = next((point.headline for point in points), ACCURACY)
    finite = [score for point in shown for score in (_score_value(point, test) for test in (False, True))]
    finite = [score for score in finite if math.isfinite(score)]
    if not finite or is_drawn(points, axes):
        return None
    parts = [False, True] if any(math.isfinite(_score_value(point, False)) for point in shown) else [True]
    heights = [min(1.7 + 0.36 * len(y.values), 9.0) for _, y in pairs]
    wide = min(max(0.56 * max(len(x.values) for x, _ in pairs), 3.0), 9.0)
    width, height = len(parts) * (wide + 0.9) + 0.9, sum(heights) + 0.7
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(len(pairs), len(parts), squeeze=False, height_ratios=heights)
    figure.suptitle(_title(method, points, len(axes), width), x=0.01, ha="left", fontsize=11)
    norm = Normalize(min(finite), max(finite))
    for row, (x, y), of_pair in zip(panels, pairs, cells, strict=True):
        for panel, test in zip(row, parts, strict=True):
            _cells(panel, of_pair, x, y, test, norm)
            panel.set_xlabel(literal(x.name))
            panel.set_ylabel(literal(y.name))
            entitle(panel, _PARTS[test])
    bar = {"label": headline.words, "format": headline.ticks, "aspect": height / 0.15}
    figure.colorbar(ScalarMappable(norm, "viridis"), ax=panels, **bar)
    return figure


def _score_value(point: Point, test: bool) -> float:
    """Return the mean score of a setting, in percent if the metric is shown in percent."""
    return point.headline.scale * (point.test if test else point.validation).mean


def _title(method: str, points: Sequence[Point], count: int, width: float) -> str:
    text = f"{method}, mean over clients and seeds"
    if any(point.chosen for point in points):
        text += "; framed: the chosen setting"
    if count > 2:
        text += "; a cell is the best over the other axes on validation"
    return "\n".join(textwrap.wrap(literal(text), int(9 * width)))


def _best_cells(points: Sequence[Point], x: Axis, y: Axis) -> dict[tuple[int, int], Point | None]:
    """Return the best setting of each cell (y, x) that has settings; None for a cell without finished settings."""
    groups: dict[tuple[int, int], list[Point]] = {}
    for point in points:
        if x.name in point.settings and y.name in point.settings:
            i, j = (axis.numbers[json.dumps(point.settings[axis.name])] for axis in (y, x))
            groups.setdefault((i, j), []).append(point)
    return {at: best_of(group) for at, group in groups.items()}


def _cells(panel: Any, cells: Mapping[tuple[int, int], Point | None], x: Axis, y: Axis, test: bool, norm: Any) -> None:
    """Draw one heat map: the score of each cell's best setting; cells without finished settings are hatched."""
    from matplotlib.patches import Rectangle

    values = np.full((len(y.values), len(x.values)), np.nan)
    written = len(x.values) <= _MOST_WRITTEN
    small = 9 if len(x.values) <= 9 else 7
    for (i, j), best in cells.items():
        if best is None:
            panel.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor="#eeeeee", edgecolor="#bbbbbb", hatch="///"))
            continue
        values[i, j] = _score_value(best, test)
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
