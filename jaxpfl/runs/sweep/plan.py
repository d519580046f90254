"""Plan of a sweep: groups of runs that share a program, and successive halving.

In successive halving, a rung is a number of rounds after which settings are compared. All settings run up to the first
rung, and only the settings with the best validation scores continue to the next rung. The settings of a method are
compared with each other, even if they belong to different programs. The decisions depend only on the records: a run
that reaches a rung is recorded as ``stopped`` with its scores, and if it continues, a record with more rounds replaces
this record.

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
from jaxpfl.runs.sweep.results import headline_of, setting_key, validation_scores
from jaxpfl.support.errors import JaxpflError


@dataclass(frozen=True)
class Run:
    """One run of a sweep: a method, its settings from the grid, and a seed."""

    method: str
    settings: Mapping[str, Value]
    seed: int

    @property
    def id(self) -> str:
        """Identifier of the run, equal to the identifier of its record."""
        return run_id(self.method, self.settings, self.seed)


@dataclass(frozen=True)
class Group:
    """Runs of a method that differ only in traced settings and seeds, so that they can share one program.

    Attributes:
      name: name of the group, derived from its method and static settings.
      method: name of the method.
      config: config with the static settings, except a cohort that ``static`` gives as a share of the clients.
      static: settings of the grid that are the same for all runs of the group.
      among: names of all methods of the sweep.
      runs: runs in the order of the grid; the seed varies fastest.
      until: round at which successive halving stops the runs; None to run all rounds.
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
        """Number of rounds of a run that successive halving does not stop."""
        rounds = resolve(self.config).rounds
        assert rounds is not None
        return rounds

    def only(self, missing: Iterable[Run]) -> Group:
        """Return the group with only its runs that are among the missing runs."""
        wanted = {run.id for run in missing}
        return dataclasses.replace(self, runs=tuple(run for run in self.runs if run.id in wanted))


def settings_of(definition: Definition, method: str) -> list[dict[str, Value]]:
    """Return the distinct settings of a method's runs, in the order of the grid."""
    one = algorithms.get(method)
    return definition.grid.points(lambda name: concerns(name, one, definition.config))


def runs_of(definition: Definition) -> list[Run]:
    """Return a run for each method, setting and seed of the search; the search may use fewer seeds than the sweep."""
    return [
        Run(method, settings, seed)
        for method in definition.methods
        for settings in settings_of(definition, method)
        for seed in definition.searched
    ]


def groups_of(definition: Definition, runs: Iterable[Run]) -> tuple[Group, ...]:
    """Divide runs into groups, in the order in which the groups' first runs appear."""
    found: dict[str, tuple[Run, dict[str, Value], list[Run]]] = {}
    for run in runs:
        method = algorithms.get(run.method)
        private = {name: value for name, value in run.settings.items() if name.startswith("privacy.")}
        config = apply_settings(definition.config, private)  # `is_traced` depends on the noise, which may be an axis
        static = {name: value for name, value in run.settings.items() if not is_traced(name, method, config)}
        text = json.dumps([run.method, dict(sorted(static.items()))])
        name = f"{run.method}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        found.setdefault(name, (run, static, []))[2].append(run)
    groups = []
    for name, (first, static, own) in found.items():
        config = apply_settings(fill_privacy(definition.config, definition.grid), static)
        if definition.search.budget != "rounds":  # the number of rounds follows from the budget of gradients
            rounds = rounds_of(config, first.method, definition.methods, share_of(static))
            config = dataclasses.replace(config, rounds=rounds)
        groups.append(Group(name, first.method, config, static, definition.methods, tuple(own)))
    return tuple(groups)


_Settings = Mapping[str, Value]


def rungs(definition: Definition, method: str) -> tuple[float, ...]:
    """Return the rungs of a method: ascending fractions of its rounds at which settings are compared; the last is 1.

    Rung k is at halving^k times the first rung. ``halving_first`` sets the first rung. By default, it is chosen such
    that about one setting remains at the last rung.
    """
    by, settings = definition.search.halving, len(settings_of(definition, method))
    rounds = resolve(fill_privacy(definition.config, definition.grid)).rounds or 1
    if definition.search.halving_first is not None:
        first = definition.search.halving_first / rounds
    else:
        halvings = math.ceil(math.log(settings, by) - 1e-9)  # until one setting remains; 1e-9 absorbs rounding errors
        first = max(1 / rounds, float(by) ** -halvings)
    found, share = [], first
    while share < 1 - 1e-9:
        found.append(share)
        share *= by
    return (*found, 1.0)


