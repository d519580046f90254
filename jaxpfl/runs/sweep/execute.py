"""Execution of one group of a sweep: load its data, run it as one program with a row for each run, and score the runs.

If not all rows fit into memory, they are run in chunks. The state of a chunk is saved regularly, so that an interrupted
chunk can continue. If saving fails, the chunk continues without saved states.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import data
from jaxpfl.core.trees import checksum, num_bytes
from jaxpfl.core.types import Federation
from jaxpfl.engine import RunState, Simulation
from jaxpfl.engine.build import Assembled, put_together
from jaxpfl.engine.evaluate import example_weights, is_root, over_clients, undefined
from jaxpfl.privacy import SiloMechanism
from jaxpfl.runs import data_sets, export
from jaxpfl.runs.checkpoint import Unfinished
from jaxpfl.runs.config import RunConfig, resolve, spec_for, to_json
from jaxpfl.runs.control import CompileClock, Pace, Reporter
from jaxpfl.runs.records import DIVERGED, DONE, FAILED, STOPPED, Record
from jaxpfl.runs.setup import Experiment, load_federation, prepare, protection_of
from jaxpfl.runs.sweep.grid import apply_settings, cohort_of
from jaxpfl.runs.sweep.plan import Group, Run
from jaxpfl.runs.sweep.results import DATA_FIELDS
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, is_exhausted


class Prepared(NamedTuple):
    """A group of runs with its data, ready to be compiled.

    Attributes:
      group: group of runs.
      experiment: experiment built from the group's config and data.
      runs: runs of the group, with the traced settings in their hyper-parameters.
    """

    group: Group
    experiment: Experiment
    runs: tuple[Assembled, ...]

    @property
    def rounds(self) -> int:
        """Number of rounds that each run takes; with successive halving, the number up to the next comparison."""
        return self.group.until or self.group.rounds

    def simulation(self, rows: slice) -> Simulation:
        """Return the simulation of some of the group's runs as one program."""
        return _stacked(self.runs[rows]).simulation()


def prepare_group(group: Group, loaded: Data) -> Prepared:
    """Load the data of a group and prepare its runs.

    Raises:
      JaxpflError: if a setting is incompatible with the data or the method.
    """
    config, method = resolve(group.config), group.method
    given = loaded.split(config)
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
    """Return the group's run with the given traced settings."""
    method, first = group.method, experiment.runs[group.method]
    if not traced:
        return first
    config = apply_settings(experiment.config, traced)
    config.privacy.check()
    if first.mechanism is not None or config.privacy.on:  # the noise is calibrated for each run
        spec = spec_for(config, method, group.among)
        run = put_together(spec, experiment.federation, experiment.unseen, experiment.task, experiment.graph)
        return dataclasses.replace(run, task=first.task)
    spec = spec_for(config, method, group.among, num_classes=first.spec.num_classes)
    new = {name: getattr(spec, name) for name in ("lr", "server_lr", "dropout", "stragglers", "hyper")}
    spec = dataclasses.replace(first.spec, **new)
    return dataclasses.replace(first, spec=spec, hp=spec.hp, availability=spec.availability)


