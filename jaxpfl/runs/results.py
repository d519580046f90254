"""Results of a run: the files of each finished method, and the summary."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from jaxpfl import __version__, data
from jaxpfl.data.sources import planted
from jaxpfl.data.sources.npz import read_npz
from jaxpfl.engine import RunState, Simulation
from jaxpfl.engine.evaluate import (
    ACCURACY,
    Headline,
    best_on_validation,
    example_weights,
    first_time,
    fraction_hurt,
    is_root,
    other_metrics,
    undefined,
    worst,
)
from jaxpfl.engine.evaluate import over_clients as statistics
from jaxpfl.privacy import noise
from jaxpfl.runs import run_folder
from jaxpfl.runs.config import RunConfig
from jaxpfl.runs.plots import figures
from jaxpfl.runs.setup import Experiment, Protection, protection_of, require
from jaxpfl.support import files, processes
from jaxpfl.support.console import save
from jaxpfl.support.errors import JaxpflError, warn

CLIENTS, _WHO = "clients.npz", ("client_ids", "client_names")
_ARRAYS = "arrays_sha256"
_Arrays: TypeAlias = dict[str, np.ndarray]
_ANEW = "delete {}, then --resume the run to recreate it from the checkpoint"


def finished(folder: Path, method: str) -> dict[str, Any] | None:
    """Return the stored results of a finished method, or None if the method is not finished.

    Raises:
      JaxpflError: if the file of the results has changed since it was written.
    """
    path = folder / "methods" / f"{method}.json"
    if not path.exists():
        return None
    return files.read_checksummed(path, _ANEW.format(path))


def write_method(
    folder: Path,
    name: str,
    experiment: Experiment,
    simulation: Simulation,
    state: RunState,
    scores: dict[str, dict[str, np.ndarray]],
    times: tuple[float, float],
) -> None:
    """Store the results of a finished method: per-client arrays and, last, the file that marks it as finished.

    Args:
      folder: run folder.
      name: name of the method.
      experiment: experiment of the run.
      simulation: simulation of the method.
      state: state after the last round.
      scores: clients' scores, as model -> metric -> [S, m].
      times: a pair of seconds: of execution without compilation, also before the run was resumed; and of compilation,
        only since the run was last started or resumed.
    """
    config, counts = experiment.config, simulation.counts(state)
    up, down = simulation.bytes_per_client()
    arrays = {f"{which}_{m}": v for which, metrics in scores.items() for m, v in metrics.items()}
    for name_of in ("participations", "uploads", "diverged", "dropped", "idle_rounds", "steps"):
        arrays[name_of] = getattr(counts, name_of)
    if simulation.algorithm.counts_bits:
        arrays["upload_bits"] = counts.upload_bits
    gradients = simulation.gradients(state)
    if gradients is not None:
        arrays |= {"gradients": gradients.training, "personalization_gradients": gradients.personalization}
    run, found = experiment.runs[name], simulation.clusters(state)
    protection = None if run.mechanism is None else protection_of(run, experiment.caveats)
    if found is not None:
        arrays["cluster"] = found
    seeds = counts.steps.shape[0]
    sizes: dict[str, Any] = {"bytes_up": up * int(counts.uploads.sum()) // seeds}
    if simulation.algorithm.counts_bits:  # uploads are compressed
        coded = int(counts.upload_bits.sum()) // (8 * seeds)
        sizes = {"bytes_up": coded, "bytes_up_uncoded": sizes["bytes_up"], "compress": str(config.compress)}
    stored = files.jsonable(
        {
            "rounds": config.rounds,
            "seconds": times[0],
            "compile_seconds": times[1],
            "privacy": None if protection is None else _privacy(protection, simulation),
            # Counts are averaged over seeds, because they differ between seeds if the size of a cohort is random.
            **sizes,
            "bytes_down": down * int(counts.participations.sum()) // seeds,
            "client_steps": int(counts.steps.sum()) // seeds,
            "gradients": _gradients(arrays),
            "unseen_rounds": None
            if experiment.unseen is None
            else {"adapted": config.adapt_rounds, "as_trained": rounds_as_trained(simulation, state)},
            "clusters": None if found is None else [len(np.unique(of_run)) for of_run in found],
            "rand_index": None if found is None else rand_index(experiment, found),
            "lost_uploads": int(counts.dropped.sum()) // seeds,
            "idle_rounds": int(counts.idle_rounds.sum()) // seeds,
            "diverged_clients": int(((counts.diverged > 0) | scores["after"]["diverged"]).any(axis=0).sum()),
        }
    )
    if config.patience is not None:
        done = int(np.ravel(np.asarray(state.round))[0])
        stored["stopped_after"] = done if done < require(config.rounds) else None
    if run.spec.is_robust and run.spec.method.uploads:
        stored["aggregate"] = run.spec.aggregate
    if simulation.attackers is not None:
        ids = np.asarray(experiment.federation.client_ids)[simulation.attackers]
        stored |= {"attack": run.spec.attack, "attackers": ids.tolist()}

    def store() -> None:
        path = folder / "methods" / f"{name}.npz"
        with files.whole(path, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        stored[_ARRAYS] = hashlib.sha256(files.contents(path)).hexdigest()
        files.write_checksummed(path.with_suffix(".json"), stored)

    processes.on_first(store)


def rounds_as_trained(simulation: Simulation, state: RunState) -> int | None:
    """Return the mean number of rounds in which a trained client took part, rounded to an integer.

    The mean is over clients and seeds. Return None for a method that trains on the pooled examples.
    """
    if simulation.algorithm.pooled:
        return None
    return round(float(np.mean(simulation.counts(state).participations)))


def _gradients(arrays: dict[str, np.ndarray]) -> dict[str, Any] | None:
    """Return the mean, minimum and maximum number of gradient evaluations per client, over clients and seeds.

    The entries are ``training``, ``personalization`` (for one personalized model), ``unseen`` (for an unseen client's
    rounds of adaptation) and ``unseen_as_trained`` (for an unseen client with as many rounds as a trained client).
    Return None if the method does not count gradient evaluations (`protocol.Gradients`).
    """
    names = {
        "training": "gradients",
        "personalization": "personalization_gradients",
        "unseen": "unseen_after_gradients",
        "unseen_as_trained": "unseen_as_trained_gradients",
    }
    if "gradients" not in arrays:
        return None
    found = {what: arrays.get(name) for what, name in names.items()}
    return {
        what: None if of is None else {"mean": float(of.mean()), "min": int(of.min()), "max": int(of.max())}
        for what, of in found.items()
    }


def _privacy(protection: Protection, simulation: Simulation) -> dict[str, Any]:
    """Return the entry ``privacy`` of a method's results: the guarantee and the mechanism."""
    mechanism, statement = protection
    if statement is not None and statement.cut:
        statement = statement._replace(cut=simulation.remembers())
    claim = {"epsilon": None} if statement is None else statement._asdict() | {"says": str(statement)}
    return claim | {"mechanism": dataclasses.asdict(mechanism)}


