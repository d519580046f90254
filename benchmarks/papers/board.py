"""Methods that are scored during training as on PFLlib's board: last round, best round, and equal numbers of gradients.

Learning rates do not depend on the total number of rounds, so a shorter run is the beginning of a longer run. For
example, a method with two gradients per step has computed as many gradients as the others halfway through its run.
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
"""Suffixes of the settings of a method's three rows."""
HABIT = (
    "the best round of each run is chosen by its test score, as in PFLlib and FedEM, so this value is too optimistic"
)


def stops_of(config: RunConfig, method: str, every: int) -> tuple[tuple[int, ...], int | str]:
    """Return the rounds after which a method is scored, and the round at equal gradients.

    At that round, the method has computed as many gradients as a method with one gradient per step computes in the
    whole run. If there is no such round, the reason is returned instead.
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
    """Return accuracies of a method's runs in percent, [S] for each part in `PARTS`, and notes on failures.

    As on the board, an accuracy is over all test examples: the mean over clients, weighted by their test examples.

    Raises:
      Interrupted: if the measurement was stopped early.
      JaxpflError: if data are missing or have changed, or if the file is damaged or has other settings.
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
    """Return the largest score of each run over the stops; NaN if all its scores are NaN."""
    return np.where(np.isnan(accuracy).all(axis=0), np.nan, np.nanmax(np.nan_to_num(accuracy, nan=-1), axis=0)).tolist()


def _accuracy(experiment: Experiment, simulation: Simulation, state: RunState) -> dict[str, Any]:
    """Return the fraction of all test examples classified correctly, [S], and the number of diverged clients."""
    after = simulation.evaluate(state)["after"]
    shares = mean_over_examples(np.asarray(after["accuracy"]), np.asarray(experiment.federation.test.size))
    return {
        "accuracy": [float(one) if np.isfinite(one) else None for one in shares],
        "diverged": diverged(simulation, state, after),
    }
