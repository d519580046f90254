"""Results of a run: a finished method's files, and the summary of all methods."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl import __version__, data
from jaxpfl.data.sources import planted
from jaxpfl.data.sources.npz import read_npz
from jaxpfl.engine import RunState, Simulation
from jaxpfl.engine.evaluate import example_weights, first_time, is_root
from jaxpfl.engine.state import Counts
from jaxpfl.privacy import noise
from jaxpfl.runs.config import RunConfig
from jaxpfl.runs.scores import ACCURACY, Headline, best_on_validation, fraction_hurt, other_metrics, undefined
from jaxpfl.runs.scores import over_clients as statistics
from jaxpfl.runs.setup import Experiment, Protection, require
from jaxpfl.support import files, processes
from jaxpfl.support.errors import JaxpflError, warn

_ARRAYS = "arrays_sha256"
_ANEW = "delete {}, then --resume the run to recreate it from the checkpoint"


def finished(folder: Path, method: str) -> dict[str, Any] | None:
    """Stored results of a finished method; None for one that is not finished.

    Raises:
      JaxpflError: if they were changed since.
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
    """Store a finished method: per-client arrays and, last, the file that marks it as finished.

    ``times`` are the seconds without compiling, and the seconds of compiling since the run was last started.
    """
    counts = simulation.counts(state)
    _, down = simulation.bytes_per_client()
    arrays = {f"{which}_{m}": v for which, metrics in scores.items() for m, v in metrics.items()}
    for name_of in ("participations", "uploads", "diverged", "dropped", "idle_rounds", "steps"):
        arrays[name_of] = getattr(counts, name_of)
    if simulation.algorithm.counts_bits:
        arrays["upload_bits"] = counts.upload_bits
    gradients = simulation.gradients(state)
    if gradients is not None:
        arrays |= {"gradients": gradients.training, "personalization_gradients": gradients.personalization}
    protection, found = experiment.protection(name), simulation.clusters(state)
    if found is not None:
        arrays["cluster"] = found
    runs = counts.steps.shape[0]
    stored = files.jsonable(
        {
            "rounds": experiment.config.rounds,
            **stopped_after(state, experiment.config),
            "seconds": times[0],
            "compile_seconds": times[1],
            "privacy": None if protection is None else _privacy(protection, simulation),
            # Means over the runs: a run's clients differ where cohorts are random in size.
            **upload_sizes(simulation, counts, str(experiment.config.compress)),
            "bytes_down": down * int(counts.participations.sum()) // runs,
            "client_steps": int(counts.steps.sum()) // runs,
            "gradients": _gradients(arrays),
            "unseen_rounds": None
            if experiment.unseen is None
            else {"adapted": experiment.config.adapt_rounds, "as_trained": rounds_as_trained(simulation, state)},
            "clusters": None if found is None else [len(np.unique(of_run)) for of_run in found],
            "rand_index": None if found is None else rand_index(experiment, found),
            **_attackers(experiment, name, simulation),
            "lost_uploads": int(counts.dropped.sum()) // runs,
            "idle_rounds": int(counts.idle_rounds.sum()) // runs,
            "diverged_clients": int(((counts.diverged > 0) | scores["after"]["diverged"]).any(axis=0).sum()),
        }
    )
    processes.on_first(lambda: _store(folder / "methods" / f"{name}.npz", arrays, stored))


def stopped_after(state: RunState, config: RunConfig) -> dict[str, int | None]:
    """Entry of a run with ``patience``: the round after which it ended early, or None."""
    if config.patience is None:
        return {}
    done = int(np.ravel(np.asarray(state.round))[0])
    return {"stopped_after": done if done < require(config.rounds) else None}


def _attackers(experiment: Experiment, name: str, simulation: Simulation) -> dict[str, Any]:
    """The aggregation and the attack of a method, if it has them, with the ids of the attackers."""
    spec = experiment.runs[name].spec
    told: dict[str, Any] = {}
    if spec.is_robust and spec.method.uploads:
        told["aggregate"] = spec.aggregate
    if simulation.attackers is not None:
        ids = np.asarray(experiment.federation.client_ids)[simulation.attackers]
        told |= {"attack": spec.attack, "attackers": ids.tolist()}
    return told


