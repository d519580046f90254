"""Execution of one group of a sweep: its runs as rows of one program, in chunks where memory asks."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl.core.trees import checksum
from jaxpfl.engine import Simulation
from jaxpfl.engine.build import Assembled
from jaxpfl.engine.evaluate import Part
from jaxpfl.privacy import SiloMechanism
from jaxpfl.runs import export
from jaxpfl.runs.checkpoint import Unfinished
from jaxpfl.runs.config import resolve, spec_for, to_json
from jaxpfl.runs.control import CompileClock, Pace
from jaxpfl.runs.inputs import protection_of
from jaxpfl.runs.records import DIVERGED, DONE, FAILED, STOPPED, Record
from jaxpfl.runs.setup import Experiment, prepare
from jaxpfl.runs.sweep.axes import applied, cohort_of
from jaxpfl.runs.sweep.loaded import Data
from jaxpfl.runs.sweep.measures import measured, splits_of
from jaxpfl.runs.sweep.plan import Group, Run
from jaxpfl.runs.sweep.saves import Saves
from jaxpfl.runs.sweep.states import States, Stopped
from jaxpfl.support.errors import JaxpflError, is_exhausted


class Reporter:
    """Receiver of a sweep's progress; this one shows nothing."""

    def start(self, group: str, runs: int, rounds: int) -> None:
        """A chunk of runs begins."""

    def progress(self, rounds: int, loss: float) -> None:
        """So many rounds of the chunk are done."""

    def finish(self, runs: int) -> None:
        """The chunk's runs are recorded."""

    def say(self, text: str) -> None:
        """A line for the user."""


class Prepared(NamedTuple):
    """A group with its data: what its programs are made of.

    Attributes:
      group: the group.
      experiment: of its config.
      runs: each row, with the traced settings in its hyper-parameters.
    """

    group: Group
    experiment: Experiment
    runs: tuple[Assembled, ...]

    @property
    def rounds(self) -> int:
        """Rounds of each run, those until its rung's end under successive halving."""
        return self.group.until or self.group.rounds

    @property
    def splits(self) -> tuple[Part, ...]:
        """The splits that have examples to score."""
        return splits_of(self.experiment)

    def simulation(self, rows: slice) -> Simulation:
        """The programs of some of the rows."""
        return _stacked(self.runs[rows]).simulation()


def prepared(group: Group, loaded: Data) -> Prepared:
    """Load the data of a group and assemble its runs.

    Raises:
      JaxpflError: for settings that the data or the method do not allow.
    """
    config, method = resolve(group.config), group.method
    given = loaded.of(config)
    cohort = cohort_of(group.static, given[1].num_clients - config.clients_apart)
    if cohort is not None:
        config = dataclasses.replace(config, cohort=cohort)
    initial = None if config.warm_start is None else export.read_parameters(config.warm_start)
    origin = None if config.warm_start is None else export.parameters_origin(config.warm_start)
    experiment = prepare(config, (method,), initial=initial, origin=origin, given=given, among=group.among)
    made: dict[str, Assembled] = {}
    for run in group.runs:
        traced = {name: value for name, value in run.settings.items() if name not in group.static}
        if repr(traced) not in made:
            made[repr(traced)] = _one(experiment, group, traced)
    runs = tuple(made[repr({n: v for n, v in run.settings.items() if n not in group.static})] for run in group.runs)
    return Prepared(group, experiment, runs)


def _one(experiment: Experiment, group: Group, traced: Mapping[str, Any]) -> Assembled:
    """The group's run with other traced settings."""
    method, first = group.method, experiment.runs[group.method]
    if not traced:
        return first
    config = applied(experiment.config, traced)
    config.privacy.check()
    if first.mechanism is not None or config.privacy.on:  # noise is calibrated for each
        run = experiment.under(config, (method,), group.among).runs[method]
        return dataclasses.replace(run, task=first.task)
    spec = spec_for(config, method, group.among, num_classes=first.spec.num_classes)
    new = {name: getattr(spec, name) for name in ("work", "aggregation", "availability", "hyper")}
    spec = dataclasses.replace(first.spec, **new)
    return dataclasses.replace(first, spec=spec, hp=spec.hp)


