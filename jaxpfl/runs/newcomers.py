"""Adaptation of new clients to labeled rows of a table, as a run adapts its unseen clients."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import numpy as np

from jaxpfl import data
from jaxpfl.core.types import Names
from jaxpfl.data.sources.csv_text import Table
from jaxpfl.engine.model_files import Models
from jaxpfl.models.metrics import OUTPUTS
from jaxpfl.runs.export import outcome
from jaxpfl.runs.setup import Experiment
from jaxpfl.runs.stored_run import last_state, open_run
from jaxpfl.support.errors import JaxpflError, JaxpflWarning, shown, warn


def adapt(
    folder: Path, models: Models, table: Table, column: str, target: str | None, new: list[str]
) -> list[np.ndarray]:
    """Predict all rows of new clients, each with a model that is adapted to the client's labeled rows.

    Args:
      folder: run folder from which the models were exported.
      models: exported models of one method.
      table: table with the columns of the run's features, the clients and the labels; rows may lack a label.
      column: column with the clients' names.
      target: column with the labels; the run's column of labels if None.
      new: names of the new clients.

    Returns:
      For each client, the result of `Models.predict` for its rows.

    Raises:
      JaxpflError: if the folder is not the models' run, if the run's data are not a table with one column of labels, if
        a client has no labeled row, if a label is unknown, or if the method does not support unseen clients.
    """
    if not (folder / "config.json").is_file():
        raise JaxpflError(f"--adapt requires the run that trained the models: {folder} is not a run folder")
    run = open_run(folder)
    if run.record["data"] != models.manifest["data"]:
        raise JaxpflError(
            f"the models were exported from a run on other data than {folder}: name that run, or export {folder} again"
        )
    experiment, name = run.experiment(), models.method
    columns, federation = experiment.columns, experiment.federation
    target = target or run.config.target
    if columns is None or target is None or "," in target:
        raise JaxpflError(
            "--adapt requires that the run was trained on a table and that one column has the labels: give --target"
        )
    table = table._replace(missing=columns.missing)
    y, known = _labels(table, table.find(target), experiment)
    x = columns.apply(table).astype(federation.preparation.raw_dtype)
    rows = [np.flatnonzero(np.array(table.texts(column)) == client) for client in new]
    labelled = [own[known[own]] for own in rows]
    if lacking := [client for client, own in zip(new, labelled, strict=True) if not len(own)]:
        raise JaxpflError(f"{table.path}: client {shown(lacking[0])} has no row with a label: leave out --adapt")
    first = int(np.max(federation.client_ids)) + 1
    ids = np.arange(first, first + len(new))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JaxpflWarning)  # labeled rows are among the predicted rows on purpose
        train, test = ([(x[own], y[own]) for own in part] for part in (labelled, rows))
        unseen = data.stack_clients(train, test, client_ids=ids, client_names=Names(new))
        unseen = data.filled(unseen, data.own_fills(unseen, columns))
        unseen = unseen if experiment.scaling is None else data.scaled(unseen, experiment.scaling)
        unseen = data.single(unseen)
    task = experiment.task._replace(metrics={**experiment.task.metrics, "outputs": OUTPUTS})
    assembled = dataclasses.replace(experiment.runs[name], unseen=unseen)
    experiment = experiment._replace(task=task, runs={name: assembled})
    simulation, state = last_state(run, experiment, name, models.manifest["seed"])
    scores = simulation.evaluate_unseen(state)
    before, after = (np.asarray(scores[model]["outputs"][0]) for model in ("before", "after"))
    if np.array_equal(before, after):
        warn(f"{name} does not adapt new clients: --adapt has no effect")
    predict = outcome(task, assembled.spec.loss)
    return [np.asarray(predict(found[: len(own)])) for found, own in zip(after, rows, strict=True)]


def _labels(table: Table, target: str, experiment: Experiment) -> tuple[np.ndarray, np.ndarray]:
    """Return the label of each of N rows, [N], as the run encodes labels, and whether the row has a label, [N] bool."""
    known = ~table.missing_in(target)
    if experiment.task.kind == "regression":
        return np.where(known, table.numbers(target, missing=True), 0).astype(np.float32), known
    names = experiment.federation.preparation.class_names
    names = np.arange(max(experiment.task.num_classes, 2)) if names is None else names
    numeric = names.dtype.kind in "iuf"
    cells = table.numbers(target, missing=True) if numeric else table.cells[target].to_numpy(str)
    equal = cells[:, None] == names
    wrong = known & ~equal.any(axis=1)
    if wrong.any():
        row = int(wrong.argmax())
        cell = f"column {shown(target)} contains {shown(table.cells[target].iloc[row])}"
        raise JaxpflError(f"{table.path} line {table.lines[row]}: {cell}, which is not a class of the run")
    return equal.argmax(axis=1), known
