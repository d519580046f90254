"""Axes of a sweep over runs: the settings that may be one, the methods they concern, and their place in a config.

An axis is a field of a run (``lr``, ``clients``, ``privacy.epsilon``, ``plan.clients``) or a method's own
hyper-parameter or option (``adaped.psi_init``).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from jaxpfl import algorithms
from jaxpfl.algorithms import Method
from jaxpfl.algorithms.parts.hyper import PAPER, rates
from jaxpfl.core import choices
from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.privacy import PrivacyConfig
from jaxpfl.runs.config import RunConfig
from jaxpfl.runs.config_file import from_mapping
from jaxpfl.runs.records import Value
from jaxpfl.runs.scores import OF_TASKS
from jaxpfl.runs.sweep.grid import Axis, Grid, distinct
from jaxpfl.support.errors import JaxpflError, shown, unknown_name

_TABLES: Mapping[str, type] = {"privacy": PrivacyConfig, "plan": ExecutionPlan}
_OTHERWISE = {
    "seed": "--seed",
    "seeds": "--seeds",
    "set": "--grid METHOD.name=V,V",
    "privacy": "--grid privacy.epsilon=V,V",
    "plan": "--grid plan.clients=V,V",
    "data_dir": "--data-dir",
    "checkpoint_every": "--resume",
    "eval_every": "the scores at the end of each run",
}
"""Fields of a run that are no axes, and what there is instead."""
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
    """The grid with its axes' full names, and their values in the types of their settings.

    Raises:
      JaxpflError: for a setting that there is not or that no sweep varies, one of a method that is not in the sweep,
        and values of another type.
    """
    return dataclasses.replace(grid, axes=tuple(_named(axis, methods) for axis in grid.axes))


def _named(axis: Axis, methods: Sequence[str]) -> Axis:
    name = _name(axis.name, methods)
    if not axis.values:
        for end in (axis.low, axis.high):
            try:
                _typed(name, end)
            except JaxpflError as error:
                raise JaxpflError(f"{error}: a range is for settings of any number, --grid {name}=V,V lists") from None
        return dataclasses.replace(axis, name=name)
    values = tuple(_typed(name, value) for value in axis.values)
    if name == "task" and len(metrics := {OF_TASKS.get(str(value)): value for value in values}) > 1:
        said = " and ".join(f"{value} ({metric})" for metric, value in metrics.items())
        raise JaxpflError(f"task: no sweep compares the scores of {said}: sweep each task by itself")
    return dataclasses.replace(axis, name=name, values=distinct(name, values))


def _name(given: str, methods: Sequence[str]) -> str:
    """The full name of a setting."""
    owner, dot, own = given.partition(".")
    if dot and owner in _TABLES:
        fields = [field.name for field in dataclasses.fields(_TABLES[owner])]
        if own.replace("-", "_") not in fields:
            raise unknown_name(f"setting of {owner}", own, fields)
        if given == "privacy.unit":
            raise JaxpflError("privacy.unit is no axis of a sweep: epsilons of different units are not comparable")
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
        raise JaxpflError(f"{given} is no axis of a sweep: use {_OTHERWISE[field]}")
    fields = [one.name for one in dataclasses.fields(RunConfig) if one.name not in _OTHERWISE]
    if field in fields:
        return field
    owners = [name for name in methods if given in _own(algorithms.get(name))]
    if len(methods) == 1 and owners:
        return f"{owners[0]}.{given}"
    if owners:
        raise JaxpflError(f"{given} is a hyper-parameter of {', '.join(owners)}: name it {owners[0]}.{given}")
    raise unknown_name(
        "axis", given, [*fields, *(f"{name}.{own}" for name in methods for own in _own(algorithms.get(name)))]
    )


def _own(method: Method) -> list[str]:
    """Names of a method's hyper-parameters and options."""
    return [*(field.name for field in dataclasses.fields(method.hyper)), *method.options]


def _typed(name: str, value: Value) -> Value:
    """A value in the type of its setting."""
    owner, dot, own = name.partition(".")
    if dot and owner in _TABLES:
        return getattr(getattr(from_mapping({owner: {own: value}}, "--grid"), owner), own)
    if dot:
        options = algorithms.get(owner).options
        if own in options:
            return choices.typed(
                name, str(value).lower() if isinstance(value, bool) else str(value), type(options[own])
            )
        return value if value == PAPER else choices.typed(name, str(value), float)
    if name == "cohort" and isinstance(value, str):
        found = _SHARE.fullmatch(value)
        if found is None or not 0 < float(found[1]) <= 1:
            raise JaxpflError(f"cohort must be a count, or a share of the clients such as 0.1m, got {shown(value)}")
        return f"{float(found[1]):g}m"
    return getattr(from_mapping({name: value}, "--grid"), name)


def concerns(name: str, method: Method, config: RunConfig | None = None) -> bool:
    """True if a setting can change the runs of a method, with this config (unless given, without private examples)."""
    owner, dot, _ = name.partition(".")
    if dot and owner not in _TABLES:
        return owner == method.name
    if name == "lr":
        return bool(rates(method.hyper))
    if name in _OF_THE_SERVER:
        return hasattr(method.hyper, "server_lr")
    if owner == "privacy" and config is not None and config.privacy.of_examples:
        return not method.pooled
    if name in _OF_UPLOADS or owner == "privacy":
        return method.uploads and not method.pooled
    if name in _OF_GRAPHS:
        return method.graph
    if name in _OF_COHORTS:
        return not method.pooled
    return True


def is_traced(name: str, method: Method, config: RunConfig) -> bool:
    """True if runs that differ in this setting only are rows of one program."""
    owner, dot, own = name.partition(".")
    if name in _TRACED_NOISE:
        # Otherwise the numbers stand in the method's own functions, or shape its noise.
        central = config.privacy.noise != "per_step" and config.privacy.quantile is None
        return central and method.releases is None and not config.privacy.of_examples
    if dot and owner not in _TABLES:
        return own not in method.options
    return name in _TRACED


def applied(config: RunConfig, settings: Mapping[str, Value]) -> RunConfig:
    """The config with settings of a grid in their place; a share of the clients needs `cohort_of`."""
    for name, value in settings.items():
        owner, dot, own = name.partition(".")
        if dot and owner in _TABLES:
            table = dataclasses.replace(getattr(config, owner), **{own: value})
            config = dataclasses.replace(config, **{owner: table})
        elif dot:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            config = dataclasses.replace(config, set=(*config.set, f"{name}={text}"))
        elif name != "cohort" or isinstance(value, int):
            config = dataclasses.replace(config, **{name: value})
    return config


def with_privacy(config: RunConfig, grid: Grid) -> RunConfig:
    """The config with one value of each axis of noise: delta alone, its epsilon an axis, is no run's."""
    axes = [axis for axis in grid.axes if axis.name in _TRACED_NOISE]
    return applied(config, {axis.name: axis.values[0] if axis.values else axis.low for axis in axes})


def share_of(settings: Mapping[str, Value]) -> float | None:
    """The share of the clients that a cohort such as ``0.1m`` means; None where it is not a share."""
    value = settings.get("cohort")
    return float(value[:-1]) if isinstance(value, str) else None


def cohort_of(settings: Mapping[str, Value], clients: int) -> int | None:
    """The number of clients of such a share, at least one; None where it is not a share."""
    share = share_of(settings)
    return None if share is None else max(1, round(share * clients))
