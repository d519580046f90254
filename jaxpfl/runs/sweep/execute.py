"""Execution of one sweep group: its data, its runs as rows of one program, and their scores.

The rows are run in chunks if memory is short. A chunk is saved on its way, so that a stopped one continues from its
middle; if saving fails, the chunk goes on without.
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
from jaxpfl.engine.evaluate import example_weights, is_root
from jaxpfl.privacy import SiloMechanism
from jaxpfl.runs import data_sets, export
from jaxpfl.runs.checkpoint import Unfinished
from jaxpfl.runs.config import RunConfig, resolve, spec_for, to_json
from jaxpfl.runs.control import CompileClock, Pace
from jaxpfl.runs.records import DIVERGED, DONE, FAILED, STOPPED, Record
from jaxpfl.runs.scores import over_clients, undefined
from jaxpfl.runs.setup import Experiment, load_federation, prepare, protection_of
from jaxpfl.runs.sweep.grid import apply_settings, cohort_of
from jaxpfl.runs.sweep.plan import Group, Run
from jaxpfl.runs.sweep.selection import DATA_FIELDS
from jaxpfl.support import host_memory
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
      experiment: experiment of its config.
      runs: each row, with the traced settings in its hyper-parameters.
    """

    group: Group
    experiment: Experiment
    runs: tuple[Assembled, ...]

    @property
    def rounds(self) -> int:
        """Rounds of each run; under successive halving, the rounds until its rung's end."""
        return self.group.until or self.group.rounds

    def simulation(self, rows: slice) -> Simulation:
        """The programs of some of the rows."""
        return _stacked(self.runs[rows]).simulation()


def prepare_group(group: Group, loaded: Data) -> Prepared:
    """Load the data of a group and assemble its runs.

    Raises:
      JaxpflError: for settings that the data or the method do not allow.
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
    """The group's run with other traced settings."""
    method, first = group.method, experiment.runs[group.method]
    if not traced:
        return first
    config = apply_settings(experiment.config, traced)
    config.privacy.check()
    if first.mechanism is not None or config.privacy.on:  # noise is calibrated for each
        spec = spec_for(config, method, group.among)
        run = put_together(spec, experiment.federation, experiment.unseen, experiment.task, experiment.graph)
        return dataclasses.replace(run, task=first.task)
    spec = spec_for(config, method, group.among, num_classes=first.spec.num_classes)
    new = {name: getattr(spec, name) for name in ("lr", "server_lr", "dropout", "stragglers", "hyper")}
    spec = dataclasses.replace(first.spec, **new)
    return dataclasses.replace(first, spec=spec, hp=spec.hp, availability=spec.availability)


def _stacked(runs: Sequence[Assembled]) -> Assembled:
    """Runs that differ in numbers only, as one with hyper-parameters [S]."""
    first = runs[0]
    hp = jax.tree.map(lambda *leaves: np.array(leaves, float), *(run.hp for run in runs))
    failures = [run.availability for run in runs]
    rates = {name: tuple(getattr(one, name) for one in failures) for name in ("dropout", "stragglers")}
    rates = {name: values for name, values in rates.items() if len(set(values)) > 1}
    availability, spec = dataclasses.replace(failures[0], **rates), first.spec
    if spec.plan.clients_in == "auto":  # where memory does not suffice, fewer rows run at a time
        spec = dataclasses.replace(spec, plan=dataclasses.replace(spec.plan, clients_in="device"))
    first = dataclasses.replace(first, hp=hp, spec=spec, availability=availability)
    if first.mechanism is None or isinstance(first.mechanism, SiloMechanism):  # silos' noise is not an axis
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
      stopped: true once the running chunk is to be abandoned.
      ready: the group, prepared before.
      states: states of stopped runs that now continue; runs that stop here store theirs in it.
      unfinished: folder of this group alone, in which a chunk is saved every minute and when it is abandoned, and
        from which it is continued.
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
        if unfinished is not None:  # also leftovers of chunks with other runs
            shutil.rmtree(unfinished, ignore_errors=True)
        reporter.finish(len(found))
        todo += rows


