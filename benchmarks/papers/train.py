"""Trained rows: each searches its learning rates on validation examples, and then runs on the table's seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxpfl.runs.config import RunConfig, from_mapping, resolve
from jaxpfl.runs.records import DIVERGED, DONE, Record, Value
from jaxpfl.runs.sweep.definition import FILE, Definition, Search, define
from jaxpfl.runs.sweep.grid import Axis, Grid, apply_settings
from jaxpfl.runs.sweep.plan import runs_of as runs_of_sweep
from jaxpfl.runs.sweep.results import select
from jaxpfl.runs.sweep.runner import run_missing
from jaxpfl.runs.sweep.sweep import Sweep
from jaxpfl.support.errors import JaxpflError

from . import board, whole
from .compare import Row, remark, row, spread
from .declared import UNPRINTED, Contender, Training, slug
from .users import accuracies, kept, over_users
from .way import Interrupted, Way

SEARCH_SEED = 1000
"""Seed of the searches; no final run uses it."""
_QUICK: Mapping[str, Any] = {
    "data": "digits",
    "clients": 6,
    "classes_per_client": 3,
    "model": "mlp:16",
    "rounds": 4,
    "local_steps": 4,
    "batch_size": 10,
    "seeds": 1,
}
QUICK_NOTE = (
    "scaled-down quick run (6 clients of the embedded digits, 4 rounds, one seed): not comparable with the paper"
)
USERS = "± is over users, as in the paper: the standard deviation of each user's mean over runs"
_KEPT = ("privacy", "participation", "validation_share", "local_epochs", "server_optimizer")


class Unchosen(JaxpflError):
    """No setting of a search can be chosen, for example because all runs diverged; the row then has only a note."""


def config_of(case: Training, contender: Contender, *, quick: bool = False, data_dir: str | None = None) -> RunConfig:
    """Return the config of one row.

    Raises:
      JaxpflError: if no run can have the declared settings.
    """
    values: dict[str, Any] = dict(case.config)
    if quick:
        everyone = values.get("cohort") == values.get("clients")
        values = {name: values[name] for name in _KEPT if name in values}
        values |= {**_QUICK, "cohort": 6 if everyone else 3}
    elif contender.rounds is not None:
        values["rounds"] = contender.rounds
    values["set"] = [f"{contender.method}.{entry}" for entry in contender.set]
    return replace(from_mapping(values, f"the declaration of {case.setting}"), data_dir=data_dir)


def axes_of(case: Training, contender: Contender) -> Mapping[str, tuple[Value, ...]]:
    """Return the axes of a row's search, with their values."""
    return case.search if contender.search is None else contender.search


def search_of(case: Training, contender: Contender, config: RunConfig) -> Definition | None:
    """Return the search of a row, with one seed and a third of the rounds; None if nothing is searched."""
    axes = axes_of(case, contender)
    if not axes:
        return None
    rounds = resolve(config).rounds
    assert rounds is not None
    config = replace(config, rounds=max(1, round(rounds / 3)), seed=SEARCH_SEED, seeds=1)
    return define([contender.method], config, Grid(tuple(Axis(name, own) for name, own in axes.items())))


def final_of(contender: Contender, config: RunConfig, chosen: Mapping[str, Value]) -> Definition:
    """Return the runs of a row on all seeds, with the settings that the search chose."""
    grid = Grid(tuple(Axis(name, (value,)) for name, value in chosen.items()))
    return define([contender.method], config, grid, Search(select="none"))


def measure(case: Training, way: Way) -> list[Row]:
    """Run what is missing of a case, and return its rows.

    Raises:
      Interrupted: if the run was stopped early.
      JaxpflError: if data are missing.
    """
    return [row for contender in case.rows(quick=way.quick) for row in _measured(case, contender, way)]


def chosen(case: Training, contender: Contender, config: RunConfig, way: Way) -> Mapping[str, Value]:
    """Return the settings that a row's search chooses; empty in a quick run, or if nothing is searched.

    Raises:
      Interrupted: if the run was stopped early.
      Unchosen: if no setting can be chosen.
    """
    search = None if way.quick else search_of(case, contender, config)
    if search is None:
        return {}
    records = _run(folder_of(case, contender, way) / "search", search, way)
    choice = select(records, search.searched)[contender.method]
    if choice.settings is None:
        raise Unchosen(f"no setting can be chosen: {choice.reason}")
    return choice.settings


def folder_of(case: Training, contender: Contender, way: Way) -> Path:
    """Return the folder of a row's sweeps."""
    return way.folder / "runs" / slug(f"{case.setting} {contender.label}")


def choice_notes(settings: Mapping[str, Value]) -> list[str]:
    """Return notes on the chosen settings."""
    return [f"{name} {value:g} chosen on validation" for name, value in settings.items() if isinstance(value, float)]


