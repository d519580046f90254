"""Grids of settings: axes of values, and ranges to draw from.

``lr=.01,.1`` lists values, ``lr=log:1e-3:1:7`` and ``clients=linear:10:50:5`` space them evenly, ``lr=log:1e-3:1`` is a
range from which points are drawn.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from jaxpfl.core import choices
from jaxpfl.runs.records import Value
from jaxpfl.support.errors import JaxpflError, shown, unknown_name

_SPACED = ("log", "linear")
DRAWS = ("sobol", "uniform")
"""Ways to draw points from ranges."""
_MOST = 1_000_000


@dataclass(frozen=True)
class Axis:
    """A setting with the values that it takes, or the range that they are drawn from.

    Attributes:
      name: of the setting.
      values: as given, without repetitions; empty for a range.
      low, high: the ends of a range.
      log: whether the range is evenly spaced in the logarithm.
    """

    name: str
    values: tuple[Value, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def at(self, share: float) -> float:
        """The value at a share of the way through the range, to six digits; the ends as given."""
        if share in (0, 1):
            return (self.low, self.high)[int(share)]
        if self.log:
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        return min(max(float(f"{value:.6g}"), self.low), self.high)


_LONGEST = 100  # characters of a name


def parse(text: str) -> Axis:
    """Parse ``NAME=V,V,...``, ``NAME=log:LOW:HIGH:N``, ``NAME=linear:LOW:HIGH:N``, or a range, without N.

    Raises:
      JaxpflError: for another form, a value that stands twice, and ends that no such spacing has.
    """
    name, equals, given = (part.strip() for part in text.partition("="))
    if not (name and equals and given):
        raise JaxpflError(f"--grid takes NAME=VALUE,VALUE or NAME=log:LOW:HIGH:N, got {shown(text)}")
    return axis(name, given)


def axis(name: str, given: str | Sequence[Value]) -> Axis:
    """An axis from its name and its values, as a text or as a list.

    Raises:
      JaxpflError: as `parse`.
    """
    if not name.isprintable() or len(name) > _LONGEST:
        raise JaxpflError(f"an axis is the name of a setting, got {shown(name)}")
    kind, colon, rest = given.partition(":") if isinstance(given, str) else ("", "", "")
    if colon and kind in _SPACED:
        return _spaced(name, kind == "log", rest.split(":"))
    parts = [part.strip() for part in given.split(",")] if isinstance(given, str) else list(given)
    if not parts or not all(isinstance(part, bool | int | float) or (isinstance(part, str) and part) for part in parts):
        raise JaxpflError(f"the values of {name} must be numbers, names or switches, got {shown(given)}")
    values = tuple(choices.literal(part) if isinstance(part, str) else part for part in parts)
    values = tuple(v if isinstance(v, bool | int | float) else str(p) for v, p in zip(values, parts, strict=True))
    for value in values:
        if isinstance(value, float) and not math.isfinite(value):
            raise JaxpflError(f"the values of {name} must be finite, got {shown(value)}")
    return Axis(name, distinct(name, values))


def distinct(name: str, values: tuple[Value, ...]) -> tuple[Value, ...]:
    """The values of an axis.

    Raises:
      JaxpflError: for one that stands twice.
    """
    value, times = Counter(values).most_common(1)[0]
    if times > 1:
        raise JaxpflError(f"{name} has the value {shown(value)} twice")
    return values


def _spaced(name: str, log: bool, ends: list[str]) -> Axis:
    form = f"{name}={'log' if log else 'linear'}:LOW:HIGH:N"
    try:
        low, high = map(float, ends[:2])
        count = int(ends[2]) if len(ends) == 3 else 0
    except ValueError:
        raise JaxpflError(f"an axis of even steps is {form}, got {shown(':'.join(ends))}") from None
    if not (math.isfinite(low) and low < high < math.inf) or len(ends) > 3:
        raise JaxpflError(f"an axis of even steps is {form} with LOW < HIGH, got {shown(':'.join(ends))}")
    if log and low <= 0:
        raise JaxpflError(f"{form} needs LOW > 0, got {low:g}")
    range_ = Axis(name, (), low, high, log)
    if len(ends) == 2:
        return range_
    if not 2 <= count <= _MOST:
        raise JaxpflError(f"{form} needs N between 2 and {_MOST}, got {count}")
    if not log and low.is_integer() and high.is_integer() and (high - low) % (count - 1) == 0:
        step = int(high - low) // (count - 1)  # exact, whatever the number of digits
        return axis(name, range(int(low), int(high) + 1, step))
    found = [range_.at(share) for share in np.linspace(0, 1, count).tolist()]
    if log and all(value.is_integer() for value in found):
        return axis(name, [int(value) for value in found])
    return axis(name, found)


@dataclass(frozen=True)
class Grid:
    """Axes that are crossed, and points drawn from the ranges among them.

    Attributes:
      axes: lists and ranges, each name once.
      draws: number of points drawn from all ranges together; 0 where there is no range.
      draw: ``sobol`` (scrambled) or ``uniform``. More points later leave the first ones as they are.
      seed: of the draws.
    """

    axes: tuple[Axis, ...] = ()
    draws: int = 0
    draw: str = "sobol"
    seed: int = 0

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        for name in names:
            if names.count(name) > 1:
                raise JaxpflError(f"--grid {name} stands twice: give all its values at once")
        if self.draw not in DRAWS:
            raise unknown_name("draw", self.draw, DRAWS)
        ranges = [axis.name for axis in self.axes if not axis.values]
        if ranges and not self.draws:
            raise JaxpflError(f"{ranges[0]} is a range: --random N says how many points to draw, or give it a third N")
        if self.draws and not ranges:
            raise JaxpflError("--random draws from ranges, such as --grid lr=log:1e-3:1, and no axis is one")

    def to_json(self) -> dict[str, Any]:
        """The grid as JSON-able values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """The grid that `to_json` wrote.

        Raises:
          KeyError, TypeError: for other values.
        """
        axes = tuple(Axis(**{**one, "values": tuple(one["values"])}) for one in stored["axes"])
        return cls(**{**stored, "axes": axes})

    def points(self, concerns: Callable[[str], bool] = lambda name: True) -> list[dict[str, Value]]:
        """The settings of the grid, each once: lists crossed with each other and with the drawn points.

        Args:
          concerns: whether an axis is of interest; the others are left out.

        Raises:
          JaxpflError: for more settings than a million.
        """
        lists = [axis for axis in self.axes if axis.values and concerns(axis.name)]
        ranges = [axis for axis in self.axes if not axis.values]
        draws = self.draws if any(concerns(axis.name) for axis in ranges) else 1
        size = math.prod(len(axis.values) for axis in lists) * draws
        if size > _MOST:
            raise JaxpflError(f"a grid has at most {_MOST} settings, got {size}")
        drawn: list[Mapping[str, Value]] = [{}]
        if ranges:
            drawn = [
                {axis.name: axis.at(share) for axis, share in zip(ranges, row, strict=True) if concerns(axis.name)}
                for row in self._shares(len(ranges))
            ]
            drawn = list({tuple(point.items()): point for point in drawn}.values())  # a narrow range repeats values
        crossed = itertools.product(*(axis.values for axis in lists))
        names = [axis.name for axis in lists]
        return [dict(zip(names, values, strict=True)) | dict(row) for values in crossed for row in drawn]

    def _shares(self, dimensions: int) -> list[list[float]]:
        """Points of the unit cube, [draws, dimensions]; those of fewer draws come first."""
        rng = np.random.default_rng(self.seed)
        if self.draw == "uniform":
            return rng.random((self.draws, dimensions)).tolist()
        from scipy.stats import qmc

        sampler = qmc.Sobol(dimensions, rng=rng)
        return sampler.random(2 ** math.ceil(math.log2(self.draws)))[: self.draws].tolist()
