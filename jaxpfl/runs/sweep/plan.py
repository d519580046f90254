"""Sweep plan: groups of equally shaped runs, each one program, and the rungs of successive halving.

In successive halving all settings run a few rounds, and the best of them on validation examples go on. A method's
settings are compared with each other, whatever programs they are rows of. A decision follows from the records alone: a
run at a rung's end is recorded as ``stopped`` with its scores there, which later rounds replace.

Reference: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization" (2016).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxpfl import algorithms
from jaxpfl.runs.config import RunConfig, resolve
from jaxpfl.runs.records import DONE, FAILED, STOPPED, Record, Value, run_id
from jaxpfl.runs.sweep.definition import Definition, rounds_of
from jaxpfl.runs.sweep.grid import apply_settings, concerns, fill_privacy, is_traced, share_of
from jaxpfl.runs.sweep.selection import headline_of, setting_key, validation_scores
from jaxpfl.support.errors import JaxpflError


@dataclass(frozen=True)
class Run:
    """One run: a method with settings of the grid, from a seed."""

    method: str
    settings: Mapping[str, Value]
    seed: int

    @property
    def id(self) -> str:
        """Name of the run by its content, equal to its record's name."""
        return run_id(self.method, self.settings, self.seed)


@dataclass(frozen=True)
class Group:
    """Runs of a method that differ in traced values and seeds only.

    Attributes:
      name: name of the group by its content, the same in every process.
      method: method of all its runs.
      config: config of all its runs, but for the traced settings; a share of the clients as cohort is left out.
      static: the settings of the grid that all its runs share.
      among: all methods of the sweep.
      runs: runs in the order of the grid, seeds innermost.
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
        config = apply_settings(definition.config, private)  # the kind of noise may be an axis too
        static = {name: value for name, value in run.settings.items() if not is_traced(name, method, config)}
        text = json.dumps([run.method, dict(sorted(static.items()))])
        name = f"{run.method}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        found.setdefault(name, (run, static, []))[2].append(run)
    groups = []
    for name, (first, static, own) in found.items():
        config = apply_settings(fill_privacy(definition.config, definition.grid), static)
        if definition.search.budget != "rounds":  # as many rounds as the budget allows
            rounds = rounds_of(config, first.method, definition.methods, share_of(static))
            config = dataclasses.replace(config, rounds=rounds)
        groups.append(Group(name, first.method, config, static, definition.methods, tuple(own)))
    return tuple(groups)


_Settings = Mapping[str, Value]


def rungs(definition: Definition, method: str) -> tuple[float, ...]:
    """Shares of all rounds at which a method's settings are compared, ascending; the last is 1.

    Rung k is at halving^k times the first share. ``halving_first`` sets the first one; by default it is such that about
    one setting is left at the last rung.
    """
    by, settings = definition.search.halving, len(settings_of(definition, method))
    rounds = resolve(fill_privacy(definition.config, definition.grid)).rounds or 1
    if definition.search.halving_first is not None:
        first = definition.search.halving_first / rounds
    else:
        halvings = math.ceil(math.log(settings, by) - 1e-9)  # until one setting is left
        first = max(1 / rounds, float(by) ** -halvings)
    found, share = [], first
    while share < 1 - 1e-9:
        found.append(share)
        share *= by
    return (*found, 1.0)


def rounds_at(group: Group, share: float) -> int:
    """Rounds that make up a share of a group's rounds."""
    return min(group.rounds, max(1, math.ceil(group.rounds * share - 1e-9)))


def missing_at_rungs(definition: Definition, found: Mapping[str, Record]) -> tuple[Group, ...]:
    """Groups of runs that the present rung of each method still lacks, to be run until its end.

    Args:
      definition: definition of the sweep.
      found: records by run, without the runs that are to be repeated.
    """
    return tuple(group for method in definition.methods for group in _missing_of_method(definition, method, found))


def _missing_of_method(definition: Definition, method: str, found: Mapping[str, Record]) -> list[Group]:
    runs = [run for run in runs_of(definition) if run.method == method]
    groups = groups_of(definition, runs)
    contenders = settings_of(definition, method)
    for share in rungs(definition, method):
        ends = {run.id: rounds_at(group, share) for group in groups for run in group.runs}
        among = {setting_key(settings) for settings in contenders}
        own = [run for run in runs if setting_key(run.settings) in among]
        left = [run for run in own if is_left(found.get(run.id), ends[run.id])]
        if left:
            return [dataclasses.replace(group, until=rounds_at(group, share)) for group in groups_of(definition, left)]
        contenders = _survivors(definition, contenders, own, ends, found)
    return []


def is_left(record: Record | None, rounds: int) -> bool:
    """True if a run of so many rounds has yet to start or to continue."""
    return record is None or (record.status != FAILED and record.rounds < rounds)


def _survivors(
    definition: Definition,
    contenders: Sequence[_Settings],
    runs: Iterable[Run],
    ends: Mapping[str, int],
    found: Mapping[str, Record],
) -> list[dict[str, Value]]:
    """The settings that go on from a rung that all have reached, in the order of the grid.

    Settings that have gone beyond the rung were chosen before, so only the others are compared, by their scores at the
    rung: the choice is the same at every later time.
    """
    records = [found[run.id] for run in runs]
    beyond = {setting_key(one.settings) for one in records if one.rounds > ends[one.id]}
    here = [dataclasses.replace(one, status=DONE) if one.status == STOPPED else one for one in records]
    here = [one for one in here if setting_key(one.settings) not in beyond]
    tried = [one for own in validation_scores(here, definition.searched).values() for one in own if not one.against]
    sign = 1 if headline_of(here).lower else -1
    best = sorted(tried, key=lambda one: sign * math.fsum(one.scores))  # the first of equals, as sorting is stable
    places = -(-len(contenders) // definition.search.halving) - len(beyond)
    going = beyond | {setting_key(one.settings) for one in best[: max(0, places)]}
    return [dict(settings) for settings in contenders if setting_key(settings) in going]


def check_rungs(old: Definition, new: Definition) -> None:
    """Refuse a sweep with other rungs, at which no run so far was scored.

    Raises:
      JaxpflError: with the method.
    """
    if not old.search.halving:
        return
    rounds = [resolve(fill_privacy(one.config, one.grid)).rounds or 1 for one in (old, new)]
    for method in old.methods:
        shares = rungs(old, method)[:-1], rungs(new, method)[:-1]
        ends = [[math.ceil(of * share - 1e-9) for share in own] for of, own in zip(rounds, shares, strict=True)]
        if ends[0] != ends[1]:
            raise JaxpflError(
                f"--resume would move the rungs of {method} by its number of settings or rounds, and the old ones "
                "have decided already: start a new sweep, with --halving-first to add to it later"
            )


def planned_runs(definition: Definition) -> int:
    """Number of runs over all rungs; a run counts once for each of its rungs."""
    total = 0
    for method in definition.methods:
        left = len(settings_of(definition, method))
        for _ in rungs(definition, method):
            total += left * len(definition.searched)
            left = -(-left // definition.search.halving)
    return total


def recorded_runs(definition: Definition, records: Iterable[Record]) -> int:
    """Number of recorded runs; a run counts once for each rung that it has passed."""
    ends = {
        run.id: [rounds_at(group, share) for share in rungs(definition, group.method)]
        for group in groups_of(definition, runs_of(definition))
        for run in group.runs
    }
    return sum(sum(end <= one.rounds for end in ends.get(one.id, [])) for one in records)
