"""Running methods into a run folder: records, checkpoints, per-client scores, and a summary, written last.

Only one run at a time may do so, which `run_folder.lock` around `open_folder` and `run_methods` ensures. Of several
processes of one run the first reads and writes the folder; all of them call `run_methods`.

A run folder holds ``config.json`` (complete: rerunning it gives the same results), ``metrics.jsonl``, ``methods/`` (one
file pair per finished method), ``checkpoints/``, ``clients.npz``, ``plots/`` and ``summary.json``; if a method needs
one, ``graph.csv`` with the clients' neighbours; ``clients/`` if clients live on disk; on request, ``profile/``,
``tensorboard/`` and ``wandb/``. Only a folder with ``summary.json`` is a complete run.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from jaxpfl import __version__
from jaxpfl.engine import RunState, Simulation, noise_keys
from jaxpfl.engine.evaluate import mean_over_clients, milestones
from jaxpfl.runs import results, run_folder
from jaxpfl.runs.checkpoint import Checkpoints, restore, save
from jaxpfl.runs.config import RunConfig, differences, to_json
from jaxpfl.runs.control import Ahead, CompileClock, Interrupt, Interrupted, Pace, Patience
from jaxpfl.runs.run_folder import GRAPH
from jaxpfl.runs.setup import Experiment, has_checksum, require, write_graph
from jaxpfl.runs.stored_run import read_record
from jaxpfl.runs.tracking import Tracker, end_trackers
from jaxpfl.support import files, processes
from jaxpfl.support.errors import JaxpflError, UnwritableError, warn, writing


class Reporter(Protocol):
    """Receiver of a run's progress."""

    def start(self, method: str, done: int, rounds: int) -> None: ...
    def progress(self, round: int, loss: float, score: float | None) -> None: ...
    def finish(self, method: str) -> None: ...
    def say(self, text: str) -> None: ...


_FIXED = {
    "warm_start": "the parameters of --warm-start have changed",
    "noise": "an older version drew its noise differently",
    "orders": "another version drew clients' examples in another order",
}
"""Entries of ``config.json`` that a resumed run may not change, with the reason."""


