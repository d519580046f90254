"""Settings of a study of estimation as axes of a grid: their names, and values of their types."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jaxpfl.support.errors import JaxpflError, shown, unknown_name
from jaxpfl.runs.records import Value
from jaxpfl.studies.study import Study
from jaxpfl.runs.sweep.grid import Axis, Grid


def named(grid: Grid, study: Study) -> Grid:
    """The grid with its axes' names as the study has them.

    Raises:
      JaxpflError: for a setting that the study does not have, the seed, and values of another type.
    """
    return dataclasses.replace(grid, axes=tuple(_named(axis, study) for axis in grid.axes))


def _named(axis: Axis, study: Study) -> Axis:
    name, known = axis.name.replace("-", "_"), [field.name for field in dataclasses.fields(study.settings)]
    if name == "seed":
        raise JaxpflError("seed is no axis of a sweep: use --seeds")
    if name not in known:
        raise unknown_name("setting of the study", axis.name, known)
    for value in axis.values or (axis.low, axis.high):
        typed(study, name, value)
    return dataclasses.replace(axis, name=name)


def applied(study: Study, settings: Any, point: dict[str, Value]) -> Any:
    """The settings with values of a grid in their place."""
    return dataclasses.replace(settings, **{name: typed(study, name, value) for name, value in point.items()})


def typed(study: Study, name: str, value: Value) -> Any:
    """A value in the type of its setting; a setting that is several values is given one of them.

    Raises:
      JaxpflError: for a value of another type.
    """
    return _of(get_type_hints(study.settings)[name], name, value)


def restored(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """Settings or options of a study from their JSON-able values, in which a tuple is a list and a path a text.

    Args:
      kind: the dataclass.
      values: of its fields.

    Raises:
      TypeError, AttributeError: for values that are none of its fields, or no mapping.
    """
    hints = get_type_hints(kind)
    return kind(**{name: _restored(hints.get(name), value) for name, value in values.items()})


def _restored(kind: Any, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_restored(None, part) for part in value)
    is_path = isinstance(value, str) and Path in (kind, *get_args(kind))
    return Path(value) if is_path else value


def _of(kind: Any, name: str, value: Value) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _first((part for part in parts if part is not type(None)), name, value)
    if origin is Literal:
        if value not in parts:
            raise unknown_name(name, str(value), [str(part) for part in parts])
        return value
    if origin is tuple:
        return (_of(parts[0], name, value),)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if kind is float and (whole or isinstance(value, float)):
        return float(value)
    if (kind is int and whole) or (kind in (bool, str) and type(value) is kind):
        return value
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a name"}
    if kind not in words:
        raise JaxpflError(f"{name} is no axis of a sweep: its values are no single numbers or names")
    raise JaxpflError(f"{name} must be {words[kind]}, got {shown(value)}")


def _first(kinds: Iterable[Any], name: str, value: Value) -> Any:
    """The value in the first of some types that it has."""
    error: JaxpflError | None = None
    for kind in kinds:
        try:
            return _of(kind, name, value)
        except JaxpflError as refused:
            error = error or refused
    assert error is not None
    raise error
