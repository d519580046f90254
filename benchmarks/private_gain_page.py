"""Tables of docs/records/privacy.md on the gain from collaboration, made from the record of ``private_gain``.

    python benchmarks/private_gain_page.py

writes the tables into the page.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:
    import _script

    __package__ = _script.package

from .adaped_plus_page import between, lead

BEGIN = "<!-- measured: python benchmarks/private_gain_page.py -->"

Scores = Mapping[str, Mapping[float | None, Sequence[float]]]
"""Contender -> epsilon (None for a control that sends nothing) -> test accuracy on each split, in %."""


def with_tables(page: str, record: Mapping[str, Any]) -> str:
    """Return the page with its tables replaced by the tables of a record."""
    return between(page, BEGIN, tables(record))


def tables(record: Mapping[str, Any]) -> str:
    """Return a table for each data set: accuracy by epsilon, and the lead over the best control."""
    problems = record["settings"]["problems"]
    found = {data: scores_of(record["results"], data) for data in problems}
    return "\n\n".join(
        f"### {data}, {problems[data]['clients']} clients\n\n{_table(own)}" for data, own in found.items() if own
    )


def scores_of(results: Mapping[str, Any], data: str) -> Scores:
    """Return the accuracies of the contenders on a data set, by split."""
    scores: dict[str, dict[float | None, list[float]]] = {}
    for key, rows in results.items():
        of, _, name = key.split(" ", 2)
        if of == data:
            for row in rows:
                scores.setdefault(name, {}).setdefault(row["epsilon"], []).append(row["test"])
    return scores


def best_control(scores: Scores, epsilon: float, *, public: bool) -> tuple[str, Sequence[float]]:
    """Return the control with the best mean on test examples, a choice that favors the controls.

    Args:
      scores: scores on a data set.
      epsilon: epsilon of the private controls.
      public: whether controls may start from public examples.
    """
    controls = {
        name: own.get(None) or own[epsilon]
        for name, own in scores.items()
        if (None in own or "learns nothing" in name) and (public or not _is_public(name))
    }
    return max(controls.items(), key=lambda item: statistics.fmean(item[1]))


def _is_public(name: str) -> bool:
    return "public start" in name


def _table(scores: Scores) -> str:
    epsilons = sorted({epsilon for own in scores.values() for epsilon in own if epsilon is not None})
    lines = [["", *(f"eps {epsilon:g}" for epsilon in epsilons)], ["---"] * (len(epsilons) + 1)]
    for name, own in scores.items():
        if None in own:
            lines.append([f"{name} (no eps)", *[_spread(own[None])] * len(epsilons)])
            continue
        lines.append([name, *(_cell(scores, name, own, epsilon) for epsilon in epsilons)])
    for public in (False, True):
        what = f"best control with{'' if public else 'out'} public examples"
        lines.append([what, *(best_control(scores, epsilon, public=public)[0] for epsilon in epsilons)])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _cell(scores: Scores, name: str, own: Mapping[float | None, Sequence[float]], epsilon: float) -> str:
    """Return the accuracy, and the paired lead over the best control with equally many public examples."""
    control, theirs = best_control(scores, epsilon, public=_is_public(name))
    if name == control or "learns nothing" in name or len(theirs) != len(own[epsilon]) or len(theirs) < 2:
        return _spread(own[epsilon])
    mean, half = lead(own[epsilon], theirs)
    shown = f"{_spread(own[epsilon])} ({mean:+.1f} ± {half:.1f})"
    return f"**{shown}**" if mean > half else shown


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.1f}"


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    stored = json.loads((here / "results" / "private_gain_cpu2.json").read_text())
    page = here.parent / "docs" / "records" / "privacy.md"
    page.write_text(with_tables(page.read_text(), stored))
