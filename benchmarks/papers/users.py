"""Runs for tables that need more than a sweep records, such as each user's accuracy; a file stores the values."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl import __version__
from jaxpfl.engine import RunState, Simulation
from jaxpfl.runs.checkpoint import Unfinished
from jaxpfl.runs.config import RunConfig, resolve, to_json
from jaxpfl.runs.setup import Experiment, data_checksum, prepare
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError

from .compare import spread
from .way import Interrupted, Way

_ROUNDS = 10  # seconds between two checks whether to stop
Reading = Callable[[Experiment, Simulation, RunState], dict[str, Any]]
"""Function that computes JSON values from the runs of S seeds."""


def kept(
    path: Path,
    config: RunConfig,
    method: str,
    way: Way,
    reading: Reading,
    stops: Sequence[int] = (),
) -> dict[str, Any]:
    """Compute values from a method's runs on all seeds of a config, or read them from the file of an earlier call.

    Runs that were stopped or killed continue from the state that was saved last.

    Args:
      path: path of the file.
      config: config of the runs.
      method: name of the method.
      way: common settings.
      reading: function called at the end of the runs.
      stops: rounds after which ``reading`` is called, in increasing order, ending with the last round; each value is
        then a list over the stops.

    Raises:
      Interrupted: if the runs were stopped early.
      JaxpflError: if data are missing or have changed, or if the file is damaged or has other settings.
    """
    asked = {"method": method, "config": to_json(replace(config, data_dir=None)), "stops": list(stops)}
    config = resolve(config)
    found = files.read_checksummed(path) if path.exists() else None
    if found is not None and any(found.get(name) != value for name, value in asked.items()):
        raise JaxpflError(f"{path} was written with different settings: choose another --output")
    experiment = prepare(config, (method,), given=way.data.split(config))
    data = data_checksum(experiment.federation)
    asked |= {"data": data}
    unfinished = Unfinished(path.with_suffix(".unfinished"), asked)
    if found is None:
        read, seconds = _read(experiment, method, way, reading, stops, unfinished)
        found = {name: [one[name] for one in read] for name in read[0]} if stops else dict(read[0])
        found |= asked | {"jaxpfl": __version__, "seconds": seconds}
        files.write_checksummed(path, found)
    if found["data"] != data:
        raise JaxpflError(f"the data set {config.data} differs from that of {path}: choose another --output")
    unfinished.remove()  # also deletes a state that remained because the process was killed after writing the file
    return found


def _read(
    experiment: Experiment, method: str, way: Way, reading: Reading, stops: Sequence[int], unfinished: Unfinished
) -> tuple[list[dict[str, Any]], float]:
    """Return the values at each stop (only the last round if there are no stops), and the seconds of all sessions."""
    config, began = experiment.config, time.monotonic()
    rounds = config.rounds or 1
    stops = stops or (rounds,)
    simulation = experiment.runs[method].simulation()
    first = simulation.init(range(config.seed, config.seed + (config.seeds or 1)))
    way.reporter.start(method, config.seeds or 1, rounds)
    state, done, before, read = unfinished.restore(simulation, first, stops)

    def save() -> None:
        unfinished.save(simulation, state, done, before + time.monotonic() - began, read)

    while done < stops[-1]:
        if way.stopped():
            if done:
                save()
            raise Interrupted
        if unfinished.due:
            save()
        length = min(stops[len(read)] - done, _ROUNDS)
        state, history = simulation.advance(state, length)
        done += length
        way.reporter.progress(done, float(np.mean(history["train_loss"][:, -1])))
        if done == stops[len(read)]:
            read.append(reading(experiment, simulation, state))
    return read, before + time.monotonic() - began


def accuracies(experiment: Experiment, simulation: Simulation, state: RunState) -> dict[str, Any]:
    """Return each user's test accuracy in each run, [S][m] (None if undefined), and the number of diverged users."""
    del experiment
    after = simulation.evaluate(state)["after"]
    accuracy = [[float(one) if np.isfinite(one) else None for one in run] for run in np.asarray(after["accuracy"])]
    return {"accuracy": accuracy, "diverged": diverged(simulation, state, after)}


def diverged(simulation: Simulation, state: RunState, after: Mapping[str, Any]) -> list[int]:
    """Return the number of clients per run, [S], that diverged or whose personalized model is not finite."""
    lost = (np.asarray(simulation.counts(state).diverged) > 0) | np.asarray(after["diverged"])
    return lost.sum(axis=1).tolist()


def over_users(accuracy: list[list[float | None]]) -> tuple[float | None, float | None]:
    """Return the mean and sample standard deviation over users of each user's mean over runs, in percent.

    Users without test examples are left out.

    Args:
      accuracy: accuracy of each run and user, as a fraction, [S][m].
    """
    users = [[run[user] for run in accuracy] for user in range(len(accuracy[0]))]
    scored = [[100 * value for value in one if value is not None] for one in users]
    return spread([sum(one) / len(one) for one in scored if one])
