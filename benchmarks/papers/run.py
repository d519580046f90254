"""Run of an experiment in its folder; finished cases are kept, and running it again continues."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from jaxpfl import __version__
from jaxpfl.runs.control import Reporter
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, warn

from . import estimate, plot, reaching, results, show, students, train
from .compare import Row
from .declared import Case, Estimation, Experiment, Reaching, Students, Training
from .results import Result
from .way import Way

_STATE = "experiment.json"
_MOST_SECONDS = 1e10
"""Bound for recorded seconds, three centuries; larger values must be wrong."""


def cases_of(experiment: Experiment, *, quick: bool) -> tuple[Case, ...]:
    """Return the cases to run."""
    chosen = experiment.quick_cases if quick and experiment.quick_cases else range(len(experiment.cases))
    return tuple(experiment.cases[place] for place in chosen)


def units(experiment: Experiment, *, quick: bool) -> int:
    """Return the number of runs and studies of an experiment, for the progress bar."""
    cases = cases_of(experiment, quick=quick)
    return sum(_units(case, quick=quick) for case in cases)


def _units(case: Case, *, quick: bool) -> int:
    if isinstance(case, Reaching):
        case = case.training
    if isinstance(case, Training):
        return train.runs_of(case, quick=quick)
    return students.units(case, quick=quick) if isinstance(case, Students) else 1


def _measured(case: Case, way: Way) -> list[Row]:
    if isinstance(case, Estimation):
        return estimate.measure(case, way)
    if isinstance(case, Training):
        return train.marked(train.measure(case, way), case, way)
    rows = reaching.measure(case, way) if isinstance(case, Reaching) else students.measure(case, way)
    return train.marked(rows, case.training, way)


def command(experiment: Experiment, *, quick: bool) -> str:
    """Return the command that runs an experiment."""
    return f"jaxpfl papers run {experiment.name}{' --quick' * quick}"


def run(experiment: Experiment, way: Way) -> Result:
    """Run what is missing of an experiment, and write its result.

    Args:
      experiment: declared experiment.
      way: common settings, whose ``folder`` is the experiment's own folder (see `results.place`).

    Returns:
      The result, which is also written to ``result.json``, ``table.md`` and, for a figure, ``figure.png``.

    Raises:
      Interrupted: if the run was stopped early.
      JaxpflError: if data are missing, if the folder belongs to another experiment, or if the tidy table would
        overwrite a file of something else.
    """
    results.check_tidy(way.folder.parent)
    before, began = _sessions_of(experiment, way), time.monotonic()
    made_by = list(before.versions)

    def spent() -> float:
        return before.seconds + time.monotonic() - began

    def measuring() -> None:
        if (now := versions()) not in made_by:
            made_by.append(now)
            _keep(experiment, way, _Sessions(spent(), made_by))

    rows: list[tuple[Case, list[Row]]] = []
    # Written first, so that a killed process leaves no runs in a folder without the experiment's name.
    _keep(experiment, way, before)
    way = replace(way, reporter=_Watching(way.reporter, measuring))
    try:
        for case in cases_of(experiment, quick=way.quick):
            rows.append((case, _measured(case, way)))
    finally:
        if any((way.folder / name).exists() for name in ("runs", results.RESULT)):
            _keep(experiment, way, _Sessions(spent(), made_by))
        else:
            (way.folder / _STATE).unlink(missing_ok=True)
    found = Result(
        experiment.name,
        experiment.paper,
        experiment.what,
        way.quick,
        command(experiment, quick=way.quick),
        round(spent() / 60, 2),
        _together(made_by or [versions()]),
        tuple(_noted(row, "" if way.quick else experiment.note) for _, own in rows for row in own),
    )
    files.write_checksummed(way.folder / results.RESULT, found.to_json())
    with files.whole(way.folder / "table.md") as file:
        file.write(show.markdown([found]))
    if experiment.figure is not None:
        plot.write_figure(way.folder / "figure.png", experiment, rows, quick=way.quick)
    _gather(way.folder.parent)
    return found


def _gather(folder: Path) -> None:
    """Write the tidy table of a folder; a damaged result of another table must not make a finished run fail."""
    found = results.of_folder(folder)
    for error in found.damaged.values():
        warn(f"left out of rows.json and rows.csv: {error}")
    results.write_tidy(folder, found.results)


def versions() -> dict[str, Any]:
    """Return the versions of the packages, and the machine."""
    import jax

    names = ("jax", "jaxlib", "numpy")
    machine = {"python": platform.python_version(), "platform": jax.default_backend(), "devices": len(jax.devices())}
    return {"jaxpfl": __version__, **{name: metadata.version(name) for name in names}, **machine}


def _together(made_by: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the versions of all sessions that measured something, with every distinct value."""

    def of(name: str) -> Any:
        found = list(dict.fromkeys(one[name] for one in made_by if name in one))
        return found[0] if len(found) == 1 else " and ".join(map(str, found))

    return {name: of(name) for name in dict.fromkeys(name for one in made_by for name in one)}


class _Watching(Reporter):
    """Reporter that calls a function before each measurement."""

    def __init__(self, reporter: Reporter, measuring: Callable[[], None]) -> None:
        self._reporter, self._measuring = reporter, measuring

    def start(self, name: str, runs: int, rounds: int, done: int = 0) -> None:
        self._measuring()
        self._reporter.start(name, runs, rounds, done)

    def progress(self, rounds: int, loss: float, score: float | None = None) -> None:
        self._reporter.progress(rounds, loss)

    def finish(self, runs: int) -> None:
        self._reporter.finish(runs)

    def say(self, text: str) -> None:
        self._reporter.say(text)


def _noted(row: Row, note: str) -> Row:
    said = "; ".join(text for text in (row.note, note) if text)
    return replace(row, note=said)


class _Sessions(NamedTuple):
    """Sessions of an experiment so far.

    Attributes:
      seconds: time spent in all sessions.
      versions: distinct versions of the sessions that measured something.
    """

    seconds: float = 0.0
    versions: Sequence[Mapping[str, Any]] = ()


def _sessions_of(experiment: Experiment, way: Way) -> _Sessions:
    """Read the earlier sessions of an experiment.

    Raises:
      JaxpflError: if the folder belongs to something else.
    """
    path = way.folder / _STATE
    if not path.exists():
        if way.folder.is_dir() and any(not one.name.startswith(".") for one in way.folder.iterdir()):
            raise JaxpflError(
                f"{way.folder} is not empty and holds no run of {experiment.name}: choose another --output"
            )
        return _Sessions()
    stored = files.read_json(path)
    if not isinstance(stored, dict) or (stored.get("name"), stored.get("quick")) != (experiment.name, way.quick):
        run = f"{'the quick' if way.quick else 'the full'} run of {json.dumps(experiment.name)}"
        raise JaxpflError(f"{path} does not belong to {run}: choose another --output")
    # Folders written before version 0.2 do not record the versions.
    seconds, made_by = stored.get("seconds"), stored.get("versions", [dict.fromkeys(versions(), "unknown")])
    return _Sessions(
        float(seconds) if isinstance(seconds, int | float) and 0 <= seconds <= _MOST_SECONDS else 0.0,
        [one for one in made_by if _is_flat(one)] if isinstance(made_by, list) else (),
    )


def _is_flat(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(one, str | int) for one in value.values())


def _keep(experiment: Experiment, way: Way, sessions: _Sessions) -> None:
    way.folder.mkdir(parents=True, exist_ok=True)
    files.write_json(way.folder / _STATE, {"name": experiment.name, "quick": way.quick, **sessions._asdict()})
