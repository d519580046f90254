"""Sizes of the tables' data sets: rows on a part of one stand beside no print."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from jaxpfl.papers.compare import Row

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


def marked(rows: Iterable[Row], note: str) -> list[Row]:
    """The rows with a note and without a difference from print; as they are where it is empty."""
    if not note:
        return list(rows)
    return [replace(row, difference=None, note="; ".join(filter(None, (note, row.note)))) for row in rows]