def _stacked(runs: Sequence[Assembled]) -> Assembled:
    """Runs that differ in numbers only, as one with hyper-parameters [S]."""
    first = runs[0]
    hp = jax.tree.map(lambda *leaves: np.array(leaves, float), *(run.hp for run in runs))
    failures = [run.availability for run in runs]
    rates = {name: [getattr(one, name) for one in failures] for name in ("dropout", "stragglers")}
    rates = {name: values for name, values in rates.items() if len(set(values)) > 1}
    spec = dataclasses.replace(first.spec, availability=dataclasses.replace(failures[0], **rates))
    if spec.plan.clients_in == "auto":  # where memory does not suffice, fewer rows run at a time
        spec = dataclasses.replace(spec, plan=dataclasses.replace(spec.plan, clients_in="device"))
    first = dataclasses.replace(first, hp=hp, spec=spec)
    if first.mechanism is None or isinstance(first.mechanism, SiloMechanism):  # that of silos is no axis of a group
        return first
    mechanisms = [run.mechanism for run in runs]
    numbers = {
        name: tuple(float(np.asarray(getattr(one, name))) for one in mechanisms)
        for name in ("noise_multiplier", "clipping_norm")
        if len({float(np.asarray(getattr(one, name))) for one in mechanisms}) > 1
    }
    mechanism = dataclasses.replace(first.mechanism, **numbers)
    work = dataclasses.replace(first.work, privacy=mechanism)
    return dataclasses.replace(first, mechanism=mechanism, work=work)


def run_group(
    group: Group,
    loaded: Data,
    record: Callable[[list[Record]], None],
    reporter: Reporter,
    *,
    stopped: Callable[[], bool] = lambda: False,
    ready: Prepared | None = None,
    states: States | None = None,
    unfinished: Path | None = None,
) -> None:
    """Run a group, and record each chunk of its runs when it ends.

    A setting that cannot run, or for which memory does not suffice one run at a time, is recorded as failed with the
    reason.

    Args:
      group: the group.
      loaded: data that earlier groups left.
      record: receives the records of a chunk.
      reporter: receives the progress.
      stopped: true once the chunk at work is to be given up.
      ready: the group, prepared before.
      states: of runs that were stopped and now go on; receives those of the runs that stop here.
      unfinished: folder of this group alone, in which a chunk is saved every minute and when it is given up, and from
        which it goes on.
    """
    try:
        ready = ready or prepared(group, loaded)
    except (JaxpflError, MemoryError) as error:
        record([_failed(run, group, str(error)) for run in group.runs])
        return
    rows, todo = len(group.runs), 0
    while todo < len(group.runs) and not stopped():
        chunk = slice(todo, todo + rows)
        kept = None if unfinished is None else _unfinished(unfinished, ready, chunk)
        try:
            with CompileClock() as clock:
                found = _run(ready, chunk, reporter, stopped, states, kept, clock)
        except Exception as error:
            if not is_exhausted(error) and not isinstance(error, JaxpflError):
                raise
            if is_exhausted(error) and rows > 1:
                rows = fewer(rows, len(group.runs) - todo)
                reporter.say(f"{group.name}: {rows} runs at a time, as more do not fit into memory")
                continue
            found = [_failed(run, group, str(error)) for run in group.runs[chunk]]
        if found is None:
            return
        record(found)
        if unfinished is not None:  # with what is left of chunks of other runs
            shutil.rmtree(unfinished, ignore_errors=True)
        reporter.finish(len(found))
        todo += rows


