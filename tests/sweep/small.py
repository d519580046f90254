"""A small sweep that the tests of this folder share."""

from typing import Any

from jaxpfl.runs.config import RunConfig
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


def sweep_of(*axes: str, methods: tuple[str, ...] = ("fedavg",), search: Any = None, **changes: Any) -> Definition:
    """A sweep of linear models on digits, a second's work."""
    return define(methods, RunConfig(**CONFIG | changes), Grid(tuple(map(parse, axes))), Search(**search or {}))
