"""Grids of settings: axes with values, and axes with ranges from which values are drawn.

``lr=.01,.1`` lists values, ``lr=log:1e-3:1:7`` and ``clients=linear:10:50:5`` give evenly spaced values, and
``lr=log:1e-3:1`` gives a range from which values are drawn. An axis is a field of a run's config (``lr``, ``clients``,
``privacy.epsilon``, ``plan.clients``) or a hyper-parameter or option of a method (``adaped.psi_init``).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from jaxpfl import algorithms
from jaxpfl.algorithms import Method
from jaxpfl.algorithms.parts.hyper import PAPER, rates
from jaxpfl.core import settings
from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.privacy import PrivacyConfig
from jaxpfl.runs.config import RunConfig, from_mapping
from jaxpfl.runs.names_elsewhere import unknown_setting
from jaxpfl.runs.records import Value, value_words
from jaxpfl.support.errors import JaxpflError, shown, unknown_name

_SPACED = ("log", "linear")
_MOST = 1_000_000


@dataclass(frozen=True)
class Axis:
    """A setting with its values, or with a range from which values are drawn.

    Attributes:
      name: name of the setting.
      values: distinct values of the setting; empty for a range.
      low, high: endpoints of the range.
      log: whether values are spaced evenly in the logarithm.
    """

    name: str
    values: tuple[Value, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def value_at(self, share: float) -> float:
        """Return the value at a fraction of the way from ``low`` to ``high``, rounded to six significant digits.

        At 0 and 1, the endpoints are returned without rounding.
        """
        if share in (0, 1):
            return (self.low, self.high)[int(share)]
        if self.log:
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        return min(max(float(f"{value:.6g}"), self.low), self.high)


_LONGEST = 100  # maximum number of characters in a name


def parse(text: str) -> Axis:
    """Parse an axis: ``NAME=V,V,...``, ``NAME=log:LOW:HIGH:N`` or ``NAME=linear:LOW:HIGH:N``.

    Without ``:N``, the axis is a range from which values are drawn.

    Raises:
      JaxpflError: if the string has none of these forms, if it repeats a value, if LOW is not below HIGH, or if LOW is
        not positive with ``log``.
    """
    name, equals, given = (part.strip() for part in text.partition("="))
    if not (name and equals and given):
        raise JaxpflError(f"--grid takes NAME=VALUE,VALUE or NAME=log:LOW:HIGH:N, got {shown(text)}")
    return axis(name, given)


def axis(name: str, given: str | Sequence[Value]) -> Axis:
    """Make an axis from its name and its values, given as a string (see `parse`) or a list.

    Raises:
      JaxpflError: as in `parse`.
    """
    if not name.isprintable() or len(name) > _LONGEST:
        raise JaxpflError(f"an axis must be the name of a setting, got {shown(name)}")
    kind, colon, rest = given.partition(":") if isinstance(given, str) else ("", "", "")
    if colon and kind in _SPACED:
        return _spaced(name, kind == "log", rest.split(":"))
    parts = [part.strip() for part in given.split(",")] if isinstance(given, str) else list(given)
    if not parts or not all(isinstance(part, bool | int | float) or (isinstance(part, str) and part) for part in parts):
        raise JaxpflError(f"the values of {name} must be numbers, strings or booleans, got {shown(given)}")
    values = tuple(settings.literal(part) if isinstance(part, str) else part for part in parts)
    values = tuple(v if isinstance(v, bool | int | float) else str(p) for v, p in zip(values, parts, strict=True))
    for value in values:
        if isinstance(value, float) and not math.isfinite(value):
            raise JaxpflError(f"the values of {name} must be finite, got {shown(value)}")
    return Axis(name, distinct(name, values))


def distinct(name: str, values: tuple[Value, ...]) -> tuple[Value, ...]:
    """Check that the values of an axis are distinct, and return them.

    Raises:
      JaxpflError: if a value is repeated.
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
        raise JaxpflError(f"an axis of evenly spaced values must be {form}, got {shown(':'.join(ends))}") from None
    if not (math.isfinite(low) and low < high < math.inf) or len(ends) > 3:
        raise JaxpflError(f"an evenly spaced axis must be {form} with LOW < HIGH, got {shown(':'.join(ends))}")
    if log and low <= 0:
        raise JaxpflError(f"{form} requires LOW > 0, got {low:g}")
    range_ = Axis(name, (), low, high, log)
    if len(ends) == 2:
        return range_
    if not 2 <= count <= _MOST:
        raise JaxpflError(f"{form} requires N between 2 and {_MOST}, got {count}")
    if not log and low.is_integer() and high.is_integer() and (high - low) % (count - 1) == 0:
        step = int(high - low) // (count - 1)  # `value_at` would round integers to six digits
        return axis(name, range(int(low), int(high) + 1, step))
    found = [range_.value_at(share) for share in np.linspace(0, 1, count).tolist()]
    if log and all(value.is_integer() for value in found):
        return axis(name, [int(value) for value in found])
    return axis(name, found)


