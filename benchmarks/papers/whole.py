"""Notes on the tables' data sets: incomplete sets, whose rows are not compared with the paper, and altered sets."""

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
"""Numbers of entries of the complete data sets: training and test examples, counties, distinct tokens, or instances."""
ALTERED = {3949832213: "our copy of CIFAR-10 was compressed by JPEG once more"}
"""Note on a data set, by its checksum (`jaxpfl.runs.sweep.execute.Data.checksum`)."""


def part(name: str, found: int) -> str:
    """Return the note on a data set that is not complete; empty if it is complete.

    Examples:
      >>> part("a9a", 300)
      'the data set a9a has 300 entries of 32561: not comparable with the paper (other notes describe the complete set)'
      >>> part("a9a", 32561)
      ''
    """
    whole = SIZES.get(name, found)
    if found == whole:
        return ""
    said = f"the data set {name} has {found} entries of {whole}"
    return f"{said}: not comparable with the paper (other notes describe the complete set)"


def marked(rows: Iterable[Row], part: str, altered: str = "") -> list[Row]:
    """Return the rows with notes on their data; rows on incomplete data lose their difference from the paper."""
    return [
        replace(
            row,
            difference=None if part else row.difference,
            note="; ".join(filter(None, (part, row.note, altered))),
        )
        for row in rows
    ]