def read_arrays(folder: Path, method: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read the stored results of a finished method, and its arrays.

    Raises:
      JaxpflError: if either file is missing or damaged.
    """
    path = folder / "methods" / f"{method}.npz"
    said = path.with_suffix(".json")
    stored = finished(folder, method)
    if stored is None:
        raise JaxpflError(f"{said} is missing: --resume the run to recreate it from the checkpoint")
    content = files.contents(path) if path.exists() else b""
    if stored.pop(_ARRAYS, None) != hashlib.sha256(content).hexdigest():
        raise JaxpflError(f"{path} is damaged or missing: {_ANEW.format(said)}")
    return stored, read_npz(path)


def read_clients(folder: Path) -> dict[str, np.ndarray]:
    """Read the clients' ids, and their names if known, from ``clients.npz``, as arrays by name.

    The result is empty if the file does not exist.
    """
    path = folder / CLIENTS
    return read_npz(path, (*_WHO, "unseen_client_names")) if path.exists() else {}


def summarize(experiment: Experiment, folder: Path) -> dict[str, Any]:
    """Collect the results of all methods, and write ``clients.npz``, the plots and, last, ``summary.json``.

    Returns:
      The content of ``summary.json``.
    """
    config = experiment.config
    stored: dict[str, dict[str, Any]] = {}
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for name in experiment.methods:
        stored[name], arrays[name] = read_arrays(folder, name)
    records = files.Records(folder / "metrics.jsonl").read()
    lost = [name for name in stored if any(count_missing(records, name, stored[name], config).values())]
    if lost:
        warn(f"{folder / 'metrics.jsonl'} lacks rounds of {', '.join(lost)}: the plots over rounds leave them out")
    headline = experiment.headline
    local = arrays["local"][f"after_{headline.name}"] if "local" in arrays else None
    parts = {"": experiment.federation, "unseen_": experiment.unseen}
    of_clients = {f"{of}{name}": getattr(part, name, None) for of, part in parts.items() for name in _WHO}
    who = {name: np.array(values) for name, values in of_clients.items() if values is not None}
    methods = {}
    for name, scores in arrays.items():
        own = [r for r in records if r["method"] == name]
        evaluations = [r for r in own if r["kind"] == "evaluation"]
        methods[name] = _row(experiment, scores, who, local, evaluations) | stored[name]
        if config.time_model is not None:
            methods[name] |= _times(own, config, headline)
        if stored[name]["privacy"]:
            methods[name] |= _clipping(own, stored[name], experiment)
        methods[name].pop("rounds")
    flat = {f"{name}/{key}": v for name, scores in arrays.items() for key, v in scores.items()}
    with files.whole(folder / CLIENTS, "wb") as file:
        np.savez(file, allow_pickle=False, **who, **flat)
    for name, figure in figures(records, arrays, headline, who).items():
        save(figure, folder / "plots", name)
    result = {
        "methods": methods,
        "rounds": config.rounds,
        "seeds": list(range(config.seed, config.seed + require(config.seeds))),
        "clients": experiment.federation.num_clients,
        "cohort": config.cohort,
        **({} if experiment.class_names is None else {"class_names": experiment.class_names.tolist()}),
        **({} if config.time_to is None else {"time_to": config.time_to}),
        "run_dir": str(folder),
        "version": __version__,
    }
    if any((row["privacy"] or {}).get("epsilon") for row in methods.values()):
        result["not_covered"] = run_folder.uncovered(folder)
    if experiment.constant is not None:
        (prediction, own), names = experiment.constant, experiment.class_names
        unscored = np.isnan(next(iter(arrays.values()))[f"after_{headline.name}"]).all(axis=0)  # such as attackers
        over = statistics(np.where(unscored, np.nan, own), lower=headline.lower)
        result["constant"] = {"prediction": prediction if names is None else names[prediction], **over}
    if headline != ACCURACY:
        result |= {"task": experiment.task.kind, "metric": headline.name, "lower_is_better": headline.lower}
    files.write_json(folder / "summary.json", result)
    return files.jsonable(result)


def count_missing(
    records: Iterable[Mapping[str, Any]], method: str, stored: Mapping[str, Any], config: RunConfig
) -> dict[str, int]:
    """Count the rounds and evaluations of a finished method that are missing from a run's records.

    Args:
      records: records in ``metrics.jsonl``.
      method: name of the method.
      stored: stored results of the method.
      config: config of the run.

    Returns:
      The numbers of missing records, by kind (``round`` and ``evaluation``).
    """
    last = stored.get("stopped_after") or stored["rounds"]
    held = {(one["kind"], one["round"]) for one in records if one["method"] == method and 1 <= one["round"] <= last}
    due = {("evaluation", round) for _, round in held if round % config.eval_every == 0 or round == last}
    evaluations = -(-last // config.eval_every)
    return {
        "round": last - sum(kind == "round" for kind, _ in held),
        "evaluation": evaluations - len(due & held),
    }


def _clipping(records: list[dict[str, Any]], stored: dict[str, Any], experiment: Experiment) -> dict[str, str | None]:
    """Return the entry ``clipping_remark`` of a private method's summary; empty if there is nothing to remark.

    The remark compares the unclipped uploads' norms with the clipping norm.
    """
    rounds = [r for r in records if {"upload_norm", "clipping_norm"} <= r.keys()]
    if not rounds or not stored["privacy"].get("epsilon"):
        return {}
    norms, limits = (np.array([r[name] for r in rounds], float).T for name in ("upload_norm", "clipping_norm"))
    text = noise.remark(norms, limits, experiment.federation.num_clients)
    return {} if text is None else {"clipping_remark": text}


def _times(records: list[dict[str, Any]], config: RunConfig, headline: Headline) -> dict[str, Any]:
    """Return a method's simulated seconds in the whole run, and until an evaluation first reaches ``time_to``.

    Each entry has a value per seed [S]. The result is empty unless there are records of round 1 and of all rounds up to
    the last recorded round.
    """
    rounds = sorted((r for r in records if r["kind"] == "round" and "round_seconds" in r), key=lambda r: r["round"])
    if not rounds or [r["round"] for r in rounds] != list(range(1, len(rounds) + 1)):
        return {}
    seconds = np.cumsum(np.array([r["round_seconds"] for r in rounds], float), axis=0)
    told: dict[str, Any] = {"simulated_seconds": seconds[-1].tolist()}
    scored = [r for r in records if r["kind"] == "evaluation" and r["round"] <= len(rounds)]
    if config.time_to is not None and scored:
        scores = np.array([r[headline.personalized] for r in scored], float)
        at = seconds[[r["round"] - 1 for r in scored]]
        told["seconds_to"] = first_time(scores, at, config.time_to, lower=headline.lower)
    return told


def _row(
    experiment: Experiment, scores: _Arrays, who: _Arrays, local: np.ndarray | None, evaluations: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the summary of one method: statistics of its scores over clients and seeds.

    Args:
      experiment: experiment of the run.
      scores: arrays of the method's .npz file.
      who: ids of the clients, and their names if they are known, as in ``clients.npz``.
      local: clients' scores under local training [S, m]; None if the run does not include the method ``local``.
      evaluations: records of the method's evaluations.
    """
    headline, unseen = experiment.headline, experiment.unseen
    name, lower, root = headline.name, headline.lower, is_root(experiment.task, headline.name)
    examples = np.asarray(experiment.federation.test.size)
    sizes = example_weights(experiment.federation.test, experiment.task.kind)
    unseen_sizes = None if unseen is None else example_weights(unseen.test, experiment.task.kind)

    def over_clients(which: str) -> dict[str, float | None] | None:
        found, of = scores.get(f"{which}_{name}"), unseen_sizes if which.startswith("unseen") else sizes
        return None if found is None else statistics(found, lower=lower, sizes=of, root=root)

    row: dict[str, Any] = {
        f"personalized_{name}": over_clients("after"),
        f"personalized_before_{name}": over_clients("before"),
        f"global_{name}": over_clients("global"),
        **({f"attackers_{name}": over_clients("attackers_after")} if f"attackers_after_{name}" in scores else {}),
        f"unseen_{name}": over_clients("unseen_after"),
        f"unseen_as_trained_{name}": over_clients("unseen_as_trained"),
        f"unseen_before_{name}": over_clients("unseen_before"),
        "fraction_hurt": None if local is None else fraction_hurt(scores[f"after_{name}"], local, lower=lower),
    }
    if "client_names" in who:
        row["worst_clients"] = worst(scores[f"after_{name}"], who, headline)
        row["hurt_clients"] = [] if local is None else worst(scores[f"after_{name}"], who, headline, local)
    if left_out := undefined(scores, name, examples):
        row["undefined"] = left_out
    if others := other_metrics(scores, headline, sizes, experiment.task, examples):
        row["metrics"] = others
    evaluations = [r for r in evaluations if {headline.validation, headline.personalized} <= r.keys()]
    if evaluations:
        rounds = [record["round"] for record in evaluations]
        validation, test = (
            np.array([record[name] for record in evaluations], dtype=float)
            for name in (headline.validation, headline.personalized)
        )
        row["best_on_validation"] = best_on_validation(rounds, validation, test, headline, experiment.config.patience)
    return row


def client_clusters(config: RunConfig, num_classes: int) -> np.ndarray | None:
    """Return the true cluster of each client, indexed by client id; None if the clients have no true clusters.

    Clients have true clusters with the partition "clusters", and with planted data if every user is a client.

    Args:
      config: resolved config.
      num_classes: number of classes of the data set.
    """
    if config.partition == "clusters":
        clients = require(config.clients) + config.clients_apart
        return data.true_clusters(clients, require(config.clusters), num_classes, config.split_seed).member
    drawn = config.data.partition(":")[0] == "planted" and config.partition == "natural"
    if drawn and config.clients is None and config.users_per_client in (None, 1):
        return planted.draw_planted(planted.parse(config.data)).member
    return None


def rand_index(experiment: Experiment, found: np.ndarray) -> list[float] | None:
    """Return the adjusted Rand index between the found and the true clusters for each seed.

    Args:
      experiment: experiment of the run.
      found: cluster of each client [S, m].

    Returns:
      S values; None if the clients have no true clusters.
    """
    truth = client_clusters(experiment.config, experiment.task.num_classes)
    if truth is None:
        return None
    from sklearn.metrics import adjusted_rand_score

    own = truth[np.asarray(experiment.federation.client_ids)]
    return [float(adjusted_rand_score(own, clusters)) for clusters in found]


class Uplink:
    """Running total of the bits that all clients have uploaded, for a run with compressed uploads.

    Attributes:
      bits: total since the first round, [S] int64.
    """

    def __init__(self, simulation: Simulation, state: RunState):
        self.bits: np.ndarray = simulation.counts(state).upload_bits.sum(axis=1)

    def along(self, history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the next T rounds' history, extended by ``bits_up`` [S, T]: the running total after each round."""
        bits = self.bits[:, None] + np.cumsum(history["upload_bits"], axis=1)
        self.bits = bits[:, -1]
        return history | {"bits_up": bits}
