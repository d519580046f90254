"""Plan of a sweep: its runs, in as few groups as shapes; a group is rows of one program."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxpfl import algorithms
from jaxpfl.engine.execution_plan import bucket_of
from jaxpfl.runs.config import RunConfig, resolve
from jaxpfl.runs.records import Value, run_id
from jaxpfl.runs.sweep.axes import applied, concerns, is_traced, share_of, with_privacy
from jaxpfl.runs.sweep.budget import rounds_of
from jaxpfl.runs.sweep.definition import Definition


@dataclass(frozen=True)
class Run:
    """One run: a method with settings of the grid, from a seed."""

    method: str
    settings: Mapping[str, Value]
    seed: int

    @property
    def id(self) -> str:
        """Name of the run by its content, as that of its record."""
        return run_id(self.method, self.settings, self.seed)


@dataclass(frozen=True)
class Group:
    """Runs of a method that differ in traced values and seeds only.

    Attributes:
      name: of the group by its content, the same in every process.
      method: of all its runs.
      config: of all its runs, but for the traced settings; a share of the clients as cohort is left out.
      static: the settings of the grid that all its runs share.
      among: all methods of the sweep.
      runs: in the order of the grid, seeds innermost.
      until: the round at which successive halving stops them; None for all rounds.
    """

    name: str
    method: str
    config: RunConfig
    static: Mapping[str, Value]
    among: tuple[str, ...]
    runs: tuple[Run, ...]
    until: int | None = None

    @property
    def rounds(self) -> int:
        """Rounds of each run, if it is not stopped."""
        rounds = resolve(self.config).rounds
        assert rounds is not None
        return rounds

    def only(self, missing: Iterable[Run]) -> Group:
        """The group with some of its runs."""
        wanted = {run.id for run in missing}
        return dataclasses.replace(self, runs=tuple(run for run in self.runs if run.id in wanted))


def settings_of(definition: Definition, method: str) -> list[dict[str, Value]]:
    """The settings of a method's runs, each once, in the order of the grid."""
    one = algorithms.get(method)
    return definition.grid.points(lambda name: concerns(name, one, definition.config))


def runs_of(definition: Definition) -> list[Run]:
    """Runs of the search."""
    return [
        Run(method, settings, seed)
        for method in definition.methods
        for settings in settings_of(definition, method)
        for seed in definition.searched
    ]


def groups_of(definition: Definition, runs: Iterable[Run]) -> tuple[Group, ...]:
    """Groups of runs, in the order of their first ones."""
    found: dict[str, tuple[Run, dict[str, Value], list[Run]]] = {}
    for run in runs:
        method = algorithms.get(run.method)
        private = {name: value for name, value in run.settings.items() if name.startswith("privacy.")}
        config = applied(definition.config, private)  # which noise there is may be an axis too
        static = {name: value for name, value in run.settings.items() if not is_traced(name, method, config)}
        text = json.dumps([run.method, dict(sorted(static.items()))])
        name = f"{run.method}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        found.setdefault(name, (run, static, []))[2].append(run)
    return tuple(
        Group(name, first.method, _config(definition, first.method, static), static, definition.methods, tuple(own))
        for name, (first, static, own) in found.items()
    )


def _config(definition: Definition, method: str, static: Mapping[str, Value]) -> RunConfig:
    """The config of a group: its rounds those of the budget, its clients in a bucket if another count shares it."""
    config = applied(with_privacy(definition.config, definition.grid), static)
    counts = [value for axis in definition.grid.axes if axis.name == "clients" for value in axis.values]
    if config.plan.client_bucket == "none" and [_bucket(count) for count in counts].count(_bucket(config.clients)) > 1:
        config = dataclasses.replace(config, plan=dataclasses.replace(config.plan, client_bucket="auto"))
    if definition.search.budget == "rounds":
        return config
    rounds = rounds_of(config, method, definition.methods, share_of(static))
    return dataclasses.replace(config, rounds=rounds)


def _bucket(clients: Value | None) -> int:
    """Rows of the stack of so many clients in a bucket; 0 where the number is not known."""
    return bucket_of(clients) if isinstance(clients, int) else 0
