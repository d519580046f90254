"""Tables of docs/records/robustness.md, made from the record of ``robust``; imports nothing from the package.

    python benchmarks/robust_page.py

writes the tables into the page.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- measured: python benchmarks/robust_page.py -->", "<!-- end of measured -->"

Row = Mapping[str, Any]


def with_tables(page: str, record: Mapping[str, Any]) -> str:
    """Return the page with its tables replaced by the tables of a record."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables(record)}\n\n{END}{after}"


def tables(record: Mapping[str, Any]) -> str:
    """Return a table for each method, with attacks by aggregations; a dash marks what was not measured."""
    by_method: dict[str, list[Row]] = {}
    for rows in record["results"].values():
        for row in rows:
            by_method.setdefault(row["method"], []).append(row)
    (local,) = by_method.pop("local")
    first = f"`local`, which receives nothing from the server: {_spread(local['personalized'])}."
    parts = [f"### `{name}`\n\n{_about(rows)}\n\n{_table(rows)}" for name, rows in by_method.items()]
    return "\n\n".join([first, *parts])


def _about(rows: Sequence[Row]) -> str:
    return f"{rows[0]['rounds']} rounds, {rows[0]['gradients']:g} gradients for each client."


def _table(rows: Sequence[Row]) -> str:
    attacks = list(dict.fromkeys(row["attack"] for row in rows))
    lines = [["aggregate", *(attack.partition(":")[0] for attack in attacks)], ["---"] * (len(attacks) + 1)]
    for aggregate in dict.fromkeys(row["aggregate"] for row in rows):
        cells = {row["attack"]: _cell(row) for row in rows if row["aggregate"] == aggregate}
        lines.append([f"`{aggregate}`", *(cells.get(attack, "-") for attack in attacks)])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _cell(row: Row) -> str:
    """Return the personalized models' accuracy, followed by the global model's in parentheses if it differs."""
    own, shared = row["personalized"], row["global"]
    other = "" if shared in (None, own) else f" ({statistics.fmean(shared):.1f})"
    return _spread(own) + other


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    record = json.loads((here / "results" / "robust_cpu2.json").read_text())
    page = here.parent / "docs" / "records" / "robustness.md"
    page.write_text(with_tables(page.read_text(), record))
