"""Plots of the map: every method in every cell, and the best method by examples and classes."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.support.console import INK, save, signed

from .atlas import Atlas, Place
from .verdicts import lead, verdict

COMMAND = "jaxpfl winners run"
_WORST = 10.0
"""Difference in percentage points at which the color scale ends."""


def draw(atlas: Atlas, folder: Path) -> list[Path]:
    """Write ``who-wins.png``, a heat map of all cells, and ``who-wins-examples.png``, winners by n and classes."""
    with signed(COMMAND):
        return [save(_all(atlas), folder, "who-wins"), save(_by_examples(atlas), folder, "who-wins-examples")]


def _all(atlas: Atlas) -> Any:
    """Draw cells as rows and methods as columns; the color is the difference in points from the best method on test."""
    from matplotlib.figure import Figure

    methods = list(dict.fromkeys(n for p in atlas.places for n, own in p.methods.items() if not own.reference))
    places, labels = list(atlas.places), [_label(place) for place in atlas.places]
    values = np.full((len(places), len(methods)), np.nan)
    figure = Figure(figsize=(3.6 + 0.85 * len(methods), 1.6 + 0.25 * len(places)), layout="constrained")
    axes = figure.subplots()
    for row, place in enumerate(places):
        found = verdict(place)
        for column, name in enumerate(methods):
            if name not in place.methods:
                continue
            over = lead(place, found.best, name)
            values[row, column] = behind = over.points
            text = f"best {found.accuracy:.1f}"
            if name != found.best:
                text = f"{-behind:+.1f}{' =' * over.level}"
            weight = "bold" if name == found.best else "normal"
            color = "white" if behind > 0.55 * _WORST else INK
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color=color, fontweight=weight)
    axes.imshow(values, cmap="YlOrRd", vmin=0, vmax=_WORST, aspect="auto", interpolation="none")
    axes.set_xticks(range(len(methods)), methods, fontsize=8)
    axes.set_yticks(range(len(places)), labels, fontsize=7)
    axes.tick_params(length=0, labeltop=True)
    for row in range(1, len(places)):
        if (places[row].data, places[row].model) != (places[row - 1].data, places[row - 1].model):
            axes.axhline(row - 0.5, color=INK, linewidth=1)
    axes.spines[:].set_visible(False)
    title = "Points of test accuracy to the method that validation chose (best: its accuracy, %)\n"
    figure.suptitle(f"{title}=: level, the paired 95 % interval over {atlas.splits} splits holds zero", fontsize=9)
    return figure


def _label(place: Place) -> str:
    own = place.measures
    rest = [f"K/m {place.share:g}"] if place.share < 1 else []
    rest += [] if place.epsilon is None else [f"eps {place.epsilon:g}"]
    sizes = f"m {own.clients}, n {own.examples:g}, {place.heterogeneity}, {place.steps} steps"
    return ", ".join([f"{place.data} {place.model}: {sizes}", *rest])


def _by_examples(atlas: Atlas) -> Any:
    """Draw, for each data set and model, the best method and its lead over local by n and classes."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    sets = [one for one in dict.fromkeys((p.data, p.model) for p in atlas.places) if _grid(atlas, *one)]
    figure = Figure(figsize=(4.6 * max(len(sets), 1), 3.4), layout="constrained")
    norm = Normalize(-_WORST, _WORST)
    panels = figure.subplots(1, max(len(sets), 1), squeeze=False)[0]
    for axes, (data, model) in zip(panels, sets, strict=False):
        grid = _grid(atlas, data, model)
        columns = sorted({n for n, _ in grid})
        rows = sorted({classes for _, classes in grid})
        for (n, classes), place in grid.items():
            x, y = columns.index(n), rows.index(classes)
            found = verdict(place)
            over = found.over("local")
            points = 0.0 if over is None else over.points
            said = "" if over is None else f"\n{over.points:+.1f} ± {over.half_width:.1f}"
            box = {"facecolor": _shade(norm(points)), "edgecolor": "white"}
            axes.add_patch(_square(x, y, box))
            ink = "white" if abs(points) > 0.6 * _WORST else INK
            axes.text(x, y, found.best + said, ha="center", va="center", fontsize=8, color=ink)
        axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(-0.5, len(rows) - 0.5))
        axes.set_xticks(range(len(columns)), [str(n) for n in columns])
        axes.set_yticks(range(len(rows)), ["iid" if c == 10 else f"{c} classes" for c in rows])
        axes.set_xlabel("labeled examples of a client")
        axes.set_title(f"{data}, {model}", loc="left", fontsize=10, fontweight="bold")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    title = "Best method, chosen on validation,\nand its lead over local training on test"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    figure.colorbar(ScalarMappable(norm, "PuOr"), ax=list(panels), label="points over local", aspect=30)
    return figure


def _square(x: int, y: int, box: dict[str, Any]) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.5, y - 0.5), 1, 1, **box)


def _shade(value: float) -> Any:
    from matplotlib import colormaps

    return colormaps["PuOr"](value)


def _grid(atlas: Atlas, data: str, model: str) -> dict[tuple[int, int], Place]:
    """Return cells by examples and classes, at the most frequent other settings; empty if below two by two."""
    from .cells import CELLS

    declared = {cell.name: cell for cell in CELLS}
    found: dict[tuple[Any, ...], dict[tuple[int, int], Place]] = defaultdict(dict)
    for place in atlas.places:
        cell = declared.get(place.name)
        if cell is None or (place.data, place.model) != (data, model):
            continue
        if cell.examples is None or not set(cell.varies) <= {"examples", "heterogeneity"}:
            continue
        classes = {"iid": 10}.get(place.partition, cell.split.get("classes_per_client"))
        if classes is not None:
            found[cell.clients, cell.share, cell.steps, cell.epsilon][cell.examples, classes] = place
    most = max(found.values(), key=len, default={})
    return most if len({n for n, _ in most}) > 1 and len({c for _, c in most}) > 1 else {}
