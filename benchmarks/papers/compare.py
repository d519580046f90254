"""Rows of a table: jaxpfl's value beside the published value."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .declared import Printed


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
      method: name of the method in the paper.
      setting: description of the setting.
      ours: jaxpfl's value; None if the run gave none.
      std: standard deviation of ``ours``; None for a single run.
      printed: published value; None if there is none.
      printed_std: standard deviation of the published value; None if the paper states none.
      difference: result of `difference`.
      note: notes on both values, separated by "; " (see `remark`).
    """

    method: str
    setting: str
    ours: float | None
    std: float | None
    printed: float | None
    printed_std: float | None
    difference: float | None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return asdict(self)


def difference(ours: float | None, std: float | None, printed: Printed) -> float | None:
    """Return jaxpfl's value minus the published value, in joint standard deviations.

    Return None if a value or a standard deviation is missing.

    .. math:: (x - y) / \\sqrt{s_x^2 + s_y^2}

    Examples:
      >>> difference(98.0, 0.3, Printed(99.0, 0.4))
      -2.0
    """
    if ours is None or std is None or printed.value is None or printed.std is None:
        return None
    joint = math.hypot(std, printed.std)
    return (ours - printed.value) / joint if joint > 0 else None


def remark(text: object) -> str:
    """Return a string as a single note: its semicolons are replaced, because semicolons separate the notes of a row."""
    return str(text).replace("; ", ", ")


def row(
    method: str,
    setting: str,
    ours: float | None,
    std: float | None,
    printed: Printed,
    notes: Iterable[str] = (),
    *,
    comparable: bool = True,
) -> Row:
    """Make a row with jaxpfl's value and the published value.

    Args:
      method: name of the method in the paper.
      setting: description of the setting.
      ours: jaxpfl's value.
      std: standard deviation of ``ours``.
      printed: published value.
      notes: notes; empty and repeated notes are left out.
      comparable: False if the run solves another problem than the paper, such as a quick run; there is then no
        difference.
    """
    said = "; ".join(dict.fromkeys(note for note in notes if note))
    gap = difference(ours, std, printed) if comparable else None
    return Row(method, setting, ours, std, printed.value, printed.std, gap, said)


def spread(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean (None without values) and the sample standard deviation (None for fewer than two values)."""
    if not values or not all(map(math.isfinite, values)):
        return None, None
    mean = math.fsum(values) / len(values)
    return mean, statistics.stdev(values) if len(values) > 1 else None  # exactly 0 for equal values
