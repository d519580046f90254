"""The map from the records of its runs: each method's rates, chosen by validation, and its scores with these rates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from jaxpfl.runs.config import resolve
from jaxpfl.runs.records import DONE, Record
from jaxpfl.runs.sweep.results import Tried, choose, setting_key

from .atlas import Place, Scores
from .cells import Cell, Contender, contenders
from .measure import CELL, Drawn, config_of, tries_of
from .skew import Measures, measures


def place_of(
    cell: Cell,
    records: Iterable[Record],
    splits: int,
    data: Drawn,
    *,
    data_dir: str | None = None,
    methods: Sequence[str] | None = None,
) -> Place:
    """Return a cell with the scores of its methods.

    Args:
      cell: declared cell.
      records: records of the whole map.
      splits: split seeds of the cell.
      data: cache of loaded data sets.
      data_dir: folder of the data sets.
      methods: names of the methods that were run; None for all methods of the cell.

    Raises:
      JaxpflError: if the cell's data are missing.
    """
    own = [record for record in records if record.settings.get(CELL) == cell.name]
    found, failed = {}, {}
    for contender in contenders(cell):
        if methods is not None and contender.method not in methods:
            continue
        runs = [one for one in own if one.method == contender.method]
        if contender.reference and not runs:
            continue
        scores = _scores(cell, contender, runs, splits)
        if isinstance(scores, str):
            failed[contender.method] = scores
        else:
            found[contender.method] = scores
    return Place(
        cell.name,
        cell.data,
        cell.model,
        cell.heterogeneity,
        cell.split["partition"],
        cell.cohort / cell.clients,
        cell.steps,
        cell.epsilon,
        cell.varies,
        _measures(cell, data, data_dir),
        found,
        failed,
    )


def _scores(cell: Cell, contender: Contender, records: Sequence[Record], splits: int) -> Scores | str:
    """Return the scores of a method, or the reason why there are none."""
    tries = tries_of(cell, contender)
    by_run = {(setting_key(_own(record)), record.seed): record for record in records}
    tried = []
    for settings in tries:
        runs = [by_run.get((setting_key(settings), seed)) for seed in range(splits)]
        scores = np.array([_number(run, "validation_accuracy") for run in runs])
        against = next((run.status for run in runs if run is not None and run.status != DONE), "")
        tried.append(Tried(settings, scores, against or ("" if np.isfinite(scores).all() else "not all splits ran")))
    choice = choose(tried, larger=True)
    if choice.settings is None:
        return choice.reason
    runs = [by_run[setting_key(choice.settings), seed] for seed in range(splits)]
    validation, test = (
        tuple(round(_number(run, name), 6) for run in runs) for name in ("validation_accuracy", "personalized_accuracy")
    )
    settings = config_of(cell, contender, 0).set
    return Scores(choice.settings, settings, len(tries), runs[0].rounds, validation, test, contender.reference)


def _own(record: Record) -> dict[str, bool | int | float | str]:
    """Return a run's settings, except the settings that identify its cell and split."""
    return {name: value for name, value in record.settings.items() if name not in (CELL, "split_seed")}


def _number(run: Record | None, name: str) -> float:
    value = None if run is None else run.metrics.get(name)
    return math.nan if value is None else float(value)


def _measures(cell: Cell, data: Drawn, data_dir: str | None) -> Measures:
    """Return the measures of a cell's first split."""
    source, federation = data.split(resolve(config_of(cell, contenders(cell)[0], 0, data_dir)))
    return measures(federation, source.num_classes)
