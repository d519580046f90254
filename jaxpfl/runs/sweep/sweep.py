"""A sweep in its folder: what is done, what is missing, and the running of it.

The folder holds ``sweep.json`` (the definition), ``journal/`` (a record of every run, see `jaxpfl.runs.records`), and once
the sweep is complete ``results.parquet``, ``plots/``, ``best/`` and, last, ``summary.json``.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import jax

from jaxpfl import __version__
from jaxpfl.runs import run_folder
from jaxpfl.runs.records import FAILED, STOPPED, Journal, Record, Value
from jaxpfl.runs.sweep import definition as definitions
from jaxpfl.runs.sweep import halving
from jaxpfl.runs.sweep.claims import LEASE, Claim, Claims
from jaxpfl.runs.sweep.definition import FILE, UNFINISHED, Definition
from jaxpfl.runs.sweep.execute import Prepared, Reporter, prepared, run_group
from jaxpfl.runs.sweep.loaded import Data
from jaxpfl.runs.sweep.order import in_grid_order
from jaxpfl.runs.sweep.plan import Group, Run, groups_of, runs_of
from jaxpfl.runs.sweep.problems import select_each
from jaxpfl.runs.sweep.states import States
from jaxpfl.support import files, signals
from jaxpfl.support.errors import JaxpflError, shown

SUMMARY = "summary.json"
CLAIMS = "claims"
_LOOK_SECONDS = 1.0  # between two looks at the groups of other workers
_FIRST = 8  # groups that are tried before the folder is made


class Sweep:
    """A sweep with its folder.

    Attributes:
      folder: of the sweep.
      definition: of the sweep.
    """

    def __init__(self, folder: Path, definition: Definition, data: Data | None = None):
        self.folder, self.definition = folder, definition
        self._data, self._states = data or Data(), States()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The sweep of a folder.

        Raises:
          JaxpflError: for a folder that holds none, or whose data are no longer those of the sweep.
        """
        sweep = cls(folder, definitions.read(folder))
        sweep._check_data(sweep._checksums())
        return sweep

    @classmethod
    def open(
        cls, folder: Path, definition: Definition, *, resume: bool, force: bool = False, data: Data | None = None
    ) -> Self:
        """Begin a sweep in a folder, or reopen an earlier one, to which methods, values, draws and seeds may be added;
        with ``force``, in the place of an earlier one; with ``data``, on what an earlier sweep has loaded.

        Raises:
          JaxpflError: if the folder holds a sweep and ``resume`` is false, holds another one, or none and ``resume`` is
            true; or if ``force`` would replace what is no sweep, or one that a worker is at.
        """
        definitions.check_folder(folder, resume=resume, force=force)
        sweep = cls(folder, definition, data)
        sweep.check_runs()
        sums = sweep._checksums()
        if resume:
            definitions.grown(old := definitions.read(folder), definition, folder)
            halving.check_grown(old, definition)
            sweep._check_data(sums)
            (folder / SUMMARY).unlink(missing_ok=True)  # what is there is no longer all of it
        if force:
            give_way(folder)
        folder.mkdir(parents=True, exist_ok=True)
        versions = {"jaxpfl": __version__, "jax": jax.__version__, "platform": jax.default_backend()}
        # The order of additions depends on the number of devices: workers make as many, whatever their cores.
        versions |= {"devices": len(jax.devices())}
        files.write_json(folder / FILE, definition.to_json() | {"data": sums, "versions": versions})
        return sweep

    def check_runs(self) -> None:
        """Refuse a sweep none of whose first groups can run, or that names what there is not, before it begins.

        Raises:
          JaxpflError: the reason of the first group, or of the first with such a name.
        """
        groups, first = self.groups, None
        for group in groups[:_FIRST]:
            try:
                prepared(group, self._data)
            except JaxpflError as error:
                first = first or error
            else:
                break
        else:
            if first is not None:
                raise first
        named = {(name, value): group for group in groups for name, value in group.static.items() if _is_name(value)}
        for group in {group.name: group for group in named.values()}.values():
            prepared(group, self._data)

    def _check_data(self, checksums: Mapping[str, int]) -> None:
        """Refuse data sets whose checksums are not those that the sweep began with.

        Raises:
          JaxpflError: with the name of the data set; for a damaged file.
        """
        stored = files.read_json(self.folder / FILE).get("data", {})
        if not isinstance(stored, dict):
            raise JaxpflError(f"{self.folder / FILE} is damaged: data must hold checksums, got {shown(stored)}")
        for name, now in checksums.items():
            if stored.get(name, now) != now:
                raise JaxpflError(f"the data set {name} is not the one that the sweep in {self.folder} began with")

    def _checksums(self) -> dict[str, int]:
        """Checksum of each data set."""
        names = [a.values for a in self.definition.grid.axes if a.name == "data"] or [(self.definition.config.data,)]
        config = self.definition.config
        return {str(name): self._data.checksum(dataclasses.replace(config, data=str(name))) for name in names[0]}

    def journal(self, worker: str = "main") -> Journal:
        """The journals of the folder, to which a worker appends in its own."""
        return Journal(self.folder, worker)

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups of the search."""
        return groups_of(self.definition, runs_of(self.definition))

    def missing(self, records: Sequence[Record]) -> tuple[Group, ...]:
        """Groups with the runs that have no record yet; after the search, those of the chosen settings' other seeds."""
        found = {record.id: record for record in records}
        if self.definition.search.halving and (groups := halving.missing(self.definition, found)):
            return groups
        left = [] if self.definition.search.halving else self._left(runs_of(self.definition), found)
        if not left and len(self.definition.searched) < len(self.definition.seeds):
            left = self._left(self._final(records), found)
        return groups_of(self.definition, left)

    def _left(self, runs: Sequence[Run], found: dict[str, Record]) -> list[Run]:
        left = []
        for group in groups_of(self.definition, runs):
            for run in group.runs:
                record = found.get(run.id)
                short = record is not None and record.status != FAILED and record.rounds < group.rounds
                if record is None or short:
                    left.append(run)
        return left

    def _final(self, records: Sequence[Record]) -> list[Run]:
        """Runs of each problem's chosen settings from the seeds that the search left out."""
        problems = select_each(self.in_order(records), self.definition.searched)
        return [
            Run(method, choice.settings, seed)
            for _, _, best in problems
            for method, choice in best.items()
            for seed in self.definition.seeds
            if choice.settings is not None
        ]

    def progress(self, records: Sequence[Record]) -> tuple[int, int]:
        """Numbers of runs of the search that are recorded, and of all; each rung of successive halving has its own."""
        if self.definition.search.halving:
            return halving.ran(self.definition, records), halving.planned(self.definition)
        runs = {run.id for run in runs_of(self.definition)}
        return sum(record.id in runs for record in records), len(runs)

    def in_order(self, records: Sequence[Record]) -> list[Record]:
        """The records in the order of the grid."""
        axes = {axis.name: axis.values for axis in self.definition.grid.axes}
        return in_grid_order(records, self.definition.methods, axes)

    def run(self, group: Group, journal: Journal, reporter: Reporter, **more: Any) -> None:
        """Run one group, its records appended to a journal chunk by chunk."""
        more = {"states": self._states, "unfinished": self.folder / UNFINISHED / group.name, **more}
        run_group(group, self._data, journal.append, reporter, **more)

    def run_missing(
        self,
        reporter: Reporter,
        *,
        stopped: Callable[[], bool] = lambda: False,
        failed: bool = False,
        worker: str = "main",
        ahead: bool = True,
        lease: float = LEASE,
    ) -> None:
        """Run what is missing until nothing is, beside any other workers: each group is claimed before it is run.

        Args:
          reporter: receives the progress.
          stopped: true once no more is to be done.
          failed: whether runs that failed before are run again.
          worker: name of this process's journal and claims.
          ahead: whether to prepare and compile the next group while one runs.
          lease: seconds after which the group of a worker that shows no life is taken over.
        """
        journal, claims = self.journal(worker), Claims(self.folder / CLAIMS, worker, lease=lease)
        journal.append([])  # on a network file system a new file may stay unseen for a while
        retried = {record.id for record in journal.read() if failed and record.status == FAILED}

        def missing() -> tuple[Group, ...]:
            return self.missing([_again(one) if one.id in retried else one for one in journal.read()])

        rung: set[tuple[str, int | None]] = set()
        compiling: Future[Prepared] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="compile") as thread:
            while (groups := missing()) and not stopped():
                if not any((one.name, one.until) in rung for one in groups):
                    rung = {(one.name, one.until) for one in groups}
                    self._states.only(run for one in groups for run in one.runs)
                groups = [one for one in groups if (one.name, one.until) in rung]
                claim = _first_free(claims, groups)
                if claim is None:
                    reporter.wait(_holders(claims, groups))
                    time.sleep(min(_LOOK_SECONDS, lease / 10))
                    continue
                with claim, signals.offered(claim.give_up):
                    group = next((one for one in missing() if one.name == claim.name), None)
                    if group is None:  # its last holder has finished it meanwhile
                        continue
                    ready = _prepared(group, compiling, self._data)
                    others = [one for one in groups if ahead and one.name != group.name]
                    compiling = _begun(thread, others[0], self._data) if others else None
                    self.run(group, journal, reporter, stopped=stopped, lost=lambda c=claim: c.is_lost, ready=ready)
                    retried -= {run.id for run in group.runs}
            thread.shutdown(cancel_futures=True)
        if not groups:
            shutil.rmtree(self.folder / UNFINISHED, ignore_errors=True)