def open_folder(folder: Path, experiment: Experiment, *, resume: bool, force: bool = False) -> list[str]:
    """Create the run folder, or reopen an earlier one; with ``force``, replace an earlier one.

    Returns:
      Permitted changes of a resumed run: ``name: old -> new``.

    Raises:
      JaxpflError: if the folder cannot be written, holds a run and ``resume`` is false, holds another experiment, or
        holds none and ``resume`` is true, or would give way to ``force`` and holds more than a run.
    """
    stored = folder / "config.json"
    run_folder.check_place(folder, stored.name, "run", run_folder.RUN_PARTS, resume=resume, force=force)
    if force and stored.exists():
        read_record(stored)  # a file of that name may be anyone's
        run_folder.clear(folder, stored.name, run_folder.RUN_PARTS)
    allowed = []
    methods = experiment.methods
    new = {
        "methods": list(methods),
        "config": to_json(experiment.config),
        **experiment.fingerprint(),
        "versions": {"jaxpfl": __version__, "jax": jax.__version__, "platform": jax.default_backend()},
    }
    if stored.exists():
        old = read_record(stored)
        semantic, allowed = differences(old["config"], new["config"])
        dropped = [name for name in old["methods"] if name not in methods]
        added = [name for name in methods if name not in old["methods"]]
        if dropped:
            semantic.append(f"methods: {', '.join(old['methods'])} -> {', '.join(methods)}")
        if not has_checksum(old["data"], experiment.federation, experiment.unseen):
            semantic.append("the data have changed")
        semantic += [reason for name, reason in _FIXED.items() if old.get(name) != new[name]]
        if old.get("graph") not in (None, new["graph"]):
            semantic.append("the graph of the clients has changed")
        for name in set(methods) & old["hyper"].keys():
            if old["hyper"][name] != new["hyper"][name]:
                semantic.append(f"{name}: {old['hyper'][name]} -> {new['hyper'][name]}")
        if experiment.config.privacy.noise_seed == "secret":
            semantic += [
                f"{name}: {_refusal(done['rounds'])}"
                for name in old["methods"]
                if (done := results.finished(folder, name)) and done["rounds"] != experiment.config.rounds
            ]
        if semantic:
            raise JaxpflError(f"--resume would change the experiment in {folder}: {'; '.join(semantic)}")
        if old.get("versions") != new["versions"]:
            was = old.get("versions")
            allowed.append(f"versions (numbers may differ in the last bits): {was} -> {new['versions']}")
        if added:
            allowed.append(f"methods added: {', '.join(added)}")
        if allowed:  # the old summary belongs to another config
            (folder / "summary.json").unlink(missing_ok=True)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
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
) -> dict[str, Any]:
    """Run every unfinished method, and summarise.

    Args:
      experiment: the run.
      folder: folder of the run, as `open_folder` made it.
      reporter: receives the progress.
      trackers: receive every record too.
      traced: write a trace of each method's second call of rounds, the first that does not compile, to
        ``profile/METHOD``.

    Returns:
      The summary, as in ``summary.json`` and ``--json``.

    Raises:
      Interrupted: after Ctrl-C; finished rounds are kept, and the same call resumes it.
    """
    rounds = experiment.config.rounds
    done = processes.on_first(lambda: {name: results.finished(folder, name) for name in experiment.methods})
    kept = [name for name, result in done.items() if result and result["rounds"] == rounds]
    # Processes do all in one order, and a trace holds one method alone.
    left = tuple(name for name in experiment.methods if name not in kept)
    several = processes.several()
    ahead = Ahead(experiment, () if several or traced else left, left[-1] if several and left else None)
    if several:  # each process keeps the examples on its own devices
        experiment = experiment.described()
    try:
        with Interrupt() as interrupt, ahead, CompileClock() as clock:
            for name in experiment.methods:
                interrupt.saves = False
                if name in kept:
                    reporter.say(f"{name}: already finished")
                else:
                    try:
                        with end_trackers(trackers) if trackers else nullcontext():
                            _run_method(experiment, ahead, name, folder, reporter, interrupt, clock, trackers, traced)
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
    ahead: Ahead,
    name: str,
    folder: Path,
    reporter: Reporter,
    interrupt: Interrupt,
    clock: CompileClock,
    trackers: Sequence[Tracker],
    traced: bool,
) -> None:
    config, compiled_before = experiment.config, clock.seconds
    rounds = require(config.rounds)
    records = files.Records(folder / "metrics.jsonl")
    simulation = ahead.simulation(name)
    checkpoints = Checkpoints(folder / "checkpoints" / name) if processes.is_first() else None
    rounds_kept = [] if checkpoints is None else checkpoints.rounds()
    processes.on_first(lambda: simulation.keep_clients_in(folder / "clients" / name, rounds_kept))
    first = simulation.init(range(config.seed, config.seed + require(config.seeds)))
    state, seconds = restore(checkpoints, simulation, first, rounds, reporter.say)
    done = int(state.round[0])
    processes.on_first(lambda: records.keep(lambda record: record["method"] != name or _stands(record, done, config)))
    patience = Patience(experiment, name, records, done)
    secret = simulation.algorithm.noise is not None and simulation.algorithm.noise.secret
    if secret and done < rounds and not patience.over:
        if noise_keys.is_gone(state):
            raise JaxpflError(_refusal(done))
        reporter.say(f"{name}: until the run ends, {folder / 'checkpoints' / name} holds the secret seed of the noise")
    uplink = results.Uplink(simulation, state) if simulation.algorithm.counts_bits else None

    def write(new: list[dict[str, Any]]) -> None:
        processes.on_first(lambda: records.append(new))
        if processes.is_first():
            for tracker, record in itertools.product(trackers, new):
                tracker.add(record)

    if processes.is_first():
        for tracker in trackers:
            tracker.begin(name, done)
    reporter.start(name, done, rounds)
    started = time.perf_counter() - clock.seconds - seconds

    def spent() -> float:
        """Seconds without compiling."""
        return time.perf_counter() - clock.seconds - started

    pace = Pace(config.plan.rounds_per_call)
    calls, loss, score, scores = 0, float("nan"), None, None
    for stop in milestones(done, rounds, config.eval_every, config.checkpoint_every):
        if patience.over:
            break
        while done < stop and not interrupt.stop_signal():
            profiler = _trace(folder / "profile" / name) if traced and calls == 1 else nullcontext()
            with pace.call(stop - done) as length, profiler:
                state, history = simulation.advance(state, length)
            calls += 1
            interrupt.saves = True  # before, it compiled
            write(_round_records(name, done, history if uplink is None else uplink.along(history)))
            done += length
            loss = float(np.mean(history.get("train_loss", np.full((1, 1), np.nan))[:, -1]))
            reporter.progress(done, loss, score)
        if done == stop and (done % config.eval_every == 0 or done == rounds):
            scores, record = _evaluate(experiment, simulation, state, name, done)
            sent = {} if uplink is None else {"bits_up": uplink.bits}
            write([record | sent | {"seconds": spent()}])
            patience.add(record)
            score = float(np.mean(record[experiment.headline.personalized]))
            reporter.progress(done, loss, score)
        asked = interrupt.stop_signal()  # a later signal finds its rounds saved at the next stop
        ended = done == rounds or patience.over
        if asked or done % config.checkpoint_every == 0 or ended:
            kept = noise_keys.without_key(state) if secret and ended else state
            save(checkpoints, done, simulation, kept, spent())
        interrupt.saves = not ended
        if asked:
            break
    if asked := interrupt.stop_signal():
        raise Interrupted(f"stopped {name} after round {done} of {rounds}", asked)
    if secret and checkpoints is not None:
        checkpoints.keep_only(done)
    if scores is None:  # killed between the last checkpoint and the files below
        scores, _ = _evaluate(experiment, simulation, state, name, done)
    if experiment.unseen is not None:
        scores |= _evaluate_unseen(simulation, state)
    if simulation.attackers is not None:
        apart = jax.tree.map(np.asarray, dict(simulation.evaluate(state, attackers=True)))
        scores |= {f"attackers_{which}": metrics for which, metrics in apart.items()}
    times = spent(), clock.seconds - compiled_before
    results.write_method(folder, name, experiment, simulation, state, scores, times)
    reporter.finish(name)


