"""A sweep in its folder: find its missing runs, and write its results.

The folder contains ``sweep.json`` (the definition) and ``journal/`` (a record of every run, see `jaxpfl.runs.records`).
When the sweep is complete, it also contains ``results.parquet``, ``plots/``, ``best/`` (the chosen settings as config
files for ``jaxpfl run``) and, written last, ``summary.json``.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax

from jaxpfl import __version__, algorithms
from jaxpfl.engine.evaluate import Headline
from jaxpfl.engine.spec import OWN
from jaxpfl.runs import run_folder
from jaxpfl.runs.config import RunConfig, method_settings, to_json
from jaxpfl.runs.records import DONE, FAILED, STOPPED, Journal, Record, Value, rows
from jaxpfl.runs.run_folder import SUMMARY, check_place, clear
from jaxpfl.runs.sweep import definition as definitions
from jaxpfl.runs.sweep.definition import FILE, Definition
from jaxpfl.runs.sweep.execute import UNDEFINED, Data, prepare_group
from jaxpfl.runs.sweep.grid import apply_settings, fill_privacy
from jaxpfl.runs.sweep.plan import (
    Group,
    Run,
    check_rungs,
    groups_of,
    is_left,
    missing_at_rungs,
    planned_runs,
    recorded_runs,
    runs_of,
)
from jaxpfl.runs.sweep.plots import figures
from jaxpfl.runs.sweep.results import Choice, select, select_each, sort_records, summarize
from jaxpfl.support import files
from jaxpfl.support.console import save, signed
from jaxpfl.support.errors import JaxpflError, shown, writing

_FIRST = 8  # maximum number of groups that are prepared as a check before the folder is created


class Sweep:
    """A sweep and its folder.

    Attributes:
      folder: folder of the sweep.
      definition: definition of the sweep.
      data: cache of the data that were loaded last.
      journal: journal in the folder.
    """

    def __init__(self, folder: Path, definition: Definition, data: Data | None = None):
        self.folder, self.definition = folder, definition
        self.data = data or Data()
        self.journal = Journal(folder)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Open the sweep in a folder.

        Raises:
          JaxpflError: if the folder contains no sweep, or the data have changed since the sweep began.
        """
        sweep = cls(folder, definitions.read(folder, runs_code=True))
        sweep._check_data(sweep._checksums())
        return sweep

    @classmethod
    def open(
        cls, folder: Path, definition: Definition, *, resume: bool, force: bool = False, data: Data | None = None
    ) -> Self:
        """Create a sweep in a folder, or resume the sweep in it.

        Args:
          folder: folder of the sweep.
          definition: definition of the sweep; a resumed sweep may have more methods, values, draws and seeds.
          resume: whether to resume the sweep in the folder.
          force: whether to replace the sweep in the folder.
          data: cache of data that were loaded for an earlier sweep.

        Raises:
          JaxpflError: if the folder contains a sweep and neither ``resume`` nor ``force`` is true; if ``resume`` is
            true and the folder contains no sweep, a different sweep or other data; or if ``force`` is true and the
            folder contains files that are not part of a sweep.
        """
        check_place(folder, FILE, "sweep", definitions.PARTS, resume=resume, force=force)
        if force and (folder / FILE).exists() and not definitions.is_stored(files.read_json(folder / FILE)):
            raise JaxpflError(f"{folder / FILE} is damaged or not the definition of a sweep: choose another --output")
        sweep = cls(folder, definition, data)
        sweep.check_runs()
        sums = sweep._checksums()
        if resume:
            definitions.check_growth(old := definitions.read(folder), definition, folder)
            check_rungs(old, definition)
            sweep._check_data(sums)
            (folder / SUMMARY).unlink(missing_ok=True)  # the old summary would be incomplete
        if force and (folder / FILE).exists():
            clear(folder, FILE, definitions.PARTS)
        folder.mkdir(parents=True, exist_ok=True)
        if texts := definition.texts():
            run_folder.write_code(folder, texts)
        versions = {"jaxpfl": __version__, "jax": jax.__version__, "platform": jax.default_backend()}
        # The order of additions depends on the number of devices, so Ray's workers must use the same number.
        versions |= {"devices": len(jax.devices())}
        files.write_json(folder / FILE, definition.to_json() | {"data": sums, "versions": versions})
        return sweep

    def check_runs(self) -> None:
        """Refuse a sweep before it begins if its first groups all fail, or if the value of an axis is an unknown name.

        Raises:
          JaxpflError: the error of the first group, or of a group with an unknown name.
        """
        groups, first = self.groups, None
        for group in groups[:_FIRST]:
            try:
                prepare_group(group, self.data)
            except JaxpflError as error:
                first = first or error
            else:
                break
        else:
            if first is not None:
                raise first
        named = {(name, value): group for group in groups for name, value in group.static.items() if _is_name(value)}
        for group in {group.name: group for group in named.values()}.values():
            prepare_group(group, self.data)

    def _check_data(self, checksums: Mapping[str, int]) -> None:
        """Check that the data sets have the checksums that were stored when the sweep began.

        Raises:
          JaxpflError: if a data set has changed (the message names it), or the stored checksums are damaged.
        """
        stored = files.read_json(self.folder / FILE).get("data", {})
        if not isinstance(stored, dict):
            raise JaxpflError(f"{self.folder / FILE} is damaged: 'data' must map to checksums, got {shown(stored)}")
        for name, now in checksums.items():
            if stored.get(name, now) != now:
                raise JaxpflError(f"the data set {name} has changed since the sweep in {self.folder} began")

    def _checksums(self) -> dict[str, int]:
        """Return the checksum of each data set, by name."""
        names = [a.values for a in self.definition.grid.axes if a.name == "data"] or [(self.definition.config.data,)]
        config = self.definition.config
        return {str(name): self.data.checksum(dataclasses.replace(config, data=str(name))) for name in names[0]}

    def cpu_devices(self) -> int | None:
        """Return the number of CPU devices with which the sweep began; None if it began on a GPU or TPU."""
        versions = files.read_json(self.folder / FILE).get("versions", {})
        devices = versions.get("devices")
        return devices if versions.get("platform") == "cpu" and type(devices) is int and devices > 0 else None

    def failed(self) -> set[str]:
        """Return the identifiers of the failed runs."""
        return {record.id for record in self.journal.read() if record.status == FAILED}

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups of runs in the search."""
        return groups_of(self.definition, runs_of(self.definition))

    def missing(self, records: Sequence[Record], again: Collection[str] = ()) -> tuple[Group, ...]:
        """Return groups of the runs that are still missing.

        When the search is complete, these are the runs of the chosen settings with the seeds that the search left out.

        Args:
          records: records in the journal.
          again: identifiers of failed runs that are repeated.
        """
        # A run to repeat counts as stopped one round before the end, so that it is missing but has passed the earlier
        # rungs.
        records = [
            dataclasses.replace(one, status=STOPPED, rounds=one.rounds - 1) if one.id in again else one
            for one in records
        ]
        found = {record.id: record for record in records}
        if self.definition.search.halving and (groups := missing_at_rungs(self.definition, found)):
            return groups
        left = [] if self.definition.search.halving else self._unfinished(runs_of(self.definition), found)
        if not left and len(self.definition.searched) < len(self.definition.seeds):
            left = self._unfinished(self._final(records), found)
        return groups_of(self.definition, left)

    def _unfinished(self, runs: Sequence[Run], found: dict[str, Record]) -> list[Run]:
        groups = groups_of(self.definition, runs)
        return [run for group in groups for run in group.runs if is_left(found.get(run.id), group.rounds)]

    def _final(self, records: Sequence[Record]) -> list[Run]:
        """Return all runs, recorded or not, of each problem's chosen settings with all seeds."""
        problems = select_each(self.grid_order(records), self.definition.searched)
        return [
            Run(method, choice.settings, seed)
            for _, _, best in problems
            for method, choice in best.items()
            for seed in self.definition.seeds
            if choice.settings is not None
        ]

    def progress(self, records: Sequence[Record]) -> tuple[int, int]:
        """Return the recorded and the planned number of runs in the search.

        With successive halving, a run counts once for each comparison (rung) that it reaches.
        """
        if self.definition.search.halving:
            return recorded_runs(self.definition, records), planned_runs(self.definition)
        runs = {run.id for run in runs_of(self.definition)}
        return sum(record.id in runs for record in records), len(runs)

    def grid_order(self, records: Sequence[Record]) -> list[Record]:
        """Return the records in the order of the grid."""
        axes = {axis.name: axis.values for axis in self.definition.grid.axes}
        return sort_records(records, self.definition.methods, axes)


