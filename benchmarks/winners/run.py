"""Run of the map in its folder; finished runs are kept, and running it again continues."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxpfl import __version__, algorithms
from jaxpfl.runs.control import Reporter
from jaxpfl.runs.records import Journal, Record
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, warn

from . import page, plot
from .atlas import FILE, Atlas, Place
from .cells import CELLS, QUICK, QUICK_METHODS, QUICK_SPLITS, SPLITS, Cell
from .gather import place_of
from .measure import CELL, Drawn, check_data, groups_of, measure, missing

_STATE = "winners.json"


class Interrupted(Exception):
    """The run was stopped; finished runs are kept."""


class Plan:
    """Runs of a full or a quick map.

    Attributes:
      quick: whether the map is scaled down.
      cells: cells to measure.
      splits: split seeds of each cell.
      methods: methods to measure; None for all methods of a cell.
      data_dir: folder of the data sets.
      groups: groups of all runs.
    """

    def __init__(self, quick: bool, data_dir: str | None = None):
        self.quick, self.data_dir = quick, data_dir
        self.cells: tuple[Cell, ...] = QUICK if quick else CELLS
        self.splits = QUICK_SPLITS if quick else SPLITS
        self.methods = QUICK_METHODS if quick else None
        self.groups = groups_of(self.cells, splits=self.splits, methods=self.methods, data_dir=data_dir)

    @property
    def command(self) -> str:
        """Command that runs the plan."""
        return f"jaxpfl winners run{' --quick' * self.quick}"

    def progress(self, folder: Path) -> tuple[int, int]:
        """Return the numbers of finished runs and of all runs."""
        planned = sum(len(group.runs) for group in self.groups)
        left = sum(len(group.runs) for group in missing(self.groups, Journal(folder).read()))
        return planned - left, planned

    def atlas(self, records: list[Record]) -> Atlas:
        """Return the map of the cells in which all contenders' runs are finished; a reference may be missing.

        Cells in which every contender failed are left out with a warning.
        """
        contending = [group for group in self.groups if not algorithms.get(group.method).pooled]
        left = {group.static[CELL] for group in missing(contending, records, failed=False)}
        data = Drawn()
        places: list[Place] = []
        for cell in self.cells:
            if cell.name in left:
                continue
            place = place_of(cell, records, self.splits, data, data_dir=self.data_dir, methods=self.methods)
            if place.contenders:
                places.append(place)
            else:
                why = ", ".join(f"{name}: {reason}" for name, reason in place.failed.items())
                warn(f"{cell.name} is left out of the map, because no method could be trained: {why}")
        return Atlas(self.quick, self.command, _minutes(records), _versions(), self.splits, tuple(places))


def check_folder(folder: Path, *, quick: bool) -> None:
    """Refuse a folder that contains anything other than this run.

    Raises:
      JaxpflError: if the folder contains another run, or other files.
    """
    path = folder / _STATE
    if path.exists():
        stored = files.read_json(path)
        if not isinstance(stored, dict) or stored.get("quick") != quick:
            raise JaxpflError(f"{folder} holds the {'full' if quick else 'quick'} map: choose another --output")
    elif folder.is_dir() and any(not one.name.startswith(".") for one in folder.iterdir()):
        raise JaxpflError(f"{folder} is not empty and holds no map of jaxpfl winners: choose another --output")


def run(plan: Plan, folder: Path, reporter: Reporter, stopped: Callable[[], bool]) -> Atlas:
    """Run what is missing, and write the map, its tables and its plots.

    Raises:
      Interrupted: if the run was stopped early; the map of the finished cells, if there are any, is written.
      JaxpflError: if data are missing, if the folder contains something else, or if no cell could be measured.
    """
    check_folder(folder, quick=plan.quick)
    check_data(plan.cells, plan.data_dir)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json(folder / _STATE, {"quick": plan.quick})
    records = measure(plan.groups, folder, reporter, stopped)
    found = plan.atlas(records)
    if found.places:
        write(found, folder)
    if stopped() and missing(plan.groups, records):
        raise Interrupted
    if not found.places:
        raise JaxpflError(f"no cell of the map could be measured: the journal in {folder} has the reasons")
    return found


def write(found: Atlas, folder: Path) -> None:
    """Write ``map.json``, ``tables.md`` and the plots of a map."""
    files.write_checksummed(folder / FILE, found.to_json())
    with files.whole(folder / "tables.md") as file:
        file.write(page.tables(found))
    plot.draw(found, folder)


def _minutes(records: list[Record]) -> float:
    """Return the elapsed minutes of all programs, including compilation."""
    seconds = (record.seconds + (record.metrics.get("compile_seconds") or 0.0) for record in records)
    return round(math.fsum(seconds) / 60, 1)


def _versions() -> Mapping[str, Any]:
    import jax

    names = ("jax", "jaxlib", "numpy")
    machine = {"python": platform.python_version(), "platform": jax.default_backend(), "devices": len(jax.devices())}
    return {"jaxpfl": __version__, **{name: metadata.version(name) for name in names}, **machine}
