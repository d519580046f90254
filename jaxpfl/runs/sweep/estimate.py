"""Sweeps over the settings of a study of estimation: the same grids, folder, journal and tables as sweeps of training.

A row is one run of the study at one seed. A study chooses nothing, and neither does its sweep.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxpfl import __version__
from jaxpfl.core import checks
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, expecting, is_exhausted
from jaxpfl.runs.profile import CompileClock
from jaxpfl.runs.records import DONE, FAILED, Journal, Record
from jaxpfl.studies import registry
from jaxpfl.studies.study import Options, Results, Study
from jaxpfl.runs.sweep.definition import FILE, check_folder, grid_changes
from jaxpfl.runs.sweep.execute import Reporter
from jaxpfl.runs.sweep.grid import Grid
from jaxpfl.runs.sweep.order import in_grid_order, setting_key
from jaxpfl.runs.sweep.outcome import written
from jaxpfl.runs.sweep.plan import Run
from jaxpfl.runs.sweep.study_axes import applied, named, restored
from jaxpfl.runs.sweep.sweep import SUMMARY, give_way

_SEED = "seed"


@dataclasses.dataclass(frozen=True)
class StudyDefinition:
    """A sweep over a study.

    Attributes:
      name: of the study.
      settings: those that all runs share; its ``seed`` is the first one.
      grid: the axes, under their full names.
      seeds: number of seeds.
      options: of the study; None for one without.
    """

    name: str
    settings: Any
    grid: Grid
    seeds: int = 1
    options: Options | None = None

    @property
    def study(self) -> Study:
        """The registered study."""
        return registry.get(self.name)

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, seeds innermost."""
        return tuple(Run(self.name, point, seed) for point in self.grid.points() for seed in self.searched)

    @property
    def methods(self) -> tuple[str, ...]:
        """The study's name: its records stand under it as those of a method do."""
        return (self.name,)

    @property
    def searched(self) -> tuple[int, ...]:
        """Seeds of each setting."""
        first = getattr(self.settings, _SEED, 0)
        return tuple(range(first, first + self.seeds))

    def settings_of(self, run: Run) -> Any:
        """The study's settings of one run."""
        settings = applied(self.study, self.settings, dict(run.settings))
        return dataclasses.replace(settings, seed=run.seed) if hasattr(settings, _SEED) else settings

    def to_json(self) -> dict[str, Any]:
        """The definition as JSON-able values."""
        options = {} if self.options is None else vars(self.options)
        common = {"study": self.name, "settings": _plain(vars(self.settings)), "options": _plain(options)}
        return common | {"grid": files.jsonable(self.grid.to_json()), "seeds": self.seeds}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: files.jsonable(str(v) if isinstance(v, Path) else v) for k, v in values.items()}


def define_study(
    name: str, settings: Any = None, grid: Grid | None = None, seeds: int = 1, options: Options | None = None
) -> StudyDefinition:
    """A sweep over a study, everything checked that can be without running it.

    Args:
      name: of a registered study.
      settings: common to all runs; the study's defaults unless given.
      grid: the axes.
      seeds: number of seeds, from that of the settings on.
      options: of the study.

    Raises:
      JaxpflError: for unknown names, values of another type, and if no point of the grid can be studied.
    """
    study = registry.get(name)
    settings = study.settings() if settings is None else settings
    if seeds < 1:
        raise JaxpflError(f"seeds must be at least 1, got {seeds}")
    if seeds > 1 and not hasattr(settings, _SEED):
        raise JaxpflError(f"{name} draws nothing: it has no seeds, got --seeds {seeds}")
    if hasattr(settings, _SEED):
        checks.seed(_SEED, settings.seed, seeds)
    found = StudyDefinition(name, settings, named(grid or Grid(), study), seeds, options)
    first: JaxpflError | None = None
    for run in found.runs:
        try:
            found.settings_of(run).check()
            return found
        except JaxpflError as error:
            first = first or error
    assert first is not None
    raise first


def from_stored(stored: Any, path: Path) -> StudyDefinition:
    """Definition from the values of a file, as `StudyDefinition.to_json` gives them.

    Raises:
      JaxpflError: for values that were changed by hand to what no sweep of a study is.
    """
    with expecting(path, "the definition of a sweep of a study"):
        study = registry.get(stored["study"])
        options = None if study.options is None else restored(study.options, stored["options"])
        grid, settings = Grid.from_json(stored["grid"]), restored(study.settings, stored["settings"])
        return define_study(stored["study"], settings, grid, stored["seeds"], options)


