"""Points of a sweep's plots: each setting with its scores, and the axes that they vary along."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from jaxpfl.runs.records import DONE, Value
from jaxpfl.runs.scores import ACCURACY, Headline, stored_headline
from jaxpfl.runs.sweep.order import setting_key
from jaxpfl.runs.sweep.summary import choices_of
from jaxpfl.runs.sweep.tables import value_words

_DECADE = 10


class Score(NamedTuple):
    """A mean over seeds, and their standard deviation; NaN where there is none."""

    mean: float = math.nan
    std: float = math.nan


class Point(NamedTuple):
    """One setting of a method.

    Attributes:
      settings: the values on the axes.
      status: of its runs.
      chosen: whether it is the chosen setting of the method.
      validation, test: of the headline metric, mean over clients.
      seconds: of one run.
      metrics: the others by name.
      headline: that metric.
    """

    settings: Mapping[str, Value]
    status: str
    chosen: bool
    validation: Score
    test: Score
    seconds: float
    metrics: Mapping[str, Score]
    headline: Headline = ACCURACY


def points_of(summary: Mapping[str, Any]) -> dict[str, list[Point]]:
    """The settings of each method, from a sweep's summary."""
    found: dict[str, list[Point]] = {}
    headline = stored_headline(summary)
    best = {
        (method, setting_key(own["settings"] or {}))
        for _, method, own in choices_of(summary)
        if own["settings"] is not None
    }
    for row in summary["rows"]:
        chosen = (row["method"], setting_key(row["settings"])) in best
        point = Point(
            row["settings"],
            row["status"],
            chosen,
            _score(row[headline.validation], row["validation_std"]),
            _score(**_mean_and_std(row[headline.personalized])),
            row["seconds"] / max(row["seeds"], 1),
            {name: _score(**_mean_and_std(stats)) for name, stats in row["metrics"].items()},
            headline,
        )
        found.setdefault(row["method"], []).append(point)
    return found


@dataclass(frozen=True)
class Axis:
    """A setting that varies, and the place of its values on an axis of a plot.

    Attributes:
      name: of the setting.
      values: numbers in ascending order, and then others in the order of the grid.
      scale: ``log``, ``linear``, or ``even`` for values in even steps, whatever they are.
    """

    name: str
    values: tuple[Value, ...]
    scale: str

    @cached_property
    def places(self) -> list[float]:
        """The place of each value."""
        if self.scale == "even":
            return [float(i) for i in range(len(self.values))]
        return [float(value) for value in self.values]

    @property
    def words(self) -> list[str]:
        """Each value in a few characters, of a long one the last."""
        return [words if len(words := _short(value)) <= 14 else f"...{words[-12:]}" for value in self.values]

    def number(self, value: Value) -> int:
        """Number of a value."""
        return self._numbers[json.dumps(value)]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {json.dumps(value): number for number, value in enumerate(self.values)}


def axes_of(points: Iterable[Point]) -> dict[str, Axis]:
    """The axes along which settings vary, by name."""
    found: dict[str, dict[str, Value]] = {}
    for point in points:
        for name, value in point.settings.items():
            found.setdefault(name, {})[json.dumps(value)] = value
    return {name: _axis(name, list(values.values())) for name, values in found.items() if len(values) > 1}


def _axis(name: str, values: Sequence[Value]) -> Axis:
    numbers = sorted(value for value in values if isinstance(value, int | float) and not isinstance(value, bool))
    if len(numbers) < len(values):
        return Axis(name, (*numbers, *(v for v in values if isinstance(v, str | bool))), "even")
    # Few values of which one is 0 and the others span decades lie on no axis of numbers that shows them apart.
    spread = [abs(value) for value in numbers if value]
    decades = bool(spread) and max(spread) > _DECADE * min(spread)
    return Axis(name, tuple(numbers), "linear" if not decades else "log" if min(numbers) > 0 else "even")


class Picked(NamedTuple):
    """A value on an axis with the setting that stands for it.

    Attributes:
      number: of the value.
      point: the best of its settings on validation examples; None where none of them is done.
      status: of its settings, the commonest, where none of them is done.
    """

    number: int
    point: Point | None
    status: str


class Series(NamedTuple):
    """Settings of a method along an axis.

    Attributes:
      picked: in the order of the values.
      joined: whether there is one for each value, and the values are numbers, so that a line joins them.
      every: whether all settings are there, the others being drawn from ranges, or without scores to choose by.
    """

    picked: list[Picked]
    joined: bool
    every: bool


def along(points: Sequence[Point], axis: Axis, axes: Mapping[str, Axis]) -> Series:
    """The settings of a method along an axis: at each value the best on validation, or else all of them."""
    groups: dict[int, list[Point]] = {}
    for point in points:
        if axis.name in point.settings:
            groups.setdefault(axis.number(point.settings[axis.name]), []).append(point)
    several = any(len(group) > 1 for group in groups.values())
    unscored = all(math.isnan(point.validation.mean) for point in points)
    every = is_drawn(points, axes) or (several and unscored)
    split = [(n, [one]) for n in sorted(groups) for one in groups[n]] if every else sorted(groups.items())
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in axis.values)
    return Series([Picked(n, *best_of(group)) for n, group in split], numbers and not every, every)


def best_of(points: Sequence[Point]) -> tuple[Point | None, str]:
    """The best of some settings on validation examples, and the status where there is none.

    The chosen setting is the best of those it is among. Several settings without validation scores have no best one.
    """
    done = [point for point in points if point.status == DONE]
    if not done:
        return None, Counter(point.status for point in points).most_common(1)[0][0]
    if len(done) == 1:
        return done[0], DONE
    scored = [point for point in done if not math.isnan(point.validation.mean)]
    if not scored:
        return None, "not chosen from"
    return max(scored, key=lambda point: (point.chosen, point.headline.better(point.validation.mean))), DONE


def is_drawn(points: Sequence[Point], axes: Mapping[str, Axis]) -> bool:
    """True if settings are points drawn from ranges, which fill little of the grid of their values."""
    sizes = [len({json.dumps(p.settings[name]) for p in points if name in p.settings}) for name in axes]
    return len(points) > 1 and sum(size > 1 for size in sizes) > 1 and 2 * len(points) < math.prod(filter(None, sizes))


def _short(value: Value) -> str:
    """A value in the fewest digits that tell it to four significant ones."""
    return f"{value:.4g}" if isinstance(value, float) else value_words(value)


def _score(mean: float | None, std: float | None) -> Score:
    return Score(math.nan if mean is None else mean, math.nan if std is None else std)


def _mean_and_std(stats: Mapping[str, float | None]) -> dict[str, float | None]:
    return {"mean": stats["mean"], "std": stats["std"]}