def _unfinished(folder: Path, ready: Prepared, chunk: slice) -> Unfinished:
    """Some runs of a group on their way, by all that decides their numbers but the data, which a sweep checks."""
    group, experiment = ready.group, ready.experiment
    asked = {
        "until": group.until,
        "config": to_json(dataclasses.replace(group.config, data_dir=None)),
        "runs": [run.id for run in group.runs[chunk]],
        "warm_start": experiment.start,
        "graph": None if experiment.graph is None else checksum(experiment.graph),
        # A run must not change its machine on the way, whose order of additions is its own.
        "machine": [jax.__version__, jax.default_backend(), len(jax.devices())],
    }
    return Unfinished.within(folder, asked)


def fewer(rows: int, left: int) -> int:
    """Rows at a time where ``rows`` of those that are left do not fit into memory."""
    return -(-min(rows, left) // 2)


def _failed(run: Run, group: Group, reason: str) -> Record:
    told = {"rounds": group.until or group.rounds, "group": group.name}
    return Record(run.method, run.settings, run.seed, FAILED, " ".join(reason.split()), **told)


def _run(
    ready: Prepared,
    chunk: slice,
    reporter: Reporter,
    stopped: Callable[[], bool],
    states: States | None,
    kept: Unfinished | None,
    clock: CompileClock,
) -> list[Record] | None:
    """Records of some rows; None if they were given up."""
    runs = ready.group.runs[chunk]
    began = time.perf_counter()
    simulation, seeds = ready.simulation(chunk), [run.seed for run in runs]
    simulation.compile(seeds, *ready.splits)
    # What is compiled later, at its first use, the clock tells.
    building, began = time.perf_counter() - clock.seconds - began, time.perf_counter() - clock.seconds
    before = None if states is None else states.take(runs, simulation)
    begin = before or Stopped(simulation.init(seeds), 0, (0.0, 0.0))
    saves = Saves(kept, simulation, begin.state, reporter.say)
    state, done, spent = saves.later(begin, ready.rounds)
    del before, begin  # their memory, where the runs go on from a later state
    pace = Pace(ready.experiment.config.plan.rounds_per_call)
    reporter.start(ready.group.name, len(runs), ready.rounds)
    loss = np.full(len(runs), np.nan)

    def seconds() -> float:
        return spent[0] + (time.perf_counter() - clock.seconds - began) / len(runs)

    def compile_seconds() -> float:
        return spent[1] + (building + clock.seconds) / len(runs)

    while done < ready.rounds:
        if (end := stopped()) or saves.due:
            saves.save(state, done, seconds())
        if end:
            return None
        with pace.call(ready.rounds - done) as length:
            state, history = simulation.advance(state, length)
        done += length
        loss = history.get("train_loss", loss[:, None])[:, -1]
        reporter.progress(done, float(np.nanmean(loss)) if np.isfinite(loss).any() else float("nan"))
    scores = measured(ready.experiment, simulation, state, loss)
    for row, run in zip(scores, ready.runs[chunk], strict=True):
        claim = protection_of(run, ready.experiment.caveats)
        row["compile_seconds"] = compile_seconds()
        if claim is not None:
            row["epsilon"] = None if claim.statement is None else claim.statement.epsilon
    if states is not None and done < ready.group.rounds:
        states.keep(runs, simulation, Stopped(state, done, (seconds(), compile_seconds())))
    program = simulation.digest(len(runs))[:16]
    told = {"rounds": done, "seconds": seconds(), "group": ready.group.name, "program": program}
    return [_record(run, ready.group, row, told) for run, row in zip(runs, scores, strict=True)]


def _record(run: Run, group: Group, row: dict[str, float | None], told: Mapping[str, Any]) -> Record:
    diverged = int(row["diverged_clients"] or 0)
    clients = int(row["num_clients"] or 0)
    status, reason = DONE, ""
    if diverged:
        status, reason = DIVERGED, f"{diverged} of {clients} clients diverged"
    elif told["rounds"] < group.rounds:
        status, reason = STOPPED, f"successive halving: round {told['rounds']} of {group.rounds}"
    return Record(run.method, run.settings, run.seed, status, reason, metrics=row, **told)
