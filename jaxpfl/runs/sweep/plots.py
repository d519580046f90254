"""Plots of a sweep: each axis, pairs of axes, the chosen settings, and the number of clients."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.runs.scores import ACCURACY, Headline
from jaxpfl.runs.sweep.heatmaps import draw_pairs
from jaxpfl.runs.sweep.panels import BAD, MARKERS, RING, Marks, add_legend, new_panels, set_scale
from jaxpfl.runs.sweep.points import Axis, Point, Score, Series, along, axes_of, points_of
from jaxpfl.runs.sweep.tables import setting_words
from jaxpfl.support.console import GRID, entitle, literal, save, shades

Of = Callable[[Point], Score]


def write_plots(folder: Path, summary: Mapping[str, Any]) -> list[Path]:
    """Write `figures` as PNG files into a folder, and return their paths."""
    return [save(figure, folder, name) for name, figure in figures(summary).items()]


def figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Plots of a sweep.

    ``by-AXIS`` for each axis that varies: validation and test accuracy of each method, at each value with the best
    of the other settings on validation. ``pairs-METHOD`` for two axes and more: heat maps. ``methods``: the
    chosen settings. ``clients`` where the number of clients varies: accuracy, seconds and bytes against it.

    Args:
      summary: as `summarize` gives it.

    Returns:
      name -> matplotlib figure.
    """
    points = points_of(summary)
    every = list(itertools.chain(*points.values()))
    axes = axes_of(every)
    if not summary["best"] and not any(math.isfinite(point.test.mean) for point in every):
        return {}
    looks = zip(shades(len(points)), itertools.cycle(MARKERS), strict=False)
    styles = {method: {"color": color, "marker": marker} for method, (color, marker) in zip(points, looks, strict=True)}
    drawn = {_named(axis): _by_axis(points, axis, axes, styles) for axis in axes.values()}
    for method, own in points.items():
        figure = draw_pairs(method, own, axes_of(own))
        if figure is not None:
            drawn[f"pairs-{method}"] = figure
    if any(point.chosen for point in every):
        drawn["methods"] = _methods(points, styles)
    if "clients" in axes:
        drawn["clients"] = _clients(points, axes["clients"], axes, styles)
    return drawn


def _named(axis: Axis) -> str:
    return f"by-{axis.name.replace('/', '-')}"


def _validation(point: Point) -> Score:
    return point.validation


def _test(point: Point) -> Score:
    return point.test


def _by_axis(
    points: Mapping[str, Sequence[Point]], axis: Axis, axes: Mapping[str, Axis], styles: Mapping[str, dict[str, Any]]
) -> Any:
    """Score over one axis: on validation examples, and on test."""
    series, headline = _series(points, axis, axes), _headline(points)
    parts = [("test", _test)]
    if any(math.isfinite(point.validation.mean) for method in series for point in points[method]):
        parts = [("validation, chosen by", _validation), *parts]
    figure, panels = new_panels(len(parts), _about(axis, axes, points, series), share=True, beside=len(series) + 5)
    for panel, (name, of) in zip(panels, parts, strict=True):
        set_scale(panel, axis)
        _lines(panel, series, axis, styles, of, headline.scale)
        entitle(panel, name)
        panel.set_xlabel(literal(axis.name))
        panel.yaxis.set_major_formatter(headline.ticks)
    panels[0].set_ylabel(f"{headline.words}, mean over clients and seeds")
    bad = _mark_bad(panels, series, axis, styles)
    add_legend(figure, panels[0], _marks(series), bad)
    return figure


def _series(points: Mapping[str, Sequence[Point]], axis: Axis, axes: Mapping[str, Axis]) -> dict[str, Series]:
    """The settings along an axis, of the methods that it concerns."""
    found = {method: along(own, axis, axes) for method, own in points.items()}
    return {method: series for method, series in found.items() if series.picked}


def _marks(series: Mapping[str, Series]) -> Marks:
    shown = [one.point for own in series.values() for one in own.picked if one.point is not None]
    return Marks(any(math.isfinite(p.test.std) for p in shown), any(p.chosen for p in shown))


def _about(
    axis: Axis, axes: Mapping[str, Axis], points: Mapping[str, Sequence[Point]], series: Mapping[str, Series]
) -> str:
    """Title of a plot over one axis: what stands for a value where others vary too."""
    there = {name for method in series for point in points[method] for name in point.settings}
    others = ", ".join(name for name in axes if name != axis.name and name in there)
    words = _headline(points).words
    title = f"{words[0].upper()}{words[1:]} by {axis.name}"
    if not others:
        return title
    every = any(own.every for own in series.values())
    return title + (f"; every setting, whatever its {others}" if every else f"; the best over {others} on validation")


def _lines(
    panel: Any,
    series: Mapping[str, Series],
    axis: Axis,
    styles: Mapping[str, dict[str, Any]],
    of: Of,
    scale: float = 1,
) -> None:
    """A line for each method with a band of one standard deviation, and a ring at its chosen setting."""
    for method, own in series.items():
        shown = [(axis.places[one.number], one.point) for one in own.picked if one.point is not None]
        x, scores = [place for place, _ in shown], [of(point) for _, point in shown]
        mean, std = (scale * np.array([score[i] for score in scores]) for i in range(2))
        style = {**styles[method], "linewidth": 1.6, "markersize": 5 if len(x) <= 15 else 3.5}
        panel.plot(x, mean, label=method, **style, linestyle="-" if own.joined else "none")
        color, std = style["color"], np.nan_to_num(std)
        if own.joined and len(x) > 1:
            panel.fill_between(x, mean - std, mean + std, color=color, alpha=0.12, linewidth=0)
        elif std.any():
            panel.errorbar(x, mean, std, fmt="none", ecolor=color, alpha=0.5, capsize=2)
        for place, point in shown:
            if point.chosen:
                panel.plot(place, scale * of(point).mean, "o", markersize=12, zorder=5, **RING)