def _is_name(value: Value) -> bool:
    """Return whether a value of an axis is a name, such as a model's; a cohort such as ``0.1m`` is not a name."""
    return isinstance(value, str) and not value[0].isdigit() and value[0] != "."


def finish(sweep: Sweep) -> dict[str, Any]:
    """Summarize a complete sweep and write its results, ``summary.json`` last.

    Returns:
      The summary, as `summarize` returns it, with caveats, the folder and the version. If there are several problems
      (see `jaxpfl.runs.sweep.results`), the entry ``problems`` lists ``{"settings", "best"}`` for each of them, where
      ``best`` has the same form as in the summary.
    """
    import pandas

    seeds = sweep.definition.searched
    records = sweep.grid_order(sweep.journal.read())
    chosen = select(records, seeds) if sweep.definition.search.select == "validation" else {}
    each = select_each(records, seeds) if chosen else []
    for problem, _, best in each:
        for method, choice in best.items():
            if choice.settings is not None:
                name = "-".join([method, *(f"{axis}={value}" for axis, value in problem.items())])
                values = _config(sweep, method, choice.settings, records)
                write_best(sweep.folder / "best", re.sub(r"[^\w.=-]", "_", name), values)
    programs = {record.program or record.group for record in records if record.status != FAILED}
    seconds = math.fsum(one.seconds + (one.metrics.get("compile_seconds") or 0.0) for one in records)
    summary = summarize(records, chosen, seeds=seeds, programs=len(programs), seconds=seconds)
    summary["caveats"] = caveats(records, chosen)
    if len(each) > 1:
        more = {"seeds": seeds, "programs": 0, "seconds": 0.0}
        summary["problems"] = [
            {"settings": problem, "best": summarize(own, best, **more)["best"]} for problem, own, best in each
        ]
    files.write_table(sweep.folder / "results.parquet", pandas.DataFrame(rows(records)))
    with signed("jaxpfl sweep"):
        for name, figure in figures(summary).items():
            save(figure, sweep.folder / "plots", name)
    summary |= {"run_dir": str(sweep.folder), "version": __version__}
    files.write_json(sweep.folder / SUMMARY, summary)
    return summary


