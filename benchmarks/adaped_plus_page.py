"""Tables of docs/records/adaped-plus.md, made from the records of ``adaped_plus``; imports nothing from the package.

    python benchmarks/adaped_plus_page.py

writes the tables into the page.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PLUS = "adaped-plus"
BEGIN, END = "<!-- measured: python benchmarks/adaped_plus_page.py -->", "<!-- end of measured -->"
HELD_OUT = "<!-- measured with --held-out: python benchmarks/adaped_plus_page.py -->"

Row = Mapping[str, Any]

_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""97.5 % quantile of Student's t distribution by number of runs; the degrees of freedom are one less."""


def with_tables(page: str, record: Mapping[str, Any], held_out: Mapping[str, Any]) -> str:
    """Replace the page's tables by tables of the two records; the second record is for the held-out data sets."""
    return between(between(page, HELD_OUT, held_out_tables(held_out)), BEGIN, tables(record))


def between(page: str, begin: str, text: str) -> str:
    """Return the page with ``text`` in place of everything between the mark ``begin`` and the next mark `END`."""
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(END)
    return f"{before}{begin}\n\n{text}\n\n{END}{after}"


def held_out_tables(record: Mapping[str, Any]) -> str:
    """Return the verdicts, methods and ablations for the data sets whose runs are complete."""
    reported = record["results"]["reported"]
    complete = [data for data in record["settings"]["cases"] if len(record["results"]["ablations"].get(data, ())) > 1]
    parts = [_verdicts(reported, complete), *(f"### {data}\n\n{_methods(reported[data])}" for data in complete)]
    return "\n\n".join([*parts, _ablations(record["results"])])


def tables(record: Mapping[str, Any]) -> str:
    """Return all tables in Markdown."""
    results = record["results"]
    cases, reported = record["settings"]["cases"], results["reported"]
    shown = [data for data in cases if data in reported]
    parts = [_verdicts(reported, shown), *(f"### {data}\n\n{_methods(reported[data])}" for data in shown)]
    parts.append("### Each ingredient\n\n" + _ablations(results))
    parts.append("### Every try\n\n" + _tries(results["search"], cases))
    return "\n\n".join(parts)


def lead(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the paired differences, and half the width of its 95 % interval."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    spread = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences), _T[len(differences)] * spread


def verdict(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return ``ahead``, ``level`` or ``behind``, depending on the interval of the lead."""
    mean, half = lead(ours, theirs)
    return "level" if abs(mean) <= half else "ahead" if mean > 0 else "behind"


def _verdicts(reported: Mapping[str, Sequence[Row]], data: Sequence[str]) -> str:
    lines = []
    for name in data:
        plus = _plus(reported[name])
        others = [row for row in reported[name] if row is not plus]
        said = {row["method"]: verdict(plus["accuracy"], row["accuracy"]) for row in others}
        columns = ([f"`{method}`" for method in said if said[method] == word] for word in ("ahead", "level", "behind"))
        lines.append([name, *(", ".join(column) or "none" for column in columns)])
    return _table([f"`{PLUS}` on", "is ahead of", "level with", "behind"], lines)


def _plus(rows: Sequence[Row]) -> Row:
    return next(row for row in rows if row["method"] == PLUS)


def _methods(rows: Sequence[Row]) -> str:
    plus = _plus(rows)
    lines = []
    for row in sorted(rows, key=lambda row: -statistics.fmean(row["accuracy"])):
        train, adapt = row["gradients"]
        cells = [
            f"`{row['method']}`",
            _setting(row),
            str(row["rounds"]),
            f"{train:.0f} + {adapt:.0f}",
            _spread(row["accuracy"]),
            f"{statistics.fmean(row['tenth']):.2f}",
            "" if row["global"] is None else _spread(row["global"]),
            "" if row is plus else _lead(plus["accuracy"], row["accuracy"]),
        ]
        lines.append(cells)
    heads = ["method", "chosen", "rounds", "gradients", "personalized", "p10", "global", f"{PLUS}'s lead"]
    return _table(heads, lines)


def _ablations(results: Mapping[str, Any]) -> str:
    data = [name for name in results["reported"] if name in results["ablations"]]
    plus = {name: _plus(results["reported"][name]) for name in data}
    labels = list(dict.fromkeys(row["label"] for name in data for row in results["ablations"][name]))
    lines = [["as chosen", *(_spread(plus[name]["accuracy"]) for name in data)]]
    for label in labels:
        cells = [label]
        for name in data:
            row = next((r for r in results["ablations"][name] if r["label"] == label), None)
            cells.append("" if row is None else _change(row["accuracy"], plus[name]["accuracy"]))
        lines.append(cells)
    return _table(["change", *data], lines)


def _tries(search: Mapping[str, Sequence[Row]], cases: Iterable[str]) -> str:
    data = [name for name in cases if name in search]
    keys = list(dict.fromkeys((row["method"], row["label"]) for name in data for row in search[name]))
    lines = []
    for method, label in keys:
        found = [[r for r in search[name] if (r["method"], r["label"]) == (method, label)] for name in data]
        one = next(rows[0] for rows in found if rows)
        lines.append([f"`{method}`", _setting(one), *(f"{r[0]['accuracy'][0]:.2f}" if r else "" for r in found)])
    return _table(["method", "try", *data], lines)


def _setting(row: Row) -> str:
    values = {**row["options"], **row["set"]}
    return ", ".join(
        f"{name} {value if isinstance(value, str) else format(value, 'g')}" for name, value in values.items()
    )


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"


def _lead(ours: Sequence[float], theirs: Sequence[float]) -> str:
    return f"{_change(ours, theirs)}: {verdict(ours, theirs)}"


def _change(ours: Sequence[float], theirs: Sequence[float]) -> str:
    mean, half = lead(ours, theirs)
    return f"{mean:+.2f} ± {half:.2f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    records = (
        json.loads((here / "results" / f"{name}.json").read_text())
        for name in ("adaped_plus_cpu2", "adaped_plus_held_out_cpu2")
    )
    page = here.parent / "docs" / "records" / "adaped-plus.md"
    page.write_text(with_tables(page.read_text(), *records))