@dataclass(frozen=True)
class Grid:
    """Grid of settings: every combination of listed values is used with every point drawn from the ranges.

    Attributes:
      axes: axes with values or ranges; their names are distinct.
      draws: number of points to draw, each with a value for every range; 0 if there are no ranges.
      seed: seed of the draws. They follow a scrambled Sobol sequence, so increasing ``draws`` keeps the earlier points.
    """

    axes: tuple[Axis, ...] = ()
    draws: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        for name in names:
            if names.count(name) > 1:
                raise JaxpflError(f"--grid {name} is given twice: give all its values at once")
        ranges = [axis.name for axis in self.axes if not axis.values]
        if ranges and not self.draws:
            raise JaxpflError(f"{ranges[0]} is a range: give --random N, or a third number N for evenly spaced values")
        if self.draws and not ranges:
            raise JaxpflError("--random requires a range among the axes, such as --grid lr=log:1e-3:1")

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Make a grid from its fields, as `dataclasses.asdict` returns them.

        Raises:
          KeyError, TypeError: if ``stored`` has other fields.
        """
        axes = tuple(Axis(**{**one, "values": tuple(one["values"])}) for one in stored["axes"])
        return cls(**{**stored, "axes": axes})

    def points(self, concerns: Callable[[str], bool] = lambda name: True) -> list[dict[str, Value]]:
        """Return the distinct settings of the grid, each a dict from axis name to value.

        Args:
          concerns: function that returns whether to include an axis, given its name.

        Raises:
          JaxpflError: if there are more than a million settings.
        """
        lists = [axis for axis in self.axes if axis.values and concerns(axis.name)]
        ranges = [axis for axis in self.axes if not axis.values]
        draws = self.draws if any(concerns(axis.name) for axis in ranges) else 1
        size = math.prod(len(axis.values) for axis in lists) * draws
        if size > _MOST:
            raise JaxpflError(f"a grid has at most {_MOST} settings, got {size}")
        drawn: list[Mapping[str, Value]] = [{}]
        if ranges:
            pairs = [zip(ranges, row, strict=True) for row in self._shares(len(ranges))]
            drawn = [{axis.name: axis.value_at(share) for axis, share in row if concerns(axis.name)} for row in pairs]
            drawn = list({tuple(point.items()): point for point in drawn}.values())  # a narrow range may repeat values
        crossed = itertools.product(*(axis.values for axis in lists))
        names = [axis.name for axis in lists]
        return [dict(zip(names, values, strict=True)) | dict(row) for values in crossed for row in drawn]

    def _shares(self, dimensions: int) -> list[list[float]]:
        """Draw points from the unit cube, [draws, dimensions]; with more draws, the first points stay the same."""
        from scipy.stats import qmc

        sampler = qmc.Sobol(dimensions, rng=np.random.default_rng(self.seed))
        return sampler.random(2 ** math.ceil(math.log2(self.draws)))[: self.draws].tolist()


_TABLES: Mapping[str, type] = {"privacy": PrivacyConfig, "plan": ExecutionPlan}
_OTHERWISE = {
    "task": "--task, and one sweep for each task",
    "seed": "--seed",
    "seeds": "--seeds",
    "set": "--grid METHOD.name=V,V",
    "privacy": "--grid privacy.epsilon=V,V",
    "plan": "--grid plan.clients=V,V",
    "data_dir": "--data-dir",
    "checkpoint_every": "--resume",
    "eval_every": "the scores at the end of each run",
}
"""Fields of a run's config that cannot be axes -> what to use instead, for messages."""
_OF_THE_SERVER = ("server_lr", "server_optimizer")
_OF_UPLOADS = ("compress", "weighting", "aggregate")
_OF_GRAPHS = ("graph", "neighbours")
_OF_COHORTS = (
    *("cohort", "participation", "cohort_cap", "cycle"),
    *("dropout", "stragglers", "same_stragglers", "time_model"),
)
_TRACED = ("lr", "server_lr", "dropout", "stragglers")
_TRACED_NOISE = ("privacy.epsilon", "privacy.delta", "privacy.noise_multiplier", "privacy.clipping_norm")
_SHARE = re.compile(r"(\d+\.?\d*|\.\d+)m")


