"""Results of the runs of a sweep, by name."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxpfl.engine import RunState, Simulation
from jaxpfl.engine.evaluate import Part, example_weights, is_root
from jaxpfl.runs.scores import over_clients, undefined
from jaxpfl.runs.setup import Experiment

UNDEFINED = "_undefined"
"""Ending of the number of clients whose test examples do not define a metric; there only where it is not 0."""
_OF_OTHERS = {"": "mean", "_median": "median", "_examples": "mean_examples"}
"""Endings of the names of a task's metrics beside its headline, and the statistic over clients of each."""


def splits_of(experiment: Experiment) -> tuple[Part, ...]:
    """The splits that have examples to score."""
    return ("test", "validation") if experiment.federation.validation.capacity else ("test",)


def measured(
    experiment: Experiment, simulation: Simulation, state: RunState, loss: np.ndarray
) -> list[dict[str, float | None]]:
    """Results of each run, by name: means over clients unless the name says otherwise.

    Args:
      experiment: the config with its data.
      simulation: its programs.
      state: of S runs, at their end.
      loss: of the last round, [S].
    """
    scores = jax.tree.map(np.asarray, dict(simulation.evaluate(state)))
    validation = None
    if "validation" in splits_of(experiment):
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
        after = over_clients(
            scores["after"][name][i], lower=headline.lower, sizes=sizes, root=is_root(task, headline.name)
        )
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
