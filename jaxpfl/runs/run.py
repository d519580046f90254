"""Run methods and write their records, checkpoints, per-client scores and summary into a run folder.

Only one run at a time may write into a folder; callers ensure this with `run_folder.lock` around `open_folder` and
`run_methods`. If a run has several processes, all of them call `run_methods`, but only the first process reads and
writes the folder.

A run folder contains:

- ``config.json``: all settings, from which the run can be repeated with the same results;
- ``metrics.jsonl``: the metrics of every round and evaluation;
- ``methods/``: two files for each finished method;
- ``checkpoints/``, ``clients.npz`` (per-client scores) and ``plots/``;
- ``graph.csv``, the clients' neighbors, if a method needs a graph of the clients;
- ``fit-federation/``, the data of a run of ``jaxpfl.fit``;
- ``code/``, copies of the user's files that the settings name;
- ``clients/``, if the clients' states are kept on disk;
- ``profile/``, ``tensorboard/`` and ``wandb/``, on request;
- ``summary.json``, written last: a run without it is incomplete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxpfl import __version__
from jaxpfl.engine import RunState, Simulation, noise_keys
from jaxpfl.engine.evaluate import Part, mean_over_clients, milestones
from jaxpfl.engine.fit import Evaluated
from jaxpfl.runs import results, run_folder
from jaxpfl.runs.checkpoint import Checkpoints, restore, save
from jaxpfl.runs.config import RunConfig, differences, to_json
from jaxpfl.runs.control import Ahead, CompileClock, Interrupt, Interrupted, Pace, Patience, Reporter
from jaxpfl.runs.run_folder import GRAPH
from jaxpfl.runs.setup import Experiment, has_checksum, require, write_graph
from jaxpfl.runs.stored_run import read_record
from jaxpfl.runs.tracking import Tracker, end_trackers
from jaxpfl.support import files, processes
from jaxpfl.support.errors import JaxpflError, UnwritableError, warn, writing

Observer: TypeAlias = Callable[[Simulation, RunState, Evaluated], None]

_FIXED = {
    "warm_start": "the parameters of --warm-start have changed",
    "noise": "an older version drew its noise differently",
    "orders": "another version drew the examples in a different order",
}
"""Entries of ``config.json`` that must stay the same when a run is resumed, each with the message if it has changed."""


def open_folder(folder: Path, experiment: Experiment, *, resume: bool, force: bool = False) -> list[str]:
    """Create a run folder; with ``resume``, open an existing run; with ``force``, replace an existing run.

    Returns:
      The allowed changes relative to the stored run, as strings (usually ``name: old -> new``); empty for a new run.

    Raises:
      JaxpflError: if the folder cannot be written; if it contains a run and neither ``resume`` nor ``force`` is true;
        if ``resume`` is true and it contains no run, or the run of another experiment; or if ``force`` is true and it
        contains files that are not part of a run.
    """
    stored = folder / "config.json"
    run_folder.check_place(folder, stored.name, "run", run_folder.RUN_PARTS, resume=resume, force=force)
    if force and stored.exists():
        read_record(stored)  # raises if config.json is another program's: then nothing may be deleted
        run_folder.clear(folder, stored.name, run_folder.RUN_PARTS)
    allowed = []
    methods, config = experiment.methods, experiment.config
    texts = run_folder.texts_of(config, methods)
    sources = run_folder.sources_of(methods) if texts else {}
    new = {
        "methods": list(methods),
        "config": to_json(config),
        **({"code": sources} if texts else {}),
        **experiment.fingerprint(),
        "versions": {"jaxpfl": __version__, "jax": jax.__version__, "platform": jax.default_backend()},
    }
    new["config"]["plan"]["tuning"] = experiment.tuning
    if stored.exists():
        old = read_record(stored)
        began = old["config"]["plan"]
        if began["tuning"] == "auto" and old.get("versions", {}).get("platform") == "gpu":
            began["tuning"] = "full"  # the only kind of search in earlier versions
        if experiment.config.plan.tuning == "auto" != began["tuning"]:
            new["config"]["plan"]["tuning"] = began["tuning"]
        semantic, allowed = differences(old["config"], new["config"])
        dropped = [name for name in old["methods"] if name not in methods]
        added = [name for name in methods if name not in old["methods"]]
        if dropped:
            semantic.append(f"methods: {', '.join(old['methods'])} -> {', '.join(methods)}")
        if not has_checksum(old["data"], experiment.federation, experiment.unseen):
            semantic.append("the data have changed")
        semantic += [reason for name, reason in _FIXED.items() if old.get(name) != new[name]]
        semantic += run_folder.code_changes(folder, texts)
        semantic += [f"{name} was {one}" for name, one in old.get("code", {}).items() if sources.get(name) != one]
        if old.get("graph") not in (None, new["graph"]):
            semantic.append("the graph of the clients has changed")
        for name in set(methods) & old["hyper"].keys():
            if old["hyper"][name] != new["hyper"][name]:
                semantic.append(f"{name}: {old['hyper'][name]} -> {new['hyper'][name]}")
        if config.privacy.noise_seed == "secret":
            semantic += [
                f"{name}: {_refusal(done['rounds'])}"
                for name in old["methods"]
                if (done := results.finished(folder, name)) and done["rounds"] != config.rounds
            ]
        if semantic:
            raise JaxpflError(f"--resume would change the experiment in {folder}: {'; '.join(semantic)}")
        if old.get("versions") != new["versions"]:
            was = old.get("versions")
            allowed.append(f"versions (numbers may differ in the last bits): {was} -> {new['versions']}")
        if added:
            allowed.append(f"methods added: {', '.join(added)}")
        if allowed:  # the existing summary belongs to the old config
            (folder / "summary.json").unlink(missing_ok=True)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if texts:
            run_folder.write_code(folder, texts)
        files.write_json(stored, new)
        (folder / "methods").mkdir(exist_ok=True)
        if experiment.graph is not None:
            write_graph(folder / GRAPH, experiment.graph, np.asarray(experiment.federation.client_ids))
    return allowed


def run_methods(
    experiment: Experiment,
    folder: Path,
    reporter: Reporter,
    trackers: Sequence[Tracker] = (),
    *,
    traced: bool = False,
    observe: Observer | None = None,
) -> dict[str, Any]:
    """Run every unfinished method, and write the summary.

    Args:
      experiment: experiment to run.
      folder: run folder, opened by `open_folder`.
      reporter: object whose methods are called with the run's progress.
      trackers: objects that receive every record, such as `TensorBoard`; none in processes other than the first.
      traced: whether to write a profiler trace to ``profile/METHOD``. The second call of each method's program is
        traced, because the first includes compilation.
      observe: function that is called after every evaluation.

    Returns:
      The summary, as in ``summary.json`` and ``--json``.

    Raises:
      Interrupted: after Ctrl-C or SIGTERM. Finished rounds are saved, and calling the function again continues the run.
      JaxpflError: if a method cannot be run, or a file cannot be read or written.
    """
    rounds = experiment.config.rounds
    tuning = processes.on_first(lambda: files.read_json(folder / "config.json")["config"]["plan"]["tuning"])
    if tuning != experiment.config.plan.tuning:
        experiment = experiment.with_tuning(tuning)
    done = processes.on_first(lambda: {name: results.finished(folder, name) for name in experiment.methods})
    kept = [name for name, result in done.items() if result and result["rounds"] == rounds]
    left = tuple(name for name in experiment.methods if name not in kept)
    try:
        with Interrupt() as interrupt, ExitStack() as stack, CompileClock() as clock:
            simulation_of = experiment.simulation
            # Nothing is compiled ahead if there are several processes, which must compile in the same order, or if the
            # run is traced, because a method's trace must not show the compilation of other methods.
            if processes.several():
                simulation_of = stack.enter_context(Ahead(experiment, (), left[-1] if left else None)).simulation
                # `Ahead` moves the examples to the devices; another reference would keep them in host memory.
                experiment = experiment.described()
            elif len(left) > 1 and not traced:
                simulation_of = stack.enter_context(Ahead(experiment, left)).simulation
            for name in experiment.methods:
                interrupt.saves = False
                if name in kept:
                    reporter.say(f"{name}: already finished")
                else:
                    try:
                        with end_trackers(trackers):
                            _run_method(
                                experiment,
                                simulation_of,
                                name,
                                folder,
                                reporter,
                                interrupt,
                                clock,
                                trackers,
                                traced,
                                observe,
                            )
                    except JaxpflError:
                        if processes.is_first():
                            run_folder.discard_unstarted(folder)
                        raise
        return processes.on_first(lambda: results.summarize(experiment, folder))
    except UnwritableError as error:
        stored = (folder / "config.json").exists()
        raise JaxpflError(f"{error}{'; --resume continues from the last checkpoint' * stored}") from None


def _run_method(
    experiment: Experiment,
    simulation_of: Callable[[str], Simulation],
    name: str,
    folder: Path,
    reporter: Reporter,
    interrupt: Interrupt,
    clock: CompileClock,
    trackers: Sequence[Tracker],
    traced: bool,
    observe: Observer | None,
) -> None:
    config, compiled_before = experiment.config, clock.seconds
    rounds = require(config.rounds)
    records = files.Records(folder / "metrics.jsonl")
    simulation = simulation_of(name)
    checkpoints = Checkpoints(folder / "checkpoints" / name) if processes.is_first() else None
    rounds_kept = [] if checkpoints is None else checkpoints.rounds()
    processes.on_first(lambda: simulation.keep_clients_in(folder / "clients" / name, rounds_kept))
    first = simulation.init(range(config.seed, config.seed + require(config.seeds)))
    state, seconds = restore(checkpoints, simulation, first, rounds, reporter.say)
    done = int(state.round[0])
    processes.on_first(lambda: records.keep(lambda record: record["method"] != name or _stands(record, done, config)))
    patience = None if config.patience is None else Patience(experiment, name, records, done)
    over = patience is not None and patience.over
    secret = simulation.algorithm.noise is not None and simulation.algorithm.noise.secret
    if secret and done < rounds and not over:
        if noise_keys.is_gone(state):
            raise JaxpflError(_refusal(done))
        reporter.say(f"{name}: until the run ends, {folder / 'checkpoints' / name} has the secret seed of the noise")
    uplink = results.Uplink(simulation, state) if simulation.algorithm.counts_bits else None

    def write(new: list[dict[str, Any]]) -> None:
        processes.on_first(lambda: records.append(new))
        for tracker in trackers:
            for record in new:
                tracker.add(record)

    for tracker in trackers:
        tracker.begin(name, done)
    reporter.start(name, 1, rounds, done)
    started = time.perf_counter() - clock.seconds - seconds

    def spent() -> float:
        """Return the seconds spent on the method so far, without compilation."""
        return time.perf_counter() - clock.seconds - started

    pace = Pace(config.plan.rounds_per_call)
    calls, loss, score, splits = 0, float("nan"), None, None
    histories: list[dict[str, np.ndarray]] = []
    for stop in milestones(done, rounds, config.eval_every, config.checkpoint_every):
        if over:
            break
        while done < stop and not interrupt.stop_signal():
            profiler = _trace(folder / "profile" / name) if traced and calls == 1 else nullcontext()
            with pace.call(stop - done) as length, profiler:
                state, history = simulation.advance(state, length)
            calls += 1
            interrupt.saves = True  # the first call compiles, and Ctrl-C then ends the process immediately
            if observe is not None:
                histories.append(history)
            history = history if uplink is None else uplink.along(history)
            by_round = [{metric: values[:, t] for metric, values in history.items()} for t in range(length)]
            write([{"kind": "round", "method": name, "round": done + t} | one for t, one in enumerate(by_round, 1)])
            done += length
            loss = float(np.mean(history.get("train_loss", np.full((1, 1), np.nan))[:, -1]))
            reporter.progress(done, loss, score)
        if done == stop and (done % config.eval_every == 0 or done == rounds):
            splits, record = _evaluate(experiment, simulation, state, name, done)
            if observe is not None:
                new = {key: np.concatenate([h[key] for h in histories], axis=1) for key in histories[0]}
                scores = splits["test"], splits.get("validation"), splits.get("attackers")
                observe(simulation, state, Evaluated(done, new, *scores))
                histories.clear()
            sent = {} if uplink is None else {"bits_up": uplink.bits}
            write([record | sent | {"seconds": spent()}])
            if patience is not None:
                patience.add(record)
                over = patience.over
            score = float(np.mean(record[experiment.headline.personalized]))
            reporter.progress(done, loss, score)
        asked = interrupt.stop_signal()  # a signal after this line is noticed at the next stop
        ended = done == rounds or over
        if asked or done % config.checkpoint_every == 0 or ended:
            kept = noise_keys.without_key(state) if secret and ended else state
            save(checkpoints, done, simulation, kept, spent())
        interrupt.saves = not ended
        if asked:
            break
    if secret and checkpoints is not None and (done == rounds or over):
        checkpoints.keep_only(done)
    if asked := interrupt.stop_signal():
        raise Interrupted(f"stopped {name} after round {done} of {rounds}", asked)
    if splits is None:  # an earlier process was killed after the last checkpoint, before it wrote the files below
        splits, _ = _evaluate(experiment, simulation, state, name, done)
    attackers = splits.get("attackers", {})
    scores = splits["test"] | {f"attackers_{which}": metrics for which, metrics in attackers.items()}
    if experiment.unseen is not None:
        scores |= _evaluate_unseen(simulation, state)
    times = spent(), clock.seconds - compiled_before
    results.write_method(folder, name, experiment, simulation, state, scores, times)


@contextmanager
def _trace(folder: Path) -> Iterator[None]:
    """Trace the ``with`` block with JAX's profiler, and write the trace into a folder."""
    with ExitStack() as stack:
        options = jax.profiler.ProfileOptions()
        # Events of Python calls would make the trace ten times as large and say nothing about the rounds.
        options.python_tracer_level = 0
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
            stack.callback(jax.profiler.stop_trace)
        except Exception as error:  # another profiler is active, or the driver does not allow profiling
            warn(f"--profile wrote no trace: {' '.join(str(error).split())}")
        yield


