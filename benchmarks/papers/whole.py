"""Remarks on the tables' data sets: parts of one, whose rows state no difference from print, and altered ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .compare import Row

SIZES = {
    "mnist": 70_000,
    "mnist-writers": 70_000,
    "fashion-mnist": 70_000,
    "cifar10": 60_000,
    "cifar100": 60_000,
    "elections": 3111,
    "irc": 937_826,
    "a9a": 32_561,
}
"""Examples, training and test, of each data set that is read whole; counties, tokens counted, and instances."""
ALTERED = {3949832213: "our copy of CIFAR-10 was compressed by JPEG once more"}
"""Remark on data by their checksum, as `jaxpfl.runs.sweep.execute.Data.checksum`."""


def part(name: str, found: int) -> str:
    """Remark on a data set of another size than the one that the tables are of; empty for the whole.

    Examples:
      >>> part("mnist", 300)
      'the data set mnist has 300 entries, the whole 70000: not comparable with print, and other notes are of the whole'
      >>> part("mnist", 70000)
      ''
    """
    whole = SIZES.get(name, found)
    if found == whole:
        return ""
    said = f"the data set {name} has {found} entries, the whole {whole}"
    return f"{said}: not comparable with print, and other notes are of the whole"


def marked(rows: Iterable[Row], part: str, altered: str = "") -> list[Row]:
    """The rows with the remarks on their data, and, on a part of the whole, without a difference from print."""
    return [
        replace(
            row,
            difference=None if part else row.difference,
            note="; ".join(filter(None, (part, row.note, altered))),
        )
        for row in rows
    ]
