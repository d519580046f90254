"""Display of the map and of a recommendation on the terminal."""

from __future__ import annotations

from typing import Any

from jaxpfl.support.console import filled, new_table

from .atlas import Atlas, Place
from .recommend import Recommendation
from .verdicts import BASELINES, Verdict, verdict

_CAPTION = "leads in points of test accuracy, with 95 % intervals paired over splits; level: the interval contains zero"


def print_atlas(console: Any, atlas: Atlas) -> None:
    """Print a line for each cell."""
    table = new_table("which method wins where" + " [QUICK RUN, shows nothing]" * atlas.quick, _CAPTION)
    for name in ("cell", "best", "test, %", *(f"over {name}" for name in BASELINES)):
        table.add_column(name, justify="right" if name == "test, %" else "left", no_wrap=name != "cell")
    for place in atlas.places:
        found = verdict(place)
        table.add_row(settings(place), found.best, f"{found.accuracy:.1f}", *_leads(found))
    console.print(table)


def print_recommendation(console: Any, found: Recommendation) -> None:
    """Print a federation's measures, its nearest cells, and the commands to run."""
    asked, own = found.asked, found.asked.measures
    first, *others = _said(found)
    console.print(first, highlight=False, soft_wrap=True)
    console.print(
        f"{own.clients} clients of {own.examples:g} labeled examples and {own.classes:g} of {own.num_classes} classes "
        f"(medians); label skew {own.skew:.2f}; {found.cohort} clients in a round; model {asked.model}",
        highlight=False,
        soft_wrap=True,
    )
    table = new_table("nearest cells of the map", _CAPTION)
    for name in ("cell", "distance", "best", "test, %", *(f"over {name}" for name in BASELINES)):
        table.add_column(name, justify="right" if name in ("distance", "test, %") else "left", no_wrap=name != "cell")
    for near, one in found.near:
        row = settings(near.place), f"{near.distance:.1f}", one.best, f"{one.accuracy:.1f}"
        table.add_row(*row, *_leads(one))
    console.print(table)
    for line in others:
        print("\n".join(filled(line)))
    print(f"\n{found.commands.compare}\n\nto choose the rates on these data first:\n{found.commands.sweep}")


def settings(place: Place) -> str:
    """Return a description of a cell's settings."""
    own = place.measures
    rest = [f"K/m {place.share:g}"] if place.share < 1 else []
    rest += [] if place.epsilon is None else [f"epsilon {place.epsilon:g}"]
    numbers = f"m {own.clients}, n {own.examples:g}, {place.heterogeneity} (skew {own.skew:.2f}), {place.steps} steps"
    return ", ".join([f"{place.data} {place.model}: {numbers}", *rest])


def _leads(found: Verdict) -> list[str]:
    leads = [found.over(name) for name in BASELINES]
    return ["is the best" if found.best == name else _words(lead) for name, lead in zip(BASELINES, leads, strict=True)]


def _words(lead: Any) -> str:
    return "-" if lead is None else lead.words


def _said(found: Recommendation) -> list[str]:
    best = found.near[0][1]
    lines = [f"recommended: {found.method}, the best method of the nearest cell{' (which is far)' * found.far}"]
    if best.level_with:
        lines[0] += f" (on test examples there, level with it or ahead: {', '.join(best.level_with)})"
    if found.far:
        lines.append(
            f"FAR: the nearest cell is {found.near[0][0].distance:.1f} away, so that the map says little about these "
            "data"
        )
    lines += [f"outside the map: {text}" for text in found.beyond]
    return [*lines, *(f"caveat: {text}" for text in found.caveats)]
