"""Methods scored on their way, as on PFLlib's board: after the last round, in the best one, and at equal gradients.

The rates of such a case do not decay by the number of rounds, so that a shorter run is the beginning of a longer one:
a method that takes two gradients in a step is at the gradients of the others half way.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.engine import RunState, Simulation
from jaxpfl.engine.evaluate import mean_over_examples
from jaxpfl.runs.config import RunConfig, resolve
from jaxpfl.runs.setup import Experiment
from jaxpfl.runs.sweep.definition import rounds_of
from jaxpfl.support.errors import JaxpflError

from .compare import remark
from .users import diverged, kept
from .way import Way

LAST, BEST, EQUAL = "last round", "best round on test", "equal gradient steps"
PARTS = (LAST, BEST, EQUAL)
"""Endings of the settings of a method's three rows."""
HABIT = "the best round is chosen on test, for each run alone, as PFLlib and FedEM report: too good by that choice"


def stops_of(config: RunConfig, method: str, every: int) -> tuple[tuple[int, ...], int | str]:
    """Rounds after which a method is scored, and the one in which it has taken the gradients of one in each step, or
    the reason why there is none.
    """
    rounds = resolve(config).rounds
    assert rounds is not None
    try:
        equal = min(rounds_of(config, method, (method,)), rounds)
    except JaxpflError as error:
        equal = remark(error)
    at = {*range(every, rounds + 1, every), rounds} | ({equal} if isinstance(equal, int) else set())
    return tuple(sorted(at)), equal


def measured(
    path: Path, config: RunConfig, method: str, every: int, way: Way
) -> tuple[Mapping[str, list[float]], list[str]]:
    """Accuracies of a method's runs in percent, [S] by `PARTS`, and remarks on what failed.

    An accuracy is over all test examples, as on the board: clients' means weighted by their test examples.

    Raises:
      Interrupted: if it was stopped before its end.
      JaxpflError: for data that are missing or others than before, and a file that is damaged or of other settings.
    """
    stops, equal = stops_of(config, method, every)
    found = kept(path, config, method, way, _accuracy, stops)
    way.reporter.finish(resolve(config).seeds or 1)
    accuracy = 100 * np.array(found["accuracy"], float)  # [stops, S]; None becomes NaN
    values = {
        LAST: accuracy[-1].tolist(),
        BEST: _largest(accuracy),
        EQUAL: accuracy[stops.index(equal)].tolist() if isinstance(equal, int) else [],
    }
    lost = [f"{count} clients diverged" for count in found["diverged"][-1] if count]
    return values, lost if isinstance(equal, int) else [*lost, f"no round of equal gradients: {equal}"]


def _largest(accuracy: np.ndarray) -> list[float]:
    """Largest score of each run over the stops; NaN where every one is."""
    return np.where(np.isnan(accuracy).all(axis=0), np.nan, np.nanmax(np.nan_to_num(accuracy, nan=-1), axis=0)).tolist()


def _accuracy(experiment: Experiment, simulation: Simulation, state: RunState) -> dict[str, Any]:
    """Share of all test examples that their clients' models classify rightly, [S], and clients that diverged."""
    after = simulation.evaluate(state)["after"]
    shares = mean_over_examples(np.asarray(after["accuracy"]), np.asarray(experiment.federation.test.size))
    return {
        "accuracy": [float(one) if np.isfinite(one) else None for one in shares],
        "diverged": diverged(simulation, state, after),
    }