def caveats(records: Sequence[Record], chosen: Mapping[str, Choice]) -> list[str]:
    """Return notes about metrics that are undefined for some clients, and about limitations of privacy claims."""
    counted = ((name, count) for record in records for name, count in record.metrics.items())
    names = dict.fromkeys(name.removesuffix(UNDEFINED) for name, count in counted if name.endswith(UNDEFINED) and count)
    found = [
        f"{Headline(name.removeprefix('personalized_')).words}: undefined on the test examples of some clients, "
        "so means leave these clients out"
        for name in names
    ]
    private = Counter(record.method for record in records if record.metrics.get("epsilon") is not None)
    if private:
        most = ", ".join(f"{method} {count}" for method, count in private.items())
        by_choice = " and the choice of a setting by their validation examples" * bool(chosen)
        found.append(
            f"each epsilon covers one run alone: the other runs on the same clients (private ones: {most})"
            f"{by_choice} are not covered"
        )
    return found


def _config(sweep: Sweep, method: str, settings: Mapping[str, Value], records: Sequence[Record]) -> dict[str, Any]:
    """Return the config-file values of the chosen setting's run, with the cohort and the rounds as numbers."""
    ran = next(r for r in records if r.method == method and r.settings == settings and r.status == DONE)
    share = isinstance(settings.get("cohort"), str)
    counts: dict[str, Value] = {"cohort": int(ran.metrics["cohort_size"] or 0)} if share else {}
    base = fill_privacy(sweep.definition.config, sweep.definition.grid)
    return best_config(base, method, {**settings, **counts}, ran.rounds)


def best_config(
    base: RunConfig, method: str, settings: Mapping[str, Value], rounds: int | None = None
) -> dict[str, Any]:
    """Return the config-file values of a run with one method and one setting of a sweep, without defaults.

    Args:
      base: config that all runs of the sweep share, not resolved.
      method: name of the method.
      settings: axis name -> value; a name is a config field (``lr``, ``privacy.epsilon``) or a hyper-parameter
        (``adaped.psi_init``). The cohort must be a number, not a share of the clients.
      rounds: number of rounds, if it differs from the number in ``base``.
    """
    config = apply_settings(base, settings)
    values = to_json(config if rounds is None else dataclasses.replace(config, rounds=rounds))
    values |= {name: getattr(config, name) for name in OWN}  # files are named with their folders
    values["set"] = [f"{method}.{name}={text}" for name, text in method_settings(config, method, None).items()]
    return {"methods": [algorithms.get(method).source or method], **_changed(values, to_json(RunConfig()))}


def _changed(values: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that differ from their defaults, also within tables."""
    return {
        name: _changed(value, default[name]) if isinstance(value, dict) else value
        for name, value in values.items()
        if value != default[name]
    }


def write_best(folder: Path, name: str, values: Mapping[str, Any]) -> Path:
    """Write ``folder/NAME.json``; the folder is created if it is missing, but its parent must exist.

    Raises:
      UnwritableError: if the file cannot be written.
    """
    path = folder / f"{name}.json"
    with writing(folder):
        folder.mkdir(exist_ok=True)
    files.write_json(path, values)
    return path