def named(grid: Grid, methods: Sequence[str]) -> Grid:
    """Return the grid with the full names of the axes, and with values converted to the types of the settings.

    Raises:
      JaxpflError: if a setting does not exist, cannot be an axis or belongs to a method that is not in the sweep, or if
        a value has the wrong type.
    """
    axes = []
    for axis in grid.axes:
        name = _name(axis.name, methods)
        if axis.values:
            values = distinct(name, tuple(_typed(name, value) for value in axis.values))
            axes.append(dataclasses.replace(axis, name=name, values=values))
            continue
        for end in (axis.low, axis.high):
            try:
                _typed(name, end)
            except JaxpflError as error:
                raise JaxpflError(f"{error}; instead of a range, write --grid {name}=VALUE,VALUE") from None
        axes.append(dataclasses.replace(axis, name=name))
    return dataclasses.replace(grid, axes=tuple(axes))


def _name(given: str, methods: Sequence[str]) -> str:
    """Return the full name of a setting, for example ``adaped.psi_init`` for ``psi_init``."""
    owner, dot, own = given.partition(".")
    if dot and owner in _TABLES:
        fields = [field.name for field in dataclasses.fields(_TABLES[owner])]
        if own.replace("-", "_") not in fields:
            raise unknown_name(f"setting of {owner}", own, fields)
        if given == "privacy.unit":
            raise JaxpflError("privacy.unit cannot be a sweep axis: epsilons for different units are not comparable")
        return f"{owner}.{own.replace('-', '_')}"
    if dot:
        if owner not in methods:
            raise unknown_name(f"method of --grid {given}", owner, methods)
        known = _own(algorithms.get(owner))
        if own not in known:
            raise unknown_name(f"hyper-parameter of {owner}", own, known)
        return given
    field = given.replace("-", "_")
    if field in _OTHERWISE:
        raise JaxpflError(f"{given} cannot be an axis of a sweep: use {_OTHERWISE[field]}")
    fields = [one.name for one in dataclasses.fields(RunConfig) if one.name not in _OTHERWISE]
    if field in fields:
        return field
    owners = [name for name in methods if given in _own(algorithms.get(name))]
    if len(methods) == 1 and owners:
        return f"{owners[0]}.{given}"
    if owners:
        raise JaxpflError(f"{given} is a hyper-parameter of {', '.join(owners)}: write {owners[0]}.{given}")
    known = [f"{name}.{own}" for name in methods for own in _own(algorithms.get(name))]
    raise unknown_setting("axis", given, [*fields, *known])


def _own(method: Method) -> list[str]:
    """Return the names of a method's hyper-parameters and options."""
    return [*(field.name for field in dataclasses.fields(method.hyper)), *method.options]