@contextmanager
def _trace(folder: Path) -> Iterator[None]:
    """Trace the block by JAX's profiler, into a folder."""
    with ExitStack() as stack:
        options = jax.profiler.ProfileOptions()
        # Python calls would be ten times the rest, and tell nothing about the rounds.
        options.python_tracer_level = 0
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
            stack.callback(jax.profiler.stop_trace)
        except Exception as error:  # another profiler is at work, or a driver refuses
            warn(f"--profile wrote no trace: {' '.join(str(error).split())}")
        yield


def _evaluate_unseen(simulation: Simulation, state: RunState) -> dict[str, dict[str, np.ndarray]]:
    """Scores of the unseen clients, after their rounds of adaptation and after as many as a trained client took."""
    unseen = jax.tree.map(np.asarray, dict(simulation.evaluate_unseen(state)))
    scores = {f"unseen_{which}": metrics for which, metrics in unseen.items()}
    rounds = results.rounds_as_trained(simulation, state)
    if rounds is not None:
        scores["unseen_as_trained"] = jax.tree.map(np.asarray, dict(simulation.evaluate_unseen(state, rounds)["after"]))
    return scores


def _stands(record: dict[str, Any], done: int, config: RunConfig) -> bool:
    """True if a record belongs to a run resumed after ``done`` rounds.

    The evaluation at the end of a shorter run does not, unless the longer run has it too.
    """
    if record["round"] > done:
        return False
    due = record["round"] % config.eval_every == 0 or record["round"] == config.rounds
    return record["kind"] == "round" or due


def _round_records(name: str, before: int, history: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    rounds = next(iter(history.values())).shape[1]
    return [
        {"kind": "round", "method": name, "round": before + t + 1}
        | {metric: values[:, t] for metric, values in history.items()}
        for t in range(rounds)
    ]


def _evaluate(
    experiment: Experiment, simulation: Simulation, state: RunState, name: str, done: int
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
    """Per-client scores, and the record of their means over clients, one value per seed."""
    scores = jax.tree.map(np.asarray, dict(simulation.evaluate(state)))
    record: dict[str, Any] = {"kind": "evaluation", "method": name, "round": done}
    labels = {"after": "personalized", "before": "personalized_before", "global": "global"}
    for which, metrics in scores.items():
        for metric in experiment.task.metrics:
            record[f"{labels[which]}_{metric}"] = mean_over_clients(metrics[metric])
    if experiment.federation.validation.capacity:
        headline = experiment.headline
        validation = simulation.evaluate(state, "validation")["after"][headline.name]
        record[headline.validation] = mean_over_clients(np.asarray(validation))
    return scores, record


def _refusal(round: int) -> str:
    """Error message for continuing a run with secret noise that ended at that round."""
    return f"privacy.noise_seed = secret: the seed was deleted after round {round}, so the run cannot continue"