class StudySweep:
    """A sweep over a study with its folder, which holds what that of a `Sweep` does."""

    def __init__(self, folder: Path, definition: StudyDefinition):
        self.folder, self.definition = folder, definition

    @classmethod
    def open(cls, folder: Path, definition: StudyDefinition, *, resume: bool, force: bool = False) -> Self:
        """Begin a sweep in a folder, or reopen an earlier one, to which values, draws and seeds may be added; with
        ``force``, in the place of an earlier one.

        Raises:
          JaxpflError: as `Sweep.open`.
        """
        check_folder(folder, resume=resume, force=force)
        stored = folder / FILE
        if resume:
            _check_grown(files.read_json(stored), definition, folder)
            (folder / SUMMARY).unlink(missing_ok=True)  # what is there is no longer all of it
        if force:
            give_way(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files.write_json(stored, definition.to_json() | {"versions": {"jaxpfl": __version__}})
        return cls(folder, definition)

    def journal(self) -> Journal:
        """The journal of the folder."""
        return Journal(self.folder)

    def missing(self, records: Sequence[Record], *, failed: bool = False) -> list[Run]:
        """Runs that have no record yet.

        Args:
          records: of the journal.
          failed: whether runs that failed are to be run again.
        """
        found = {record.id for record in records if not (failed and record.status == FAILED)}
        return [run for run in self.definition.runs if run.id not in found]

    def progress(self, records: Sequence[Record], *, failed: bool = False) -> tuple[int, int]:
        """Numbers of runs that need not be run, and of all; ``failed`` as for `missing`."""
        runs = self.definition.runs
        return len(runs) - len(self.missing(records, failed=failed)), len(runs)

    def run_missing(
        self, reporter: Reporter, *, stopped: Callable[[], bool] = lambda: False, failed: bool = False
    ) -> None:
        """Run all that is missing, each run recorded when it ends; the same arguments as `Sweep.run_missing`."""
        journal = self.journal()
        for run in self.missing(journal.read(), failed=failed):
            if stopped():
                return
            reporter.start(self.definition.name, 1, 1)
            journal.append([_record(self.definition, run)])
            reporter.finish(1)

    def finish(self) -> dict[str, Any]:
        """Summarise the sweep and write what its folder lacks, ``summary.json`` last.

        Returns:
          The summary, as `summarize` gives it, without best settings.
        """
        axes = {axis.name: axis.values for axis in self.definition.grid.axes}
        records = in_grid_order(self.journal().read(), [self.definition.name], axes)
        return written(self.folder, records, {}, [run.seed for run in self.definition.runs])


def _record(definition: StudyDefinition, run: Run) -> Record:
    """One run of the study; a setting that cannot be studied, or does not fit into memory, has failed."""
    began, own = time.perf_counter(), definition.name
    try:
        settings = definition.settings_of(run)
        with CompileClock() as clock:
            results = definition.study.run(settings, definition.options)
    except Exception as error:
        if not is_exhausted(error) and not isinstance(error, JaxpflError):
            raise
        reason = " ".join(str(error).split())
        return Record(own, run.settings, run.seed, FAILED, reason, rounds=1, group=own)
    seconds = time.perf_counter() - began - clock.seconds
    metrics = metrics_of(results) | {"compile_seconds": clock.seconds}
    return Record(own, run.settings, run.seed, DONE, "", 1, metrics, seconds, own, setting_key(run.settings))


def metrics_of(results: Results) -> dict[str, float | None]:
    """Mean error of each estimator of a study; of a study without, the means of its series, or its numbers.

    A series of several numbers, [repetitions, k], gives ``NAME[0]``, ``NAME[1]``, and a number within others
    ``OUTER.INNER``.
    """
    rows = results.json.get("mse")
    if isinstance(rows, dict):
        return {name: _number(row["mean"]) for name, row in rows.items()}
    if not results.series:
        return _flat({name: value for name, value in results.json.items() if name != "settings"})
    found: dict[str, float | None] = {}
    for name, values in results.series.items():
        means = np.asarray(values, float).mean(axis=0)
        for place in np.ndindex(means.shape):
            found[name + "".join(f"[{i}]" for i in place)] = _number(means[place])
    return found


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, value in files.jsonable(dict(values)).items():
        if isinstance(value, dict):
            found |= _flat(value, f"{before}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{before}{name}"] = _number(value)
    return found


def _number(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _check_grown(stored: Any, new: StudyDefinition, folder: Path) -> None:
    """Refuse a sweep that is not the stored one with more values, draws or seeds."""
    now = new.to_json()
    try:
        old = Grid.from_json(stored["grid"])
        changes = [f"{name}: {stored[name]} -> {now[name]}" for name in ("study",) if stored[name] != now[name]]
        for part in ("settings", "options"):
            names = dict.fromkeys([*stored[part], *now[part]])
            pairs = {name: (stored[part].get(name), now[part].get(name)) for name in names}
            changes += [f"{name}: {was} -> {is_}" for name, (was, is_) in pairs.items() if was != is_]
        if now["seeds"] < stored["seeds"]:
            changes.append(f"seeds: {stored['seeds']} -> {now['seeds']}")
    except (KeyError, TypeError, AttributeError):
        raise JaxpflError(f"{folder / FILE} holds no sweep of a study of estimation, or is damaged") from None
    changes += grid_changes(old, new.grid)
    if changes:
        raise JaxpflError(f"--resume would change the sweep in {folder}: {'; '.join(changes)}")