def _typed(name: str, value: Value) -> Value:
    """Convert a value to the type of its setting."""
    owner, dot, own = name.partition(".")
    if dot and owner in _TABLES:
        return getattr(getattr(from_mapping({owner: {own: value}}, "--grid"), owner), own)
    if dot:
        options = algorithms.get(owner).options
        if own in options:
            return settings.parse_value(name, value_words(value), type(options[own]))
        return value if value == PAPER else settings.parse_value(name, str(value), float)
    if name == "cohort" and isinstance(value, str):
        found = _SHARE.fullmatch(value)
        if found is None or not 0 < float(found[1]) <= 1:
            raise JaxpflError(f"cohort must be a count, or a share of the clients such as 0.1m, got {shown(value)}")
        return f"{float(found[1]):g}m"
    return getattr(from_mapping({name: value}, "--grid"), name)


def concerns(name: str, method: Method, config: RunConfig | None = None) -> bool:
    """Return whether a setting can affect the runs of a method.

    Args:
      name: full name of the setting.
      method: method of the runs.
      config: config of the runs, whose ``privacy.unit`` matters; if the config is None, the unit is user.
    """
    owner, dot, _ = name.partition(".")
    if dot and owner not in _TABLES:
        return owner == method.name
    if name == "lr":
        return bool(rates(method.hyper))
    if name in _OF_THE_SERVER:
        return hasattr(method.hyper, "server_lr")
    if owner == "privacy" and config is not None and config.privacy.is_example_level:
        return not method.pooled
    if name in _OF_UPLOADS or owner == "privacy":
        return method.uploads and not method.pooled
    if name in _OF_GRAPHS:
        return method.graph
    if name in _OF_COHORTS:
        return not method.pooled
    return True


def is_traced(name: str, method: Method, config: RunConfig) -> bool:
    """Return whether a setting is a traced value, so that runs that differ only in this setting can share a program."""
    owner, dot, own = name.partition(".")
    if name in _TRACED_NOISE:
        # Otherwise these settings are constants in the method's functions, or determine the structure of the noise.
        central = config.privacy.noise != "per_step" and config.privacy.quantile is None
        return central and method.releases is None and not config.privacy.is_example_level
    if dot and owner not in _TABLES:
        return own not in method.options
    return name in _TRACED


def apply_settings(config: RunConfig, settings: Mapping[str, Value]) -> RunConfig:
    """Return the config with settings of a grid.

    A cohort given as a share of the clients is left out, because its size depends on the data (see `cohort_of`).
    """
    for name, value in settings.items():
        owner, dot, own = name.partition(".")
        if dot and owner in _TABLES:
            table = dataclasses.replace(getattr(config, owner), **{own: value})
            config = dataclasses.replace(config, **{owner: table})
        elif dot:
            config = dataclasses.replace(config, set=(*config.set, f"{name}={value_words(value)}"))
        elif name != "cohort" or isinstance(value, int):
            config = dataclasses.replace(config, **{name: value})
    return config


def fill_privacy(config: RunConfig, grid: Grid) -> RunConfig:
    """For each axis of the grid that determines the privacy noise, set the config to the first value of the axis.

    Without these values the config might be invalid; for example, a run cannot have delta without epsilon.
    """
    axes = [axis for axis in grid.axes if axis.name in _TRACED_NOISE]
    return apply_settings(config, {axis.name: axis.values[0] if axis.values else axis.low for axis in axes})


def share_of(settings: Mapping[str, Value]) -> float | None:
    """Return the cohort as a share of the clients, 0.1 for ``0.1m``; None if it is not given as a share."""
    value = settings.get("cohort")
    return float(value[:-1]) if isinstance(value, str) else None


def cohort_of(settings: Mapping[str, Value], clients: int) -> int | None:
    """Return the size of a cohort given as a share such as ``0.1m``, at least 1; None if it is not given as a share."""
    share = share_of(settings)
    return None if share is None else max(1, round(share * clients))