def _unfinished(folder: Path, ready: Prepared, chunk: slice) -> Unfinished:
    """Unfinished runs of a group, stored under all that decides their numbers but the data, which the sweep checks."""
    group, experiment = ready.group, ready.experiment
    asked = {
        "until": group.until,
        "config": to_json(dataclasses.replace(group.config, data_dir=None)),
        "runs": [run.id for run in group.runs[chunk]],
        "warm_start": experiment.start,
        "graph": None if experiment.graph is None else checksum(experiment.graph),
        # A run must not move to another machine, which adds in another order.
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
    """Records of some rows; None if they were abandoned."""
    runs = ready.group.runs[chunk]
    began = time.perf_counter()
    simulation, seeds = ready.simulation(chunk), [run.seed for run in runs]
    simulation.compile(seeds, *ready.experiment.scored_splits)
    # The clock counts what is compiled later, at its first use.
    building, began = time.perf_counter() - clock.seconds - began, time.perf_counter() - clock.seconds
    before = None if states is None else states.take(runs, simulation)
    begin = before or Stopped(simulation.init(seeds), 0, (0.0, 0.0))
    state = begin.state
    if num_bytes((state.clients, state.server, state.counts, state.in_flight)) > _MOST_BYTES:
        kept = None
    state, done, spent = begin if kept is None else _restored(kept, simulation, begin, ready.rounds, reporter)
    del before, begin  # frees their memory, if the runs continue from a later state
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


_T = TypeVar("_T")


class Last(Generic[_T]):
    """The last value that was made, kept for as long as the same is asked for."""

    def __init__(self) -> None:
        self._kept: tuple[Any, _T] | None = None

    def get(self, key: Any, make: Callable[[], _T]) -> _T:
        """The value of a key, made unless it is the last one's."""
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # not two of them at a time
            self._kept = key, make()
        return self._kept[1]

    def clear(self) -> None:
        """Keep nothing."""
        self._kept = None


class Data:
    """The last data set and the last group's split, kept for the next group if it has the same."""

    def __init__(self) -> None:
        self._source: Last[data.Source] = Last()
        self._checksum: Last[int] = Last()
        self._split: Last[tuple[data.Source, Federation]] = Last()

    def split(self, config: RunConfig) -> tuple[data.Source, Federation]:
        """The data set of a resolved config and its split."""
        return self._split.get(_fields(config, DATA_FIELDS), lambda: load_federation(config, self.source))

    def source(self, config: RunConfig) -> data.Source:
        """The data set of a config."""

        def load() -> data.Source:
            self._split.clear()  # which holds the data set before
            self._checksum.clear()
            return data_sets.source_of(config)

        return self._source.get(_fields(config, data_sets.FIELDS), load)

    def checksum(self, config: RunConfig) -> int:
        """Checksum of the data set of a config."""
        if data_sets.is_stored(config.data):
            return data_sets.checksum(config.data, config.data_dir)
        arrays = [leaf for leaf in jax.tree.leaves(tuple(self.source(config))) if isinstance(leaf, np.ndarray)]
        return self._checksum.get(_fields(config, data_sets.FIELDS), lambda: checksum(arrays))


def _fields(config: RunConfig, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}


_MOST_BYTES = 2**30
"""Largest state that is saved during a chunk; two are on disk at times."""


def _restored(kept: Unfinished, simulation: Simulation, begin: Stopped, rounds: int, reporter: Reporter) -> Stopped:
    """Runs as they were saved, if at a later round than where they would begin."""
    try:
        state, done, seconds, _ = kept.restore(simulation, begin.state, (rounds,))
    except Exception as error:
        if not is_exhausted(error):
            raise
        reporter.say(f"saved states are not used: {error}")
        return begin
    return Stopped(state, done, (seconds, begin.seconds[1])) if done > begin.rounds else begin


def _save(kept: Unfinished, simulation: Simulation, runs: Stopped, reporter: Reporter) -> None:
    """Save unfinished runs; a failure is reported, and the runs continue."""
    try:
        kept.save(simulation, runs.state, runs.rounds, runs.seconds[0])
    except Exception as error:
        if not isinstance(error, JaxpflError | OSError) and not is_exhausted(error):
            raise
        reporter.say(f"state not saved: {error}")


_SHARE = 0.25
"""Largest share of the free memory of the host that one chunk's states may take."""


class Stopped(NamedTuple):
    """Runs at a rung, all at the same round.

    Attributes:
      state: state of S runs, trimmed.
      rounds: rounds that they have run.
      seconds: seconds of each run so far, without compiling and of compiling.
    """

    state: RunState
    rounds: int
    seconds: tuple[float, float]


class States:
    """The stopped runs of this process."""

    def __init__(self) -> None:
        self._kept: dict[str, Stopped] = {}

    def keep(self, runs: Sequence[Run], simulation: Simulation, stopped: Stopped) -> None:
        """Keep the states of some runs, unless they are private or take too much memory."""
        free, state = host_memory.free(), stopped.state
        size = num_bytes((state.clients, state.server, state.counts, state.in_flight))
        if state.noise is not None or (free is not None and size > _SHARE * free):
            return
        state = jax.device_put(simulation.trim(state), jax.devices("cpu")[0])
        for i, run in enumerate(runs):
            self._kept[run.id] = stopped._replace(state=jax.tree.map(lambda a, i=i: a[i : i + 1], state))

    def take(self, runs: Sequence[Run], simulation: Simulation) -> Stopped | None:
        """The state from which all of these runs continue, in the simulation's layout; None if it is not here."""
        found = [self._kept.get(run.id) for run in runs]
        kept = [one for one in found if one is not None]
        if len(kept) < len(runs) or len({one.rounds for one in kept}) > 1:
            return None
        state = jax.tree.map(lambda *rows: jnp.concatenate(rows), *(one.state for one in kept))
        spent, compiling = (sum(column) / len(kept) for column in zip(*(one.seconds for one in kept), strict=True))
        return Stopped(simulation.adopt(state), kept[0].rounds, (spent, compiling))

    def only(self, runs: Iterable[Run]) -> None:
        """Forget all other runs."""
        wanted = {run.id for run in runs}
        self._kept = {name: one for name, one in self._kept.items() if name in wanted}


UNDEFINED = "_undefined"
"""Ending of the number of clients whose test examples do not define a metric; there only where it is not 0."""
_OF_OTHERS = {"": "mean", "_median": "median", "_examples": "mean_examples"}
"""Suffix of a metric's name -> its statistic over clients, for metrics beside the headline."""


def measure(
    experiment: Experiment, simulation: Simulation, state: RunState, loss: np.ndarray
) -> list[dict[str, float | None]]:
    """Results of each run, by name: means over clients unless the name says otherwise.

    Args:
      experiment: the config with its data.
      simulation: its programs.
      state: state of S runs, at their end.
      loss: training loss of the last round, [S].
    """
    scores = jax.tree.map(np.asarray, dict(simulation.evaluate(state)))
    validation = None
    if "validation" in experiment.scored_splits:
        validation = jax.tree.map(np.asarray, dict(simulation.evaluate(state, "validation")["after"]))
    counts = simulation.counts(state)
    gradients = simulation.gradients(state)
    up, down = simulation.bytes_per_client()
    headline, rows, task = experiment.headline, [], experiment.task
    sizes = example_weights(experiment.federation.test, task.kind)
    examples = np.asarray(experiment.federation.test.size)
    if simulation.attackers is not None:  # whose scores are not among these
        examples = np.where(simulation.attackers, 0, examples)
    others = [other for other in task.metrics if other not in (headline.name, "loss")]
    name, own = headline.name, headline.personalized
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
    """Mean over the clients that have a score, [m]; NaN where none has."""
    held = scores[~np.isnan(scores)]
    return float(held.mean()) if held.size else float("nan")


def _number(value: Any) -> float | None:
    if value is None or not np.isfinite(value):
        return None
    return int(value) if isinstance(value, int | np.integer) else float(value)
