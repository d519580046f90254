"""Runs of the map: each method's tries on one split of a cell are rows of one program; finished runs are kept."""

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
"""Name of the setting that identifies a record's cell."""


class Drawn(Data):
    """Cache of the last group's data, with the cell's number of examples, drawn if there is an official test set."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: Last[tuple[data.Source, Federation]] = Last()

    def split(self, config: RunConfig) -> tuple[data.Source, Federation]:
        """Return the data set of a resolved config, and its split among clients.

        Raises:
          JaxpflError: if data are missing.
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
    """Return all runs of the map: a group is a method on one split of a cell, with a run per setting.

    Args:
      cells: declared cells.
      splits: split seeds of each cell.
      methods: names of the methods to run; None for all methods of a cell.
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
    """Return the groups with only their missing runs.

    Args:
      groups: groups of all runs.
      records: records of finished runs.
      failed: whether failed runs count as missing.
    """
    done = {record.id for record in records if not failed or record.status != FAILED}
    left = [group.only(run for run in group.runs if run.id not in done) for group in groups]
    return [group for group in left if group.runs]


def measure(groups: Sequence[Group], folder: Path, reporter: Reporter, stopped: Callable[[], bool]) -> list[Record]:
    """Run what is missing, and return the records of these groups.

    Args:
      groups: groups as `groups_of` returns them.
      folder: folder with the journal of finished runs.
      reporter: object whose methods are called with the progress.
      stopped: function that returns True once the measurement should stop.
    """
    journal, loaded = Journal(folder), Drawn()
    with warnings.catch_warnings():
        # In cells with ten examples, a batch is all of a client's data, as declared, so the warning is suppressed.
        warnings.filterwarnings("ignore", "batch size", JaxpflWarning)
        for group in missing(groups, journal.read()):
            if stopped():
                break
            run_group(group, loaded, journal.append, reporter, stopped=stopped)
    wanted = {run.id for group in groups for run in group.runs}
    return [record for record in journal.read() if record.id in wanted]


def check_data(cells: Iterable[Cell], data_dir: str | None) -> None:
    """Refuse cells whose data are missing, before anything is run.

    Raises:
      JaxpflError: if data are missing; the message says what is missing, and where to put it.
    """
    known = {entry.name: entry for entry in data.available(data_dir)}
    for name in dict.fromkeys(cell.data for cell in cells):
        if not known[name].present:
            raise JaxpflError(known[name].note)


def config_of(cell: Cell, contender: Contender, split_seed: int, data_dir: str | None = None) -> RunConfig:
    """Return the config of a method on one split; its rounds follow from the cell's gradient steps."""
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
    """Return the settings that a method tries in a cell."""
    private = cell.epsilon is not None and contender.private is not None
    axes = contender.private if private and contender.private is not None else contender.tries
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _group(cell: Cell, contender: Contender, split_seed: int, data_dir: str | None) -> Group:
    static: dict[str, Value] = {CELL: cell.name, "split_seed": split_seed}
    runs = tuple(Run(contender.method, static | own, split_seed) for own in tries_of(cell, contender))
    name = f"{cell.name} {contender.method} {split_seed}"
    config = config_of(cell, contender, split_seed, data_dir)
    return Group(name, contender.method, config, static, (contender.method,), runs)