def _store(path: Path, arrays: dict[str, np.ndarray], stored: dict[str, Any]) -> None:
    with files.whole(path, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    stored[_ARRAYS] = hashlib.sha256(files.contents(path)).hexdigest()
    files.write_checksummed(path.with_suffix(".json"), stored)


def rounds_as_trained(simulation: Simulation, state: RunState) -> int | None:
    """Rounds in which a trained client took part, averaged over clients and runs and rounded; None for pooled
    examples.
    """
    if simulation.algorithm.pooled:
        return None
    return round(float(np.mean(simulation.counts(state).participations)))


def _gradients(arrays: dict[str, np.ndarray]) -> dict[str, Any] | None:
    """Gradient evaluations (`protocol.Gradients`) of a client, over clients and runs; None if the method counts none.

    They are separate for training, for one personalised model, for an unseen client's rounds of adaptation, and for as
    many rounds as a trained client took.
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
    """Privacy statement of a method."""
    mechanism, statement = protection
    if statement is not None and statement.cut:
        statement = statement._replace(cut=simulation.remembers())
    claim = {"epsilon": None} if statement is None else statement._asdict() | {"says": str(statement)}
    return claim | {"mechanism": dataclasses.asdict(mechanism)}


def read_arrays(folder: Path, method: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Stored results of a finished method, and its arrays."""
    path = folder / "methods" / f"{method}.npz"
    said = path.with_suffix(".json")
    stored = finished(folder, method)
    if stored is None:
        raise JaxpflError(f"{said} is missing: --resume the run to recreate it from the checkpoint")
    content = files.contents(path) if path.exists() else b""
    if stored.pop(_ARRAYS, None) != hashlib.sha256(content).hexdigest():
        raise JaxpflError(f"{path} is damaged or missing: {_ANEW.format(said)}")
    return stored, read_npz(path)


def summarize(experiment: Experiment, folder: Path) -> dict[str, Any]:
    """Gather the finished methods, and write ``clients.npz``, the plots and, last, ``scores.json``."""
    config = experiment.config
    stored: dict[str, dict[str, Any]] = {}
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for name in experiment.methods:
        stored[name], arrays[name] = read_arrays(folder, name)
    records = files.Records(folder / "metrics.jsonl").read()
    lost = [name for name in stored if any(count_missing(records, name, stored[name], config).values())]
    if lost:
        warn(f"{folder / 'metrics.jsonl'} has lost rounds of {', '.join(lost)}: plots over rounds omit them")
    headline = experiment.headline
    local = arrays["local"][f"after_{headline.name}"] if "local" in arrays else None
    methods = {}
    for name, scores in arrays.items():
        own = [r for r in records if r["method"] == name]
        methods[name] = _row(experiment, scores, local, [r for r in own if r["kind"] == "evaluation"]) | stored[name]
        if config.time_model is not None:
            methods[name] |= _times(own, config, headline)
        if stored[name]["privacy"]:
            methods[name] |= _clipping(own, stored[name], experiment)
        methods[name].pop("rounds")
    flat = {f"{name}/{key}": v for name, scores in arrays.items() for key, v in scores.items()}
    with files.whole(folder / "clients.npz", "wb") as file:
        ids = {"client_ids": np.asarray(experiment.federation.client_ids)}
        if experiment.unseen is not None:
            ids["unseen_client_ids"] = np.asarray(experiment.unseen.client_ids)
        np.savez(file, allow_pickle=False, **ids, **flat)
    from jaxpfl.runs.plots import write_plots

    write_plots(folder / "plots", records, arrays, headline)
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
    if headline != ACCURACY:
        result |= {"task": experiment.task.kind, "metric": headline.name, "lower_is_better": headline.lower}
    files.write_json(folder / "summary.json", result)
    return files.jsonable(result)


def count_missing(
    records: Iterable[Mapping[str, Any]], method: str, stored: Mapping[str, Any], config: RunConfig
) -> dict[str, int]:
    """Numbers of rounds and evaluations that a run's records lack of a finished method."""
    last = stored.get("stopped_after") or stored["rounds"]
    held = {(one["kind"], one["round"]) for one in records if one["method"] == method and 1 <= one["round"] <= last}
    due = {("evaluation", round) for _, round in held if round % config.eval_every == 0 or round == last}
    evaluations = -(-last // config.eval_every)
    return {
        "round": last - sum(kind == "round" for kind, _ in held),
        "evaluation": evaluations - len(due & held),
    }


def _clipping(records: list[dict[str, Any]], stored: dict[str, Any], experiment: Experiment) -> dict[str, str | None]:
    """Remark on the clipping norm of a method whose uploads get noise; empty without one."""
    rounds = [r for r in records if {"upload_norm", "clipping_norm"} <= r.keys()]
    if not rounds or not stored["privacy"].get("epsilon"):
        return {}
    norms, limits = (np.array([r[name] for r in rounds], float).T for name in ("upload_norm", "clipping_norm"))
    text = noise.remark(norms, limits, experiment.federation.num_clients)
    return {} if text is None else {"clipping_remark": text}


def _times(records: list[dict[str, Any]], config: RunConfig, headline: Headline) -> dict[str, Any]:
    """Simulated seconds of one method's runs, in all and until the score ``time_to`` is first evaluated, [S] each.

    Empty where rounds are missing from the records.
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
    experiment: Experiment, scores: dict[str, np.ndarray], local: np.ndarray | None, evaluations: list[dict[str, Any]]
) -> dict[str, Any]:
    """One method's statistics over clients and seeds; ``local`` has each client's score under local training, if it
    ran.
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
    """True cluster of each client of a resolved config, by id; None if the split has none.

    It has clusters under the partition "clusters", and for planted data if every user is a client.
    """
    if config.partition == "clusters":
        clients = require(config.clients) + config.clients_apart
        return data.true_clusters(clients, require(config.clusters), num_classes, config.split_seed).member
    drawn = config.data.partition(":")[0] == "planted" and config.partition == "natural"
    if drawn and config.clients is None and config.users_per_client in (None, 1):
        return planted.draw_planted(planted.parse(config.data)).member
    return None


def rand_index(experiment: Experiment, found: np.ndarray) -> list[float] | None:
    """Adjusted Rand index of the clusters found, [S, m], in each run; None if the true ones are not known."""
    truth = client_clusters(experiment.config, experiment.task.num_classes)
    if truth is None:
        return None
    from sklearn.metrics import adjusted_rand_score

    own = truth[np.asarray(experiment.federation.client_ids)]
    return [float(adjusted_rand_score(own, clusters)) for clusters in found]


class Uplink:
    """Running count of the bits that a run with compression uploads.

    Attributes:
      bits: bits of all clients' uploads since round 0, [S] int64.
    """

    def __init__(self, simulation: Simulation, state: RunState):
        self.bits: np.ndarray = simulation.counts(state).upload_bits.sum(axis=1)

    def along(self, history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The next rounds' history with each round's ``bits_up``, all bits since round 0."""
        bits = self.bits[:, None] + np.cumsum(history["upload_bits"], axis=1)
        self.bits = bits[:, -1]
        return history | {"bits_up": bits}


def upload_sizes(simulation: Simulation, counts: Counts, compress: str | None) -> dict[str, Any]:
    """Upload size stored for a finished method: ``bytes_up``, a mean over the runs.

    With compression also the compressor's name and the uncompressed size.

    Args:
      counts: counts at the end, on the host.
      compress: compressor as in the config.
    """
    runs = counts.uploads.shape[0]
    plain = simulation.bytes_per_client()[0] * int(counts.uploads.sum()) // runs
    if not simulation.algorithm.counts_bits:
        return {"bytes_up": plain}
    coded = int(counts.upload_bits.sum()) // (8 * runs)
    return {"bytes_up": coded, "bytes_up_uncoded": plain, "compress": compress}
