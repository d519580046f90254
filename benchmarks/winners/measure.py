"""Runs of the map: each method on each split of a cell, its tries as rows of one program; what is done is kept."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from jaxpfl import data
from jaxpfl.core.settings import part_of
from jaxpfl.core.types import Federation
from jaxpfl.data import Split
from jaxpfl.data.sources.base import pooled
from jaxpfl.runs.config import RunConfig, from_mapping
from jaxpfl.runs.control import Reporter
from jaxpfl.runs.records import FAILED, Journal, Record, Value
from jaxpfl.runs.sweep.definition import rounds_of
from jaxpfl.runs.sweep.execute import Data, Last, run_group
from jaxpfl.runs.sweep.plan import Group, Run
from jaxpfl.support.errors import JaxpflError, JaxpflWarning

from .cells import FINE_TUNING, LOCAL_STEPS, SPLITS, TEST, Cell, Contender, contenders

CELL = "cell"
"""Setting of a record that names its cell."""


class Drawn(Data):
    """Data of the last group; of a set with a test set of its own, as many examples as the cell asks for are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: Last[tuple[data.Source, Federation]] = Last()

    def split(self, config: RunConfig) -> tuple[data.Source, Federation]:
        """The data set of a resolved config and its split.

        Raises:
          JaxpflError: for missing data.
        """
        if not config.pool_test:
            return super().split(config)
        split = part_of(Split, config)
        return self._drawn.get((config.data, split), lambda: self._draw(config, split))

    def _draw(self, config: RunConfig, split: Split) -> tuple[data.Source, Federation]:
        source = pooled(self.source(config))
        each = round(TEST / split.test_share)
        rng = np.random.default_rng([split.split_seed, each])
        chosen = rng.choice(len(source.y_train), each * (config.clients or 0), replace=False)
        source = source._replace(x_train=source.x_train[chosen], y_train=source.y_train[chosen])
        return source, data.federate(source, **vars(dataclasses.replace(split, pool_test=False)))


def groups_of(
    cells: Sequence[Cell],
    *,
    splits: int = SPLITS,
    methods: Sequence[str] | None = None,
    data_dir: str | None = None,
) -> list[Group]:
    """All runs of the map: a group is a method on one split of a cell, its runs the settings that it tries.

    Args:
      cells: as declared.
      splits: split seeds of each.
      methods: names of those that are run; None for all of a cell.
      data_dir: folder of the data sets.
    """
    return [
        _group(cell, contender, seed, data_dir)
        for cell in cells
        for seed in range(splits)
        for contender in contenders(cell)
        if methods is None or contender.method in methods
    ]


def missing(groups: Iterable[Group], records: Iterable[Record], *, failed: bool = True) -> list[Group]:
    """The groups with the runs that are left.

    Args:
      groups: of all runs.
      records: of those that were run.
      failed: whether runs that failed are left.
    """
    done = {record.id for record in records if not failed or record.status != FAILED}
    left = [group.only(run for run in group.runs if run.id not in done) for group in groups]
    return [group for group in left if group.runs]


def measure(groups: Sequence[Group], folder: Path, reporter: Reporter, stopped: Callable[[], bool]) -> list[Record]:
    """Run what is missing, and return the records of these groups.

    Args:
      groups: as `groups_of`.
      folder: whose journal keeps what is done.
      reporter: receives the progress.
      stopped: true once no more is to be done.
    """
    journal, loaded = Journal(folder), Drawn()
    with warnings.catch_warnings():
        # Cells of ten examples take all of them for a batch, as is declared.
        warnings.filterwarnings("ignore", "batch size", JaxpflWarning)
        for group in missing(groups, journal.read()):
            if stopped():
                break
            run_group(group, loaded, journal.append, reporter, stopped=stopped)
    wanted = {run.id for group in groups for run in group.runs}
    return [record for record in journal.read() if record.id in wanted]


def check_data(cells: Iterable[Cell], data_dir: str | None) -> None:
    """Refuse cells whose data are missing, before any is run.

    Raises:
      JaxpflError: naming what is missing, and its place.
    """
    known = {entry.name: entry for entry in data.available(data_dir)}
    for name in dict.fromkeys(cell.data for cell in cells):
        if not known[name].present:
            raise JaxpflError(known[name].note)


def config_of(cell: Cell, contender: Contender, split_seed: int, data_dir: str | None = None) -> RunConfig:
    """The run of a method on one split, its rounds those of the cell's gradient steps."""
    share = cell.cohort / cell.clients
    steps, settings = cell.steps, contender.set
    if contender.method == "fedavg-ft":
        tuned = round(FINE_TUNING * steps)
        steps, settings = steps - tuned, (*settings, f"fedavg-ft.fine_tune_steps={tuned}")
    rounds = max(1, round(steps / (LOCAL_STEPS * share)))
    private = cell.epsilon is not None and contender.private is not None
    values = cell.config(split_seed, rounds) | {"set": list(settings)}
    if not private:
        values.pop("privacy", None)
    config = dataclasses.replace(from_mapping(values, f"the cell {cell.name}"), data_dir=data_dir)
    rounds = rounds_of(config, contender.method, (contender.method,), share)
    return dataclasses.replace(config, rounds=rounds)


def tries_of(cell: Cell, contender: Contender) -> list[dict[str, Value]]:
    """The settings that a method tries in a cell."""
    private = cell.epsilon is not None and contender.private is not None
    axes = contender.private if private and contender.private is not None else contender.tries
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _group(cell: Cell, contender: Contender, split_seed: int, data_dir: str | None) -> Group:
    static: dict[str, Value] = {CELL: cell.name, "split_seed": split_seed}
    runs = tuple(Run(contender.method, static | own, split_seed) for own in tries_of(cell, contender))
    name = f"{cell.name} {contender.method} {split_seed}"
    config = config_of(cell, contender, split_seed, data_dir)
    return Group(name, contender.method, config, static, (contender.method,), runs)
