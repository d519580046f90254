"""Lambda and T that PersFL's users choose, read from the personalized models because sweeps do not record them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpfl.engine import RunState, Simulation
from jaxpfl.runs.config import resolve
from jaxpfl.runs.records import Value
from jaxpfl.runs.setup import Experiment
from jaxpfl.runs.sweep.grid import apply_settings

from .compare import Row, remark, row, spread
from .declared import Students, slug
from .train import Unchosen, chosen, config_of, notes_of, runs_of
from .users import kept
from .way import Way

LABELS = {"T": "temperature", "lambda": "imitation"}
"""Label of a row -> field of a student."""


def measure(case: Students, way: Way) -> list[Row]:
    """Run PersFL unless it has been run, and return the mean choices with standard deviations over users.

    Raises:
      Interrupted: if the run was stopped early.
      JaxpflError: if data are missing.
    """
    training = case.training
    (contender,) = training.contenders
    config = config_of(training, contender, quick=way.quick, data_dir=way.data_dir)
    values: dict[str, list[float]] = {label: [] for label in LABELS}
    settings: Mapping[str, Value] = {}
    try:
        settings = chosen(training, contender, config, way)
        found = kept(
            way.folder / "runs" / f"{slug(case.setting)}.json",
            apply_settings(config, settings),
            contender.method,
            way,
            _choices,
        )
        values, lost = found["users"], [f"{count} clients diverged" for count in found["diverged"] if count]
    except Unchosen as error:
        lost = [remark(error)]
    way.reporter.finish(1)
    notes = notes_of(settings, training, contender, quick=way.quick, failures=lost)
    return [
        row(label, case.setting, *spread(own), case.printed[label], notes, comparable=not way.quick)
        for label, own in values.items()
    ]


def _choices(experiment: Experiment, simulation: Simulation, state: RunState) -> dict[str, Any]:
    """Return each user's choices, as means over seeds, by label."""
    del experiment
    students = simulation.personal_models(state)
    users = {label: np.asarray(getattr(students, name)).mean(axis=0).tolist() for label, name in LABELS.items()}
    diverged = np.asarray(simulation.counts(state).diverged) > 0
    return {"users": users, "diverged": diverged.sum(axis=1).tolist()}


def units(case: Students, *, quick: bool) -> int:
    """Return the number of runs of a case, including the search."""
    (contender,) = case.training.contenders
    seeds = resolve(config_of(case.training, contender, quick=quick)).seeds or 1
    return runs_of(case.training, quick=quick) - seeds + 1