def _begun(thread: ThreadPoolExecutor, group: Group, loaded: Data) -> Future[Prepared] | None:
    """The compiling of a group, begun; None where there is no room for a thread: it is compiled when its turn comes."""
    try:
        return thread.submit(_compiled, group, loaded)
    except RuntimeError:
        return None


def _first_free(claims: Claims, groups: Sequence[Group]) -> Claim | None:
    """A claim on a group that is free; one whose worker died comes last, as the group may have been the reason."""

    def is_left(group: Group) -> bool:
        holder = claims.holder(group.name)
        return holder is not None and not holder.ended

    for group in sorted(groups, key=is_left):
        if claim := claims.take(group.name):
            return claim
    return None


def _holders(claims: Claims, groups: Sequence[Group]) -> str:
    """The workers that hold groups, in words."""
    holders = [holder for group in groups if (holder := claims.holder(group.name))]
    return ", ".join(sorted({f"{holder.worker} on {holder.host}" for holder in holders})) or "another worker"


def _prepared(group: Group, ahead: Future[Prepared] | None, loaded: Data) -> Prepared | None:
    """A group with its data, made ahead or here; None if that fails, which is recorded where the group is run."""
    if ahead is not None:
        with suppress(Exception):
            ready = ahead.result()
            if ready.group == group:  # none of its runs was recorded since
                return ready
    with suppress(Exception):
        return prepared(group, loaded)
    return None


def _again(record: Record) -> Record:
    """A run that failed as one that stopped just before it: it is missing, and what it had got to is not."""
    return dataclasses.replace(record, status=STOPPED, rounds=record.rounds - 1)


def _compiled(group: Group, loaded: Data) -> Prepared:
    """A group with its data, its programs compiled and in the process's cache."""
    ready = prepared(group, loaded)
    with suppress(Exception):
        ready.simulation(slice(None)).compile([run.seed for run in group.runs], *ready.splits)
    return ready


def give_way(folder: Path) -> None:
    """Remove the sweep in a folder, if there is one.

    Raises:
      JaxpflError: while a worker, which may be another machine's, is at it: it would write into the new one.
    """
    for name, holder in Claims(folder / CLAIMS, "").standing():
        raise JaxpflError(f"{holder.worker} on {holder.host} is at {name} of the sweep in {folder}: wait for it")
    if (folder / FILE).exists():
        run_folder.clear(folder, FILE, definitions.PARTS)


def _is_name(value: Value) -> bool:
    """True for a text that is no share of the clients."""
    return isinstance(value, str) and not value[0].isdigit() and value[0] != "."
