"""Tables of the map in Markdown, as shown in docs/records/who-wins.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .atlas import Atlas, Place
from .cells import CELLS
from .verdicts import Lead, Verdict, verdict

BEGIN, END = "<!-- from here: jaxpfl winners show --markdown -->", "<!-- to here -->"
_HEADER = (
    "m",
    "n",
    "clients differ by",
    "skew",
    "K/m",
    "steps",
    "eps",
    "best",
    "test, %",
    "lead over the second",
    "over local",
    "over fedavg-ft",
)


def tables(atlas: Atlas) -> str:
    """Return the map as sentences about its centers, counts of wins, and a table for each data set and model."""
    found = [(place, verdict(place)) for place in atlas.places]
    parts = ["\n".join(f"- {sentence(place)}" for place, _ in found if set(place.varies) <= {"clients"}), wins(found)]
    for data, model in dict.fromkeys((place.data, place.model) for place in atlas.places):
        own = [(place, one) for place, one in found if (place.data, place.model) == (data, model)]
        parts.append("\n".join([f"### {data}, {model}", "", *_rows(own)]))
    there = {place.name for place in atlas.places}
    left = Counter(f"{cell.data}, {cell.model}" for cell in CELLS if cell.name not in there and not atlas.quick)
    if left:
        counts = "; ".join(f"{name}: {count}" for name, count in left.items())
        parts.append(f"Cells that are declared and not measured yet: {counts}.")
    made = ", ".join(f"{name} {value}" for name, value in atlas.versions.items())
    parts.append(
        f"`{atlas.command}`: {atlas.minutes:g} minutes of programs, {len(atlas.places)} cells, {atlas.splits} splits; "
        f"{made}."
    )
    return "\n\n".join(parts) + "\n"


def wins(found: Iterable[tuple[Place, Verdict]]) -> str:
    """Return the numbers of cells in which each method is best, and in which it is level with or above the best."""
    found = list(found)
    best = Counter(one.best for _, one in found)
    level = Counter(name for _, one in found for name in one.level_with)
    there = Counter(name for place, _ in found for name in place.contenders)
    rows = [
        f"| {name} | {best[name]} | {best[name] + level[name]} | {there[name]} |"
        for name in sorted(there, key=lambda name: (-best[name], -level[name], name))
    ]
    head = ["| method | best on validation | best, or level with it or ahead on test | cells |", "|---|---:|---:|---:|"]
    return "\n".join([*head, *rows])


def sentence(place: Place) -> str:
    """Return a sentence on a cell's best method, its settings, and its leads in points of test accuracy."""
    found, size = verdict(place), place.measures
    about = f"{place.data}, {place.model}, {size.clients} clients of {size.examples:g} examples, {place.heterogeneity}"
    about += "" if place.share == 1 else f", K/m {place.share:g}"
    chosen = ", ".join(f"{name.rpartition('.')[2]} {value:g}" for name, value in _numbers(place, found.best))
    leads = [f"over {lead.over} {lead.words}" for lead in found.leads]
    return f"{about}: **{found.best}** ({chosen}) has {found.accuracy:.1f} %. Lead {', '.join(leads)}."


def _numbers(place: Place, method: str) -> list[tuple[str, float]]:
    return [(name, value) for name, value in place.methods[method].settings.items() if not isinstance(value, str)]


def _rows(found: Iterable[tuple[Place, Verdict]]) -> list[str]:
    lines = [f"| {' | '.join(_HEADER)} |", "|---:|---:|---|---:|---:|---:|---:|---|---:|---|---|---|"]
    return [*lines, *(f"| {' | '.join(_cells(place, one))} |" for place, one in found)]


def _cells(place: Place, found: Verdict) -> tuple[str, ...]:
    size = place.measures
    second = next((lead for lead in found.leads if lead.over == found.runner_up), None)
    return (
        str(size.clients),
        f"{size.examples:g}",
        place.heterogeneity,
        f"{size.skew:.2f}",
        f"{place.share:g}",
        str(place.steps),
        "" if place.epsilon is None else f"{place.epsilon:g}",
        found.best,
        f"{found.accuracy:.1f}",
        "" if second is None else f"{second.over}: {second.words}",
        _words(found.over("local")),
        _words(found.over("fedavg-ft")),
    )


def _words(lead: Lead | None) -> str:
    return "" if lead is None else lead.words
