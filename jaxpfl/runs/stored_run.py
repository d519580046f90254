"""Reconstruction of a stored run: its experiment, and the last state of each method."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxpfl import algorithms
from jaxpfl.algorithms import METHODS
from jaxpfl.engine import RunState, Simulation
from jaxpfl.engine.model_files import one_method
from jaxpfl.runs import results, run_folder
from jaxpfl.runs.checkpoint import Checkpoints
from jaxpfl.runs.config import ConfigFile, DataConfig, RunConfig, fill_defaults, from_mapping, resolve, to_json
from jaxpfl.runs.run_folder import CODE, FEDERATION, GRAPH
from jaxpfl.runs.setup import Experiment, has_checksum, prepare, require
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, JaxpflWarning, warn

_OF_CLIENTS = [one.name for one in dataclasses.fields(DataConfig) if one.name not in ("data_dir", "task")]
"""Settings that determine the clients. The task is not among them, because by default it follows from the labels."""


class StoredRun(NamedTuple):
    """A run folder, as described by its ``config.json``.

    Attributes:
      folder: path of the run folder.
      record: content of ``config.json``.
      config: resolved config in ``record``.
      methods: names of the run's methods, finished or not.
    """

    folder: Path
    record: dict[str, Any]
    config: RunConfig
    methods: list[str]

    @property
    def seeds(self) -> range:
        """Seeds of the run."""
        return range(self.config.seed, self.config.seed + require(self.config.seeds))

    def finished(self, method: str | None) -> str:
        """Return the name of a finished method; if ``method`` is None, the run's only method.

        Raises:
          JaxpflError: if the method is unknown or unfinished, or if ``method`` is None and the run has several methods.
        """
        name = one_method(method, self.methods, str(self.folder))
        done = results.finished(self.folder, name)
        if done is None or done["rounds"] != self.config.rounds:
            raise JaxpflError(f"{name} of {self.folder} has not finished: --resume the run first")
        return name

    def experiment(self, data_dir: str | None = None) -> Experiment:
        """Rebuild the run's experiment, and load its data.

        Args:
          data_dir: current folder of the data, if it was moved since the run.

        Raises:
          JaxpflError: if the data, the graph or the methods' hyper-parameters have changed since the run.
        """
        # The initial parameters of a warm start are not needed to restore a checkpoint, and their file may be gone.
        config = dataclasses.replace(self.config, warm_start=None)
        own = {}
        if (code := self.record.get("code")) is not None:
            own = {one.name: one for one in map(algorithms.get, run_folder.methods_in(self.folder / CODE, code, code))}
        # The graph is read from the run folder, because the user's file may have moved or the graph had to be computed.
        if (self.folder / GRAPH).is_file():
            config = dataclasses.replace(config, graph=str(self.folder / GRAPH))
        if data_dir is not None:
            config = dataclasses.replace(config, data_dir=data_dir)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", JaxpflWarning)  # the run has already issued these warnings
            experiment = prepare(config, tuple(self.methods), own=own)
        now = experiment.fingerprint()
        if not has_checksum(self.record["data"], experiment.federation, experiment.unseen):
            raise JaxpflError(f"the data have changed since the run in {self.folder}")
        if now["hyper"] != self.record["hyper"]:
            raise JaxpflError(f"the methods' hyper-parameters differ from those of the run in {self.folder}")
        if now["graph"] != self.record.get("graph"):
            raise JaxpflError(f"the client graph has changed since the run in {self.folder}")
        return experiment


def open_run(folder: Path) -> StoredRun:
    """Open a run folder and read its config.

    Raises:
      JaxpflError: if the folder is not a run folder, or its ``config.json`` is damaged.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise JaxpflError(f"{folder} is not a run folder: there is no config.json in it")
    record = read_record(path)
    config = from_mapping(record["config"], str(path))
    if (folder / FEDERATION).is_dir():  # the folder may have been moved
        config = dataclasses.replace(config, data_dir=str(folder))
    config = run_folder.located(resolve(config), folder / CODE)
    return StoredRun(folder, record, config, record["methods"])


