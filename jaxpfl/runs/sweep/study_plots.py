"""Plots of a sweep over a study of estimation: the errors of its estimators."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpfl.support.presentation import entitle, literal, shades
from jaxpfl.runs.sweep.panels import MARKERS, Marks, add_legend, new_panels, set_scale
from jaxpfl.runs.sweep.points import Axis, Point, Score
from jaxpfl.runs.sweep.tables import setting_words

_MOST_LINES, _MOST_PANELS = 12, 3


def draw_study(points: Mapping[str, Sequence[Point]], axis: Axis) -> Any:
    """Errors of estimators over one axis, in a panel for each setting of the other axes."""
    panels: dict[str, dict[str, list[tuple[float, Score]]]] = {}
    for method, own in points.items():
        for point in own:
            if axis.name not in point.settings:
                continue
            others = {name: value for name, value in point.settings.items() if name != axis.name}
            of_panel = panels.setdefault(": ".join(filter(None, (method, setting_words(others)))), {})
            place = axis.places[axis.number(point.settings[axis.name])]
            for name, score in point.metrics.items():
                if math.isfinite(score.mean) and not name.endswith("seconds"):
                    of_panel.setdefault(name, []).append((place, score))
    shown = dict(itertools.islice(panels.items(), _MOST_PANELS))
    names = list(dict.fromkeys(name for of_panel in shown.values() for name in of_panel))[:_MOST_LINES]
    title = f"Errors by {axis.name}"
    title += f"; the first {len(shown)} of {len(panels)} settings" * (len(panels) > len(shown))
    figure, drawn = new_panels(max(len(shown), 1), title, share=True, beside=len(names) + 3)
    scores = [score for of_panel in shown.values() for name in names for _, score in of_panel.get(name, ())]
    means = [score.mean for score in scores]
    decades = bool(means) and min(means) > 0 and max(means) > 10 * min(means)
    for panel, (setting, of_panel) in zip(drawn, shown.items(), strict=False):
        set_scale(panel, axis)
        for name, color, marker in zip(names, shades(len(names)), itertools.cycle(MARKERS), strict=False):
            series = sorted(of_panel.get(name, ()))
            x, mean = [place for place, _ in series], np.array([score.mean for _, score in series])
            std = np.nan_to_num([score.std for _, score in series])
            panel.plot(x, mean, label=literal(name), color=color, marker=marker, markersize=5, linewidth=1.6)
            low = np.maximum(mean - std, mean / 10) if decades else mean - std
            panel.fill_between(x, low, mean + std, color=color, alpha=0.12, linewidth=0)
        if decades:
            panel.set_yscale("log")
        entitle(panel, "\n".join(textwrap.wrap(literal(setting), 44)))
        panel.set_xlabel(literal(axis.name))
    drawn[0].set_ylabel("mean over seeds")
    add_legend(figure, drawn[0], Marks(any(math.isfinite(score.std) for score in scores), False))
    return figure
