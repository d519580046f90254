"""Number of rounds until a method comes close to its best score, and a client's uploaded bytes until then."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpfl.engine import RunState, Simulation
from jaxpfl.runs.config import RunConfig, resolve
from jaxpfl.runs.records import Value
from jaxpfl.runs.setup import Experiment
from jaxpfl.runs.sweep.grid import apply_settings

from .compare import Row, remark, row, spread
from .declared import UNPRINTED, Contender, Reaching
from .train import Unchosen, chosen, config_of, folder_of, notes_of
from .users import diverged, kept
from .way import Way

ROUNDS, UPLOADED = "rounds", "MB uploaded by a client"
PARTS = (ROUNDS, UPLOADED)
"""Suffixes of the settings of a method's two rows."""
WITHIN = 1.0
"""Distance in percentage points below a run's best accuracy that counts as close."""


def stops_of(case: Reaching, config: RunConfig, *, quick: bool) -> tuple[int, ...]:
    """Return the evenly spaced rounds after which a method is scored; in a quick run, every round."""
    rounds = resolve(config).rounds
    assert rounds is not None
    every = 1 if quick else -(-rounds // case.stops)
    return tuple(sorted({*range(every, rounds + 1, every), rounds}))


def reached(accuracy: np.ndarray, within: float = WITHIN) -> np.ndarray:
    """Return the index of each run's first score that is at most ``within`` below its best score, [S].

    The index is the number of stops if no score is finite.

    Args:
      accuracy: accuracies in percent, [stops, S].
      within: largest difference from the best score, in percentage points.

    Examples:
      >>> reached(np.array([[90.0], [97.0], [98.0], [97.5], [98.5]]))
      array([2])
    """
    finite = np.where(np.isnan(accuracy), -np.inf, accuracy)
    near = np.isfinite(finite) & (finite >= finite.max(axis=0) - within)
    return np.argmax(np.vstack([near, np.ones_like(near[:1])]), axis=0)


def measure(case: Reaching, way: Way) -> list[Row]:
    """Run what is missing of a case, and return two rows for each method: rounds, and megabytes (1e6 bytes).

    Raises:
      Interrupted: if the run was stopped early.
      JaxpflError: if data are missing.
    """
    return [row for contender in case.training.rows(quick=way.quick) for row in _measured(case, contender, way)]


def _measured(case: Reaching, contender: Contender, way: Way) -> list[Row]:
    training = case.training
    config = config_of(training, contender, quick=way.quick, data_dir=way.data_dir)
    settings: Mapping[str, Value] = {}
    values: dict[str, list[float]] = {ROUNDS: [], UPLOADED: []}
    try:
        settings = chosen(training, contender, config, way)
        values, lost = _read(case, contender, apply_settings(config, settings), way)
    except Unchosen as error:
        lost = [remark(error)]
    notes = notes_of(settings, training, contender, quick=way.quick, failures=lost)
    return [
        row(
            contender.label,
            f"{training.setting}, {part}",
            *spread(own),
            contender.printed if part == ROUNDS else UNPRINTED,
            notes,
            comparable=not way.quick,
        )
        for part, own in values.items()
    ]


def _read(
    case: Reaching, contender: Contender, config: RunConfig, way: Way
) -> tuple[dict[str, list[float]], list[str]]:
    """Return the values of each run for each part in `PARTS`, and notes on failures.

    There are no values for runs in which a client diverged, or that have no score.
    """
    stops = stops_of(case, config, quick=way.quick)
    path = folder_of(case.training, contender, way) / "reaching.json"
    found = kept(path, config, contender.method, way, _scores, stops)
    way.reporter.finish(resolve(config).seeds or 1)
    at = reached(100 * np.array(found["accuracy"], float))  # None becomes NaN
    never = int((at == len(stops)).sum())
    lost = [f"no value: {count} clients diverged" for count in found["diverged"][-1] if count]
    lost += [f"no value: {never} of {len(at)} runs have no score"] * (never > 0)
    if lost:  # a diverged client's model no longer changes, so its first score would be its best
        return {ROUNDS: [], UPLOADED: []}, lost
    uploaded = [found["uploaded"][place][run] / 1e6 for run, place in enumerate(at)]
    return {ROUNDS: [float(stops[place]) for place in at], UPLOADED: uploaded}, []


def _scores(experiment: Experiment, simulation: Simulation, state: RunState) -> dict[str, Any]:
    """Return mean validation accuracies, mean uploaded bytes per client, and numbers of diverged clients, [S] each.

    An accuracy is None if some client's model is not finite. The bytes are counted from the beginning.
    """
    del experiment
    after = simulation.evaluate(state, "validation")["after"]
    broken = np.asarray(after["diverged"]).any(axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # for a run without a score
        means = np.where(broken, np.nan, np.nanmean(after["accuracy"], axis=1))
    uploads = np.asarray(simulation.counts(state).uploads).mean(axis=1)
    return {
        "accuracy": [float(one) if np.isfinite(one) else None for one in means],
        "uploaded": (simulation.bytes_per_client()[0] * uploads).tolist(),
        "diverged": diverged(simulation, state, after),
    }