def read_record(path: Path) -> dict[str, Any]:
    """Read the ``config.json`` of a run folder: config, methods, hyper-parameters and checksums.

    In the returned config, settings that were added to jaxpfl after the file was written take their default values.

    Raises:
      JaxpflError: if the file is not the config of a run, or is damaged.
    """
    record = files.read_json(path)
    kinds = {"config": dict, "methods": list, "data": int, "hyper": dict}
    kinds |= {"code": dict} if isinstance(record, dict) and "code" in record else {}
    if not isinstance(record, dict) or not all(isinstance(record.get(name), kind) for name, kind in kinds.items()):
        raise JaxpflError(f"{path} is damaged or not the config of a run")
    methods, known = record["methods"], {*METHODS, *filter(algorithms.is_name, record.get("code") or ())}
    if not methods or not all(isinstance(name, str) and name in known for name in methods):
        raise JaxpflError(f"{path} is damaged: 'methods' must list known methods, got {methods}")
    return record | {"config": fill_defaults(record["config"], path)}


def check_recorded(path: Path, file: ConfigFile, experiment: Experiment) -> None:
    """Check that a new run from a stored config has the hyper-parameters that ``config.json`` lists.

    The file contains the config, from which the run is prepared, and a list of all hyper-parameters for information.
    If the two disagree, either someone edited the list, which has no effect, or this version of jaxpfl has different
    defaults. Nothing is checked if the command line changes settings.

    Args:
      path: file given by ``--config``.
      file: content of the file.
      experiment: experiment that results from the file and the command line.

    Raises:
      JaxpflError: if hyper-parameters differ; the message names the methods concerned.
    """
    if to_json(file.config) != to_json(experiment.config):
        return
    recorded = [name for name in experiment.methods if name in file.hyper]
    if changed := [name for name in recorded if file.hyper[name] != files.jsonable(experiment.all_hyper(name))]:
        raise JaxpflError(
            f"hyper in {path} does not match its config for {', '.join(changed)}: set values by --set or in the "
            "config, and remove hyper from the file"
        )


def check_data(path: Path, file: ConfigFile, experiment: Experiment, *, strict: bool = False) -> None:
    """Warn if the clients' data differ from the stored run's data, unless the command line asks for different clients.

    Args:
      path, file, experiment: file, its content and the experiment, as in `check_recorded`.
      strict: whether to raise an error instead of a warning.
    """
    was = resolve(file.config)
    if file.data is None or any(getattr(was, name) != getattr(experiment.config, name) for name in _OF_CLIENTS):
        return
    if not has_checksum(file.data, experiment.federation, experiment.unseen):
        warn(f"the data differ from those of the run in {path}: its results will not be reproduced", strict=strict)


def last_state(run: StoredRun, experiment: Experiment, method: str, seed: int) -> tuple[Simulation, RunState]:
    """Restore the state after the last round of a finished method, for one seed.

    Returns:
      The simulation of the method, and the state, with leaves [1, ...].

    Raises:
      JaxpflError: if the checkpoint of the last round is missing or cannot be read.
    """
    simulation = experiment.simulation(method)
    folder, done = run.folder / "checkpoints" / method, results.finished(run.folder, method) or {}
    rounds = done.get("stopped_after") or require(run.config.rounds)
    remedy = f"delete {run.folder / 'methods' / method}.json, then --resume the run to recreate it"
    if not (folder / str(rounds)).is_dir():
        raise JaxpflError(f"{folder} contains no checkpoint of round {rounds}: {remedy}")
    simulation.keep_clients_in(run.folder / "clients" / method, [rounds])
    like = simulation.checkpointed(simulation.init(run.seeds))
    try:
        state, _ = Checkpoints(folder).read(rounds, like)
    except JaxpflError as error:
        raise JaxpflError(f"{error}: {remedy}") from None
    row = run.seeds.index(seed)
    return simulation, simulation.adopt(jax.tree.map(lambda a: a[row : row + 1], state))