def _evaluate_unseen(simulation: Simulation, state: RunState) -> dict[str, dict[str, np.ndarray]]:
    """Evaluate the unseen clients, after ``adapt_rounds`` rounds and after as many rounds as a trained client had."""
    unseen = jax.tree.map(np.asarray, dict(simulation.evaluate_unseen(state)))
    scores = {f"unseen_{which}": metrics for which, metrics in unseen.items()}
    rounds = results.rounds_as_trained(simulation, state)
    if rounds is not None:
        scores["unseen_as_trained"] = jax.tree.map(np.asarray, dict(simulation.evaluate_unseen(state, rounds)["after"]))
    return scores


def _stands(record: dict[str, Any], done: int, config: RunConfig) -> bool:
    """Return whether a record is kept when the run is resumed after ``done`` rounds.

    If the run is resumed with more rounds, the evaluation after the earlier last round is dropped, unless the longer
    run also evaluates after that round.
    """
    if record["round"] > done:
        return False
    due = record["round"] % config.eval_every == 0 or record["round"] == config.rounds
    return record["kind"] == "round" or due


def _evaluate(
    experiment: Experiment, simulation: Simulation, state: RunState, name: str, done: int
) -> tuple[dict[Part, Any], dict[str, Any]]:
    """Return all scores as NumPy arrays, and the record of their means over clients (one value per seed)."""
    splits = jax.tree.map(np.asarray, simulation.evaluate_splits(state))
    record: dict[str, Any] = {"kind": "evaluation", "method": name, "round": done}
    labels = {"after": "personalized", "before": "personalized_before", "global": "global"}
    for which, metrics in splits["test"].items():
        for metric in experiment.task.metrics:
            record[f"{labels[which]}_{metric}"] = mean_over_clients(metrics[metric])
    if "validation" in splits:
        headline = experiment.headline
        record[headline.validation] = mean_over_clients(splits["validation"]["after"][headline.name])
    return splits, record


def _refusal(round: int) -> str:
    """Return the error message for a run whose secret noise seed was deleted after ``round``."""
    return f"privacy.noise_seed = secret: the seed was deleted after round {round}, so the run cannot continue"