def rounds_at(group: Group, share: float) -> int:
    """Return the number of rounds at a rung, given as a fraction of the group's rounds (rounded up, at least 1)."""
    return min(group.rounds, max(1, math.ceil(group.rounds * share - 1e-9)))


def missing_at_rungs(definition: Definition, found: Mapping[str, Record]) -> tuple[Group, ...]:
    """Return groups of the runs that have not yet reached the current rung of their method.

    The ``until`` of each group is the round of that rung.

    Args:
      definition: definition of the sweep.
      found: run identifier -> record.
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
    """Return whether a run must still be started, or continued to ``rounds`` rounds. Failed runs are not continued."""
    return record is None or (record.status != FAILED and record.rounds < rounds)


def _survivors(
    definition: Definition,
    contenders: Sequence[_Settings],
    runs: Iterable[Run],
    ends: Mapping[str, int],
    found: Mapping[str, Record],
) -> list[dict[str, Value]]:
    """Return the settings that continue after a rung that all contenders have reached, in the order of the grid.

    Settings that already have more rounds than the rung were chosen in an earlier call. Only the other settings are
    compared, by their scores at the rung, so that every call makes the same choice.

    Args:
      definition: definition of the sweep.
      contenders: settings that reached the rung.
      runs: runs of the contenders.
      ends: run identifier -> number of rounds at the rung.
      found: run identifier -> record.
    """
    records = [found[run.id] for run in runs]
    beyond = {setting_key(one.settings) for one in records if one.rounds > ends[one.id]}
    here = [dataclasses.replace(one, status=DONE) if one.status == STOPPED else one for one in records]
    here = [one for one in here if setting_key(one.settings) not in beyond]
    tried = [one for own in validation_scores(here, definition.searched).values() for one in own if not one.against]
    sign = 1 if headline_of(here).lower else -1
    best = sorted(tried, key=lambda one: sign * math.fsum(one.scores))  # stable: ties keep the order of the grid
    places = -(-len(contenders) // definition.search.halving) - len(beyond)
    going = beyond | {setting_key(one.settings) for one in best[: max(0, places)]}
    return [dict(settings) for settings in contenders if setting_key(settings) in going]


def check_rungs(old: Definition, new: Definition) -> None:
    """Check that a resumed sweep has the same rungs as the stored sweep, because runs were scored only at these rungs.

    Raises:
      JaxpflError: if the rungs of a method differ; the message names the method.
    """
    if not old.search.halving:
        return
    rounds = [resolve(fill_privacy(one.config, one.grid)).rounds or 1 for one in (old, new)]
    for method in old.methods:
        shares = rungs(old, method)[:-1], rungs(new, method)[:-1]
        ends = [[math.ceil(of * share - 1e-9) for share in own] for of, own in zip(rounds, shares, strict=True)]
        if ends[0] != ends[1]:
            raise JaxpflError(
                f"--resume would move the rungs of {method}, at which settings were dropped, because its number of "
                "settings or rounds has changed: start a new sweep (one with --halving-first can be extended later)"
            )


def planned_runs(definition: Definition) -> int:
    """Return the planned number of runs; a run counts once for each rung that it reaches."""
    total = 0
    for method in definition.methods:
        left = len(settings_of(definition, method))
        for _ in rungs(definition, method):
            total += left * len(definition.searched)
            left = -(-left // definition.search.halving)
    return total


def recorded_runs(definition: Definition, records: Iterable[Record]) -> int:
    """Return the number of recorded runs; a run counts once for each rung that it has reached."""
    ends = {
        run.id: [rounds_at(group, share) for share in rungs(definition, group.method)]
        for group in groups_of(definition, runs_of(definition))
        for run in group.runs
    }
    return sum(sum(end <= one.rounds for end in ends.get(one.id, [])) for one in records)
