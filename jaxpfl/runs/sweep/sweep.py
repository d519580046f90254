"""A sweep in its folder: what is done and what is missing.

The folder holds ``sweep.json`` (the definition), ``journal/`` (a record of every run, see `jaxpfl.runs.records`), and,
once the sweep is complete, ``results.parquet``, ``plots/``, ``best/`` and, last, ``summary.json``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Self

import jax

from jaxpfl import __version__
from jaxpfl.runs import run_folder
from jaxpfl.runs.records import FAILED, STOPPED, Journal, Record, Value
from jaxpfl.runs.sweep import definition as definitions
from jaxpfl.runs.sweep import halving
from jaxpfl.runs.sweep.definition import FILE, Definition
from jaxpfl.runs.sweep.execute import prepared
from jaxpfl.runs.sweep.loaded import Data
from jaxpfl.runs.sweep.order import in_grid_order
from jaxpfl.runs.sweep.plan import Group, Run, groups_of, runs_of
from jaxpfl.runs.sweep.problems import select_each
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, shown

SUMMARY = "summary.json"
_FIRST = 8  # groups that are tried before the folder is made


class Sweep:
    """A sweep with its folder.

    Attributes:
      folder: of the sweep.
      definition: of the sweep.
      data: last loaded.
    """

    def __init__(self, folder: Path, definition: Definition, data: Data | None = None):
        self.folder, self.definition = folder, definition
        self.data = data or Data()

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
            true; or if ``force`` would replace what is no sweep.
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
        if force and (folder / FILE).exists():
            run_folder.clear(folder, FILE, definitions.PARTS)
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
                prepared(group, self.data)
            except JaxpflError as error:
                first = first or error
            else:
                break
        else:
            if first is not None:
                raise first
        named = {(name, value): group for group in groups for name, value in group.static.items() if _is_name(value)}
        for group in {group.name: group for group in named.values()}.values():
            prepared(group, self.data)

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
        return {str(name): self.data.checksum(dataclasses.replace(config, data=str(name))) for name in names[0]}

    def journal(self) -> Journal:
        """The journal of the folder."""
        return Journal(self.folder)

    def cpu_devices(self) -> int | None:
        """Number of CPU devices that the sweep began with; None where it is on others."""
        versions = files.read_json(self.folder / FILE).get("versions", {})
        devices = versions.get("devices")
        return devices if versions.get("platform") == "cpu" and type(devices) is int and devices > 0 else None

    def failed(self) -> set[str]:
        """Names of the runs that failed."""
        return {record.id for record in self.journal().read() if record.status == FAILED}

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups of the search."""
        return groups_of(self.definition, runs_of(self.definition))

    def missing(self, records: Sequence[Record], again: Collection[str] = ()) -> tuple[Group, ...]:
        """Groups with the runs that have no record yet; after the search, those of the chosen settings' other seeds.

        Args:
          records: of the journal.
          again: names of runs that failed and are run once more.
        """
        # As if they had stopped just before: they are missing, and what they had got to is not.
        records = [
            dataclasses.replace(one, status=STOPPED, rounds=one.rounds - 1) if one.id in again else one
            for one in records
        ]
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


def _is_name(value: Value) -> bool:
    """True for a text that is no share of the clients."""
    return isinstance(value, str) and not value[0].isdigit() and value[0] != "."
