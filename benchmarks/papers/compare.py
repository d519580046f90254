"""Rows of a table: our value beside the printed one."""

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
      method: its name in print.
      setting: in words.
      ours: our value; None where the run gave none.
      std: its standard deviation; None for a single run.
      printed: the value in print; None where there is none.
      printed_std: its standard deviation; None where print states none.
      difference: as `difference`.
      note: remarks on ours and on print, parted by "; " (`remark`).
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
        """The row as JSON-able values."""
        return asdict(self)


def difference(ours: float | None, std: float | None, printed: Printed) -> float | None:
    """Ours minus print, in joint standard deviations; None where either has no value or no spread.

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
    """One remark, whatever its text: semicolons part those of a row."""
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
    """A row beside print.

    Args:
      method: its name in print.
      setting: in words.
      ours: our value.
      std: its standard deviation.
      printed: the value in print.
      notes: remarks; those that are empty or repeated are left out.
      comparable: false where another problem was solved than the printed one: there is no difference then.
    """
    said = "; ".join(dict.fromkeys(note for note in notes if note))
    gap = difference(ours, std, printed) if comparable else None
    return Row(method, setting, ours, std, printed.value, printed.std, gap, said)


def spread(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and standard deviation (of divisor n - 1); None for no values, and for the deviation of one."""
    if not values or not all(map(math.isfinite, values)):
        return None, None
    mean = math.fsum(values) / len(values)
    return mean, statistics.stdev(values) if len(values) > 1 else None  # exactly 0 of equal values