def _stacked(runs: Sequence[Assembled]) -> Assembled:
    """Combine S runs that differ only in numeric settings into one run with hyper-parameters [S]."""
    first = runs[0]
    hp = jax.tree.map(lambda *leaves: np.array(leaves, float), *(run.hp for run in runs))
    failures = [run.availability for run in runs]
    rates = {name: tuple(getattr(one, name) for one in failures) for name in ("dropout", "stragglers")}
    rates = {name: values for name, values in rates.items() if len(set(values)) > 1}
    availability, spec = dataclasses.replace(failures[0], **rates), first.spec
    if spec.plan.clients_in == "auto":  # if memory does not suffice, `run_group` runs fewer rows at a time instead
        spec = dataclasses.replace(spec, plan=dataclasses.replace(spec.plan, clients_in="device"))
    first = dataclasses.replace(first, hp=hp, spec=spec, availability=availability)
    if first.mechanism is None or isinstance(first.mechanism, SiloMechanism):  # noise of silos cannot be an axis
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
    """Run a group in chunks, and record the runs of each chunk when the chunk ends.

    If a run is refused, or does not fit in memory even on its own, it is recorded as failed, with the reason.

    Args:
      group: group of runs.
      loaded: cache of the data of earlier groups.
      record: function called with the records of each chunk.
      reporter: object whose methods are called with the progress.
      stopped: function that returns True once the current chunk should be abandoned.
      ready: result of `prepare_group`, if the caller has already called it.
      states: states of the runs that successive halving has stopped. Such a run continues from its state here, and the
        states of runs that are stopped now are added.
      unfinished: folder in which a chunk's state is saved about every minute, and when the chunk is abandoned; the
        chunk later continues from this state. States that are too large are not saved. None to save nothing.
    """
    try:
        ready = ready or prepare_group(group, loaded)
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
                rows = -(-min(rows, len(group.runs) - todo) // 2)
                reporter.say(f"{group.name}: {rows} runs at a time, as more do not fit into memory")
                continue
            found = [_failed(run, group, str(error)) for run in group.runs[chunk]]
        if found is None:
            return
        record(found)
        if unfinished is not None:  # this also deletes saved states of chunks with other runs
            shutil.rmtree(unfinished, ignore_errors=True)
        reporter.finish(len(found))
        todo += rows


def _unfinished(folder: Path, ready: Prepared, chunk: slice) -> Unfinished:
    """Return the `Unfinished` of a chunk, identified by all settings that affect its results.

    The data are not included, because the sweep checks that they have not changed.
    """
    group, experiment = ready.group, ready.experiment
    asked = {
        "until": group.until,
        "config": to_json(dataclasses.replace(group.config, data_dir=None)),
        "runs": [run.id for run in group.runs[chunk]],
        "warm_start": experiment.start,
        "graph": None if experiment.graph is None else checksum(experiment.graph),
        # A run must not continue on another kind of machine, where sums are computed in a different order.
        "machine": [jax.__version__, jax.default_backend(), len(jax.devices())],
    }
    return Unfinished.within(folder, asked)


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
    """Run a chunk and return its records; return None if the chunk was abandoned."""
    runs = ready.group.runs[chunk]
    began = time.perf_counter()
    simulation, seeds = ready.simulation(chunk), [run.seed for run in runs]
    simulation.compile(seeds, "scores")
    # From here on, the clock measures only programs that are compiled later, at their first use.
    building, began = time.perf_counter() - clock.seconds - began, time.perf_counter() - clock.seconds
    before = None if states is None else states.take(runs, simulation)
    begin = before or Stopped(simulation.init(seeds), 0, (0.0, 0.0))
    state = begin.state
    if num_bytes((state.clients, state.server, state.counts, state.in_flight)) > _MOST_BYTES:
        kept = None
    state, done, spent = begin if kept is None else _restored(kept, simulation, begin, ready.rounds, reporter)
    del before, begin  # frees the memory of the earlier states
    pace = Pace(ready.experiment.config.plan.rounds_per_call)
    reporter.start(ready.group.name, len(runs), ready.rounds)
    loss = np.full(len(runs), np.nan)

    def seconds() -> float:
        return spent[0] + (time.perf_counter() - clock.seconds - began) / len(runs)

    def compile_seconds() -> float:
        return spent[1] + (building + clock.seconds) / len(runs)

    while done < ready.rounds:
        end = stopped()
        if kept is not None and done and (end or kept.due):
            _save(kept, simulation, Stopped(state, done, (seconds(), 0.0)), reporter)
        if end:
            return None
        with pace.call(ready.rounds - done) as length:
            state, history = simulation.advance(state, length)
        done += length
        loss = history.get("train_loss", loss[:, None])[:, -1]
        reporter.progress(done, float(np.nanmean(loss)) if np.isfinite(loss).any() else float("nan"))
    scores = measure(ready.experiment, simulation, state, loss)
    for row, run in zip(scores, ready.runs[chunk], strict=True):
        row["compile_seconds"] = compile_seconds()
        if run.mechanism is not None:
            statement = protection_of(run, ready.experiment.caveats).statement
            row["epsilon"] = None if statement is None else statement.epsilon
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


_T = TypeVar("_T")


class Last(Generic[_T]):
    """Cache of a single value, which is replaced when a value with another key is requested."""

    def __init__(self) -> None:
        self._kept: tuple[Any, _T] | None = None

    def get(self, key: Any, make: Callable[[], _T]) -> _T:
        """Return the cached value if it has this key; otherwise make it and cache it."""
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # frees the old value first, so that memory never contains both
            self._kept = key, make()
        return self._kept[1]

    def clear(self) -> None:
        """Forget the cached value."""
        self._kept = None


class Data:
    """Cache of the last data set and the last split, which the next group may need again."""

    def __init__(self) -> None:
        self._source: Last[data.Source] = Last()
        self._checksum: Last[int] = Last()
        self._split: Last[tuple[data.Source, Federation]] = Last()

    def split(self, config: RunConfig) -> tuple[data.Source, Federation]:
        """Return the data set of a resolved config, and its split among clients."""
        return self._split.get(_fields(config, DATA_FIELDS), lambda: load_federation(config, self.source))

    def source(self, config: RunConfig) -> data.Source:
        """Return the data set of a config."""

        def load() -> data.Source:
            self._split.clear()  # frees the previous data set, to which the split refers
            self._checksum.clear()
            return data_sets.source_of(config)

        return self._source.get(_fields(config, data_sets.FIELDS), load)

    def checksum(self, config: RunConfig) -> int:
        """Return the checksum of a config's data set."""
        if data_sets.is_stored(config.data):
            return data_sets.checksum(config.data, config.data_dir)
        arrays = [leaf for leaf in jax.tree.leaves(tuple(self.source(config))) if isinstance(leaf, np.ndarray)]
        return self._checksum.get(_fields(config, data_sets.FIELDS), lambda: checksum(arrays))


def _fields(config: RunConfig, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}


_MOST_BYTES = 2**30
"""Maximum size in bytes of a state that is saved during a chunk; at times two states are on disk."""


def _restored(kept: Unfinished, simulation: Simulation, begin: Stopped, rounds: int, reporter: Reporter) -> Stopped:
    """Return the runs' state in ``kept`` if it is from a later round than ``begin``, otherwise ``begin``."""
    try:
        state, done, seconds, _ = kept.restore(simulation, begin.state, (rounds,))
    except Exception as error:
        if not is_exhausted(error):
            raise
        reporter.say(f"the saved state is not used: {error}")
        return begin
    return Stopped(state, done, (seconds, begin.seconds[1])) if done > begin.rounds else begin


def _save(kept: Unfinished, simulation: Simulation, runs: Stopped, reporter: Reporter) -> None:
    """Save the state of unfinished runs in ``kept``; if this fails, report it and continue."""
    try:
        kept.save(simulation, runs.state, runs.rounds, runs.seconds[0])
    except Exception as error:
        if not isinstance(error, JaxpflError | OSError) and not is_exhausted(error):
            raise
        reporter.say(f"the state was not saved: {error}")


_SHARE = 0.25
"""Maximum fraction of the host's free memory that the kept states of one chunk may take."""


class Stopped(NamedTuple):
    """Saved state from which several runs, all at the same round, can continue.

    Attributes:
      state: state of S runs.
      rounds: number of rounds run so far.
      seconds: seconds per run so far, as a pair (execution without compilation, compilation).
    """

    state: RunState
    rounds: int
    seconds: tuple[float, float]


class States:
    """States of the runs that successive halving stopped in this process, in host memory."""

    def __init__(self) -> None:
        self._kept: dict[str, Stopped] = {}

    def keep(self, runs: Sequence[Run], simulation: Simulation, stopped: Stopped) -> None:
        """Keep the states of runs, unless the runs are private or the states take too much memory."""
        free, state = host_memory.free(), stopped.state
        size = num_bytes((state.clients, state.server, state.counts, state.in_flight))
        if state.noise is not None or (free is not None and size > _SHARE * free):
            return
        state = jax.device_put(simulation.trim(state), jax.devices("cpu")[0])
        for i, run in enumerate(runs):
            self._kept[run.id] = stopped._replace(state=jax.tree.map(lambda a, i=i: a[i : i + 1], state))

    def take(self, runs: Sequence[Run], simulation: Simulation) -> Stopped | None:
        """Return one state of all runs, with the simulation's sharding, and the runs' rounds and seconds.

        Return None if some run's state was not kept, or the runs are at different rounds.
        """
        found = [self._kept.get(run.id) for run in runs]
        kept = [one for one in found if one is not None]
        if len(kept) < len(runs) or len({one.rounds for one in kept}) > 1:
            return None
        state = jax.tree.map(lambda *rows: jnp.concatenate(rows), *(one.state for one in kept))
        spent, compiling = (sum(column) / len(kept) for column in zip(*(one.seconds for one in kept), strict=True))
        return Stopped(simulation.adopt(state), kept[0].rounds, (spent, compiling))

    def only(self, runs: Iterable[Run]) -> None:
        """Forget the states of all other runs."""
        wanted = {run.id for run in runs}
        self._kept = {name: one for name, one in self._kept.items() if name in wanted}


UNDEFINED = "_undefined"
"""Suffix of the names of entries that count the clients for which a metric is undefined. An entry that would be zero is
omitted."""
_OF_OTHERS = {"": "mean", "_median": "median", "_examples": "mean_examples"}
"""Suffix of an entry's name -> statistic over clients that the entry gives, for all metrics except the headline."""


def measure(
    experiment: Experiment, simulation: Simulation, state: RunState, loss: np.ndarray
) -> list[dict[str, float | None]]:
    """Evaluate S runs.

    Args:
      experiment: experiment of the runs.
      simulation: simulation of the runs.
      state: state of the runs after their last round.
      loss: training loss of the last round [S].

    Returns:
      For each run, its results by name. Scores, losses and gradients are means over clients unless the name states
      another statistic; bytes and steps are totals over clients.
    """
    splits = jax.tree.map(np.asarray, simulation.evaluate_splits(state))
    scores, validation = splits["test"], splits.get("validation", {}).get("after")
    counts = simulation.counts(state)
    gradients = simulation.gradients(state)
    up, down = simulation.bytes_per_client()
    headline, rows, task = experiment.headline, [], experiment.task
    sizes = example_weights(experiment.federation.test, task.kind)
    examples = np.asarray(experiment.federation.test.size)
    if simulation.attackers is not None:  # attackers have no scores, so they must not count as undefined
        examples = np.where(simulation.attackers, 0, examples)
    others = [other for other in task.metrics if other not in (headline.name, "loss")]
    name, own, constant = headline.name, headline.personalized, None
    if experiment.constant is not None:
        unscored = np.isnan(scores["after"][name]).all(axis=0)  # such as attackers
        constant = _mean(np.where(unscored, np.nan, experiment.constant[1]))
    for i in range(len(loss)):
        after = over_clients(scores["after"][name][i], lower=headline.lower, sizes=sizes, root=is_root(task, name))
        sent = counts.upload_bits[i].sum() / 8 if simulation.algorithm.counts_bits else up * counts.uploads[i].sum()
        row: dict[str, Any] = {
            headline.validation: None if validation is None else _mean(validation[name][i]),
            "validation_loss": None if validation is None else _mean(validation["loss"][i]),
            own: after["mean"],
            f"{own}_std": after["std_clients"],
            f"{own}_examples": after["mean_examples"],
            f"{own}_p10": after["p10"],
            f"{own}_worst_decile": after["worst_decile"],
            "personalized_loss": _mean(scores["after"]["loss"][i]),
            f"personalized_before_{name}": _mean(scores["before"][name][i]),
            f"global_{name}": _mean(scores["global"][name][i]) if "global" in scores else None,
            f"constant_{name}": constant,
            "train_loss": loss[i],
            "bytes_up": sent,
            "bytes_down": down * counts.participations[i].sum(),
            "client_steps": counts.steps[i].sum(),
            "gradients": None if gradients is None else gradients.training[i].mean(),
            "diverged_clients": ((counts.diverged[i] > 0) | scores["after"]["diverged"][i]).sum(),
            "num_clients": experiment.federation.num_clients,
            "cohort_size": experiment.config.cohort,
        }
        for other in others:
            over = over_clients(scores["after"][other][i], sizes=sizes, root=is_root(task, other))
            row |= {f"personalized_{other}{ending}": over[of] for ending, of in _OF_OTHERS.items()}
        for metric in (name, *others):
            if left_out := undefined({f"after_{metric}": scores["after"][metric][[i]]}, metric, examples):
                row[f"personalized_{metric}{UNDEFINED}"] = left_out
        rows.append({key: _number(value) for key, value in row.items()})
    return rows


def _mean(scores: np.ndarray) -> float:
    """Return the mean of the clients' scores [m] that are not NaN; NaN if all are NaN."""
    held = scores[~np.isnan(scores)]
    return float(held.mean()) if held.size else float("nan")


def _number(value: Any) -> float | None:
    if value is None or not np.isfinite(value):
        return None
    return int(value) if isinstance(value, int | np.integer) else float(value)
