"""List of the result folders below a folder, as the terminal shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxpfl.runs.reports.folders import COMPLETE, DAMAGED, RUNNING, Folder
from jaxpfl.support.console import new_table, unmarked

_STYLES = {COMPLETE: "green", RUNNING: "cyan", DAMAGED: "red"}
_MOST_NAMED = 4


def print_folders(console: Any, found: Sequence[Folder]) -> None:
    """Print a row for each folder: its kind, status, methods, data and progress."""
    table = new_table(f"{len(found)} folder{'s' * (len(found) != 1)} of results")
    for name in ("folder", "kind", "status", "what", "data", "progress"):
        table.add_column(name, overflow="fold", no_wrap=name in ("kind", "status"))
    for one in found:
        names = ", ".join(one.what[:_MOST_NAMED]) + f" and {len(one.what) - _MOST_NAMED} more" * (
            len(one.what) > _MOST_NAMED
        )
        status = f"[{_STYLES.get(one.status, 'yellow')}]{one.status}[/]"
        table.add_row(unmarked(str(one.path)), one.kind, status, names, unmarked(one.data), unmarked(one.done))
    console.print(table)
