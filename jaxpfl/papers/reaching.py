"""Rounds until a method comes near its best, and what a client has uploaded by then."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from jaxpfl.engine import RunState, Simulation
from jaxpfl.experiment.config import RunConfig, resolve
from jaxpfl.experiment.setup import Experiment
from jaxpfl.papers.compare import Row, row, spread
from jaxpfl.papers.declared import UNPRINTED, Reaching
from jaxpfl.papers.train import chosen, config_of, folder_of, notes_of
from jaxpfl.papers.users import kept
from jaxpfl.papers.way import Way
from jaxpfl.sweep.axes import applied

ROUNDS, UPLOADED = "rounds", "MB uploaded by a client"
PARTS = (ROUNDS, UPLOADED)
"""Endings of the settings of a method's two rows."""
WITHIN = 1.0
"""Points of accuracy below a run's best that it is to reach."""


def stops_of(case: Reaching, config: RunConfig, *, quick: bool) -> tuple[int, ...]:
    """Rounds after which a method is scored: as many as the case asks for, evenly spread, each in a quick run."""
    rounds = resolve(config).rounds
    assert rounds is not None
    every = 1 if quick else -(-rounds // case.stops)
    return tuple(sorted({*range(every, rounds + 1, every), rounds}))


def reached(accuracy: np.ndarray, within: float = WITHIN) -> np.ndarray:
    """Place of a run's first score that is no further than ``within`` below its best, [S]; the number of stops if none
    is finite.

    Args:
      accuracy: in percent, [stops, S].

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
      Interrupted: if it was stopped before its end.
      JaxpflError: for data that are missing, and a search without a result.
    """
    training, rows = case.training, []
    for contender in training.rows(quick=way.quick):
        config = config_of(training, contender, quick=way.quick, data_dir=way.data_dir)
        settings = chosen(training, contender, config, way)
        stops = stops_of(case, config, quick=way.quick)
        path = folder_of(training, contender, way) / "reaching.json"
        given = path, applied(config, settings), contender.method, way, _scores
        found = kept(*given, "accuracy", "uploaded", stops=stops)
        way.reporter.finish(resolve(config).seeds or 1)
        accuracy = 100 * np.array(found["accuracy"], float)  # [stops, S]; None becomes NaN
        at = reached(accuracy)
        lost = [f"{count} runs without a finite score" for count in [int((at == len(stops)).sum())] if count]
        values = {
            ROUNDS: [float(stops[place]) for place in at if not lost],
            UPLOADED: [found["uploaded"][place][run] / 1e6 for run, place in enumerate(at) if not lost],
        }
        notes = notes_of(settings, training, contender, quick=way.quick, failures=lost)
        rows += [
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
    return rows


def _scores(experiment: Experiment, simulation: Simulation, state: RunState) -> dict[str, Any]:
    """Mean validation accuracy over clients, and the mean number of bytes that one has uploaded so far: [S] each."""
    del experiment
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a run without a finite score
        means = np.nanmean(simulation.evaluate(state, "validation")["after"]["accuracy"], axis=1)
    uploads = np.asarray(simulation.counts(state).uploads).mean(axis=1)
    return {
        "accuracy": [float(one) if np.isfinite(one) else None for one in means],
        "uploaded": (simulation.bytes_per_client()[0] * uploads).tolist(),
    }