def _headline(points: Mapping[str, Sequence[Point]]) -> Headline:
    """The metric of the scores."""
    return next((point.headline for own in points.values() for point in own), ACCURACY)


def _mark_bad(
    panels: Sequence[Any], series: Mapping[str, Series], axis: Axis, styles: Mapping[str, dict[str, Any]]
) -> list[str]:
    """Mark the values at which no setting is done, in a row for each method at the foot of panels that share an axis.

    Returns:
      The statuses that were marked.
    """
    bad = {m: [one for one in own.picked if one.point is None and one.status in BAD] for m, own in series.items()}
    bad = {method: own for method, own in bad.items() if own}
    if not bad:
        return []
    step, size = min(0.045, 0.25 / len(bad)), 6 if len(bad) <= 6 else 4
    low, high = panels[0].get_ylim()
    panels[0].set_ylim(high - (high - low) / (1 - step * (len(bad) + 0.6)), high)
    for panel, (row, (method, own)) in itertools.product(panels, enumerate(bad.items())):
        for status in {one.status: None for one in own}:
            x = [axis.places[one.number] for one in own if one.status == status]
            height = [step * (row + 0.6)] * len(x)
            color, across = styles[method]["color"], panel.get_xaxis_transform()
            panel.plot(x, height, BAD[status], markersize=size, markeredgewidth=1.5, color=color, transform=across)
    return sorted({one.status for own in bad.values() for one in own})


def _methods(points: Mapping[str, Sequence[Point]], styles: Mapping[str, dict[str, Any]]) -> Any:
    """The chosen setting of each method: its score on validation examples, hollow, and on test."""
    from matplotlib.lines import Line2D

    chosen = {method: point for method, own in points.items() for point in own if point.chosen}
    headline = _headline(points)
    scale = headline.scale
    figure, (axes,) = new_panels(1, "Chosen settings (bars: ± 1 standard deviation over seeds)", share=False)
    figure.set_size_inches(8.0, 1.7 + 0.45 * len(chosen))
    for place, (method, point) in enumerate(chosen.items()):
        for score, face, aside in ((point.validation, "white", -0.12), (point.test, None, 0.12)):
            style = {**styles[method], "markerfacecolor": face or styles[method]["color"], "markersize": 7}
            error = {"capsize": 3, "elinewidth": 1.4}
            axes.errorbar(scale * score.mean, place + aside, xerr=scale * np.nan_to_num(score.std), **style, **error)
    words = [(method, textwrap.shorten(setting_words(p.settings, method), 44)) for method, p in chosen.items()]
    axes.set_yticks(range(len(chosen)), ["\n".join(filter(None, (m, literal(text)))) for m, text in words], fontsize=9)
    axes.set_ylim(len(chosen) - 0.5, -0.5)
    axes.set_xlabel(f"{headline.words}, mean over clients and seeds")
    axes.xaxis.set_major_formatter(headline.ticks)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    look = {"marker": "o", "color": "#888888", "linestyle": "none", "markersize": 7}
    hollow = Line2D([], [], label="validation, chosen by", **{**look, "markerfacecolor": "white"})
    figure.legend(
        handles=[hollow, Line2D([], [], label="test", **look)], frameon=False, loc="outside lower left", ncols=2
    )
    return figure


def _clients(
    points: Mapping[str, Sequence[Point]], axis: Axis, axes: Mapping[str, Axis], styles: Mapping[str, dict[str, Any]]
) -> Any:
    """Score on test, seconds of a run and bytes sent up, against the number of clients."""
    from matplotlib.ticker import EngFormatter

    headline = _headline(points)
    sent = any(point.metrics.get("bytes_up", Score()).mean > 0 for own in points.values() for point in own)
    parts: list[tuple[str, Of]] = [(f"test {headline.words}", _test), ("seconds of a run, without compiling", _seconds)]
    parts += [("bytes up in a run, all clients", _bytes_up)] * sent
    series = _series(points, axis, axes)
    figure, panels = new_panels(len(parts), _about(axis, axes, points, series), share=False, beside=len(points) + 5)
    for panel, (name, of) in zip(panels, parts, strict=True):
        set_scale(panel, axis)
        _lines(panel, series, axis, styles, of, headline.scale if of is _test else 1)
        entitle(panel, name)
        panel.set_xlabel("number of clients")
        if of is _test:
            panel.yaxis.set_major_formatter(headline.ticks)
        else:
            _amounts(panel, series, of)
            panel.yaxis.set_major_formatter(EngFormatter("B" if of is _bytes_up else "s"))
    add_legend(figure, panels[0], _marks(series))
    return figure


def _amounts(panel: Any, series: Mapping[str, Series], of: Of) -> None:
    """Set the scale of an axis of amounts: powers if they span a decade, and else from zero."""
    amounts = [of(one.point).mean for own in series.values() for one in own.picked if one.point is not None]
    amounts = [amount for amount in amounts if amount > 0]
    if amounts and max(amounts) > 10 * min(amounts):
        panel.set_yscale("log")
    else:
        panel.set_ylim(bottom=0)


def _seconds(point: Point) -> Score:
    return Score(point.seconds)


def _bytes_up(point: Point) -> Score:
    """Bytes sent up; none for a method that sends nothing, which an axis of powers cannot show."""
    score = point.metrics.get("bytes_up", Score())
    return score if score.mean > 0 else Score()
