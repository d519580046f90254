"""A small sweep that the tests of this folder share."""

import dataclasses
from pathlib import Path
from typing import Any

from jaxpfl.runs.config import RunConfig
from jaxpfl.runs.records import Journal, Record
from jaxpfl.runs.sweep.definition import Definition, Search, define
from jaxpfl.runs.sweep.grid import Grid, parse

CONFIG: dict[str, Any] = {
    "model": "linear",
    "clients": 6,
    "cohort": 3,
    "local_steps": 2,
    "batch_size": 5,
    "rounds": 3,
    "seeds": 2,
}


class Fails:
    """A function that raises an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *_: object) -> None:
        raise self.error


def timeless(folder: Path) -> dict[str, Record]:
    """The records of a sweep by their runs, without their seconds."""
    found = {}
    for record in Journal(folder).read():
        metrics = {name: value for name, value in record.metrics.items() if not name.endswith("seconds")}
        found[record.id] = dataclasses.replace(record, metrics=metrics, seconds=0.0)
    return found


def sweep_of(*axes: str, methods: tuple[str, ...] = ("fedavg",), search: Any = None, **changes: Any) -> Definition:
    """A sweep of linear models on digits, a second's work."""
    return define(methods, RunConfig(**CONFIG | changes), Grid(tuple(map(parse, axes))), Search(**search or {}))