def notes_of(
    settings: Mapping[str, Value],
    case: Training,
    contender: Contender,
    *,
    quick: bool,
    failures: Iterable[str] = (),
) -> list[str]:
    """Return the notes on a row: chosen settings, failures, and, for a full run, the declared notes."""
    meaning = USERS if case.spread == "clients" else ""
    if quick:
        return [QUICK_NOTE, *failures, meaning]  # `row` leaves out repeated notes
    return [*choice_notes(settings), *failures, contender.note, case.note, meaning]


def _measured(case: Training, contender: Contender, way: Way) -> list[Row]:
    config = config_of(case, contender, quick=way.quick, data_dir=way.data_dir)
    try:
        settings = chosen(case, contender, config, way)
    except Unchosen as error:
        parts = [case.setting] if case.every is None else [f"{case.setting}, {part}" for part in board.PARTS]
        return [row(contender.label, part, None, None, contender.printed, [remark(error)]) for part in parts]
    if case.every is not None:
        return _on_the_way(case, contender, config, settings, way)
    final = _over_users if case.spread == "clients" else _over_runs
    (ours, std), failures = final(folder_of(case, contender, way), contender, config, settings, way)
    notes = notes_of(settings, case, contender, quick=way.quick, failures=failures)
    return [row(contender.label, case.setting, ours, std, contender.printed, notes, comparable=not way.quick)]


def _on_the_way(
    case: Training, contender: Contender, config: RunConfig, settings: Mapping[str, Value], way: Way
) -> list[Row]:
    """Return the three rows of a contender that is scored during training."""
    config = apply_settings(config, settings)
    path = folder_of(case, contender, way) / "curve.json"
    values, failures = board.measured(path, config, contender.method, 1 if way.quick else case.every or 1, way)
    notes = notes_of(settings, case, contender, quick=way.quick, failures=failures)
    return [
        row(
            contender.label,
            f"{case.setting}, {part}",
            *spread(own),
            contender.printed if part == board.BEST else UNPRINTED,
            [*notes, *([board.HABIT] if part == board.BEST else [])],
            comparable=not way.quick,
        )
        for part, own in values.items()
    ]


_Final = tuple[tuple[float | None, float | None], list[str]]
"""Mean and standard deviation of a row in percent, and notes on failures."""


def _over_runs(
    folder: Path, contender: Contender, config: RunConfig, settings: Mapping[str, Value], way: Way
) -> _Final:
    records = _run(folder / "final", final_of(contender, config, settings), way)
    failures = [remark(f"{one.status}: {one.reason}") for one in records if one.status != DONE]
    return spread(_values(records, contender.score)), failures


def _over_users(
    folder: Path, contender: Contender, config: RunConfig, settings: Mapping[str, Value], way: Way
) -> _Final:
    config = apply_settings(config, settings)
    found = kept(folder / "users.json", config, contender.method, way, accuracies)
    way.reporter.finish(resolve(config).seeds or 1)
    accuracy = found["accuracy"]
    failures = [f"{DIVERGED}: {count} of {len(accuracy[0])} clients diverged" for count in found["diverged"] if count]
    return over_users(accuracy), failures


def _values(records: list[Record], name: str) -> list[float]:
    """Return a metric of each run in percent; empty if a run lacks it."""
    found = [record.metrics.get(name) for record in records]
    return [100 * value for value in found if value is not None] if None not in found else []


def _run(folder: Path, definition: Definition, way: Way) -> list[Record]:
    """Run what is missing of a sweep, and repeat failed runs once.

    Raises:
      Interrupted: if the run was stopped early.
    """
    sweep = Sweep.open(folder, definition, resume=(folder / FILE).exists(), data=way.data)
    journal = sweep.journal
    way.reporter.finish(len(journal.read()))
    run_missing(sweep, way.reporter, stopped=way.stopped)
    records = sweep.grid_order(journal.read())
    if sweep.missing(records):
        raise Interrupted
    wanted = {run.id for run in runs_of_sweep(definition)}
    return [record for record in records if record.id in wanted]


def marked(rows: Iterable[Row], case: Training, way: Way) -> list[Row]:
    """Return the rows of a case with the notes on its data, as in `whole.marked`."""
    if way.quick:
        return list(rows)
    config = resolve(config_of(case, case.contenders[0], data_dir=way.data_dir))
    source = way.data.source(config)
    size = len(source.y_train) + (0 if source.y_test is None else len(source.y_test))
    return whole.marked(rows, whole.part(config.data, size), whole.ALTERED.get(way.data.checksum(config), ""))


def runs_of(case: Training, *, quick: bool) -> int:
    """Return the number of runs of a case, including the searches."""
    count = 0
    for contender in case.rows(quick=quick):
        config = config_of(case, contender, quick=quick)
        search = None if quick else search_of(case, contender, config)
        count += resolve(config).seeds or 1
        if search is not None:
            count += len(search.grid.points())
    return count
