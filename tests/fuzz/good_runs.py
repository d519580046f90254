"""Good run, export, sweep and other folders, made once for the targets that damage copies of them."""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "experiment"))
from finished_run import run

from jaxpfl.benchmarks.papers import results
from jaxpfl.benchmarks.winners import atlas
from jaxpfl.cli import main
from jaxpfl.engine.streamed.disk import Disk
from jaxpfl.engine.streamed.disk import Journal as Undo
from jaxpfl.runs.config import RunConfig
from jaxpfl.runs.export import export
from jaxpfl.runs.records import FAILED, Journal, Record
from jaxpfl.runs.sweep import definition as definitions
from jaxpfl.runs.sweep.grid import Grid, parse
from jaxpfl.runs.sweep.results import summarize
from jaxpfl.support import files

METHODS = ("local", "adaped")
ROWS = 6
STATES = {"w": jax.ShapeDtypeStruct((2, 3, 2), np.float32), "n": jax.ShapeDtypeStruct((2, 3), np.int32)}
"""States of two runs of three clients on disk, with their keys."""
KEYS = ["a", "b"]


def make(folder: Path) -> None:
    """All of them, in folders of their own."""
    run(folder / "run", METHODS)
    export(folder / "run", folder / "models")
    unread = shutil.ignore_patterns("plots", "models", "checkpoints", "SHA256SUMS", ".*")
    shutil.copytree(folder / "run", folder / "run-files", ignore=unread)
    shutil.copytree(folder / "run" / "checkpoints" / "adaped", folder / "checkpoint")
    _sweep(folder / "sweep")
    _study(folder / "study")
    _disk(folder / "disk")
    _others(folder)


def _sweep(folder: Path) -> None:
    folder.mkdir()
    small = RunConfig(model="linear", clients=6, cohort=3, local_steps=2, batch_size=5, rounds=3, seeds=2)
    defined = definitions.define(("local", "fedavg"), small, Grid((parse("lr=0.1,0.2"),)))
    files.write_json(folder / definitions.FILE, defined.to_json() | {"data": {}, "versions": {}})
    records = [
        Record(method, {"lr": lr}, seed, rounds=3, metrics={"validation_accuracy": 0.5, "personalized_accuracy": lr})
        for method in defined.methods
        for lr in (0.1, 0.2)
        for seed in (0, 1)
    ]
    records[3] = Record("local", {"lr": 0.2}, 1, FAILED, "out of memory", rounds=3)
    Journal(folder).append(records)
    summary = summarize(records, {}, seeds=defined.searched, programs=1, seconds=1.0)
    files.write_json(folder / "summary.json", summary)


def _study(folder: Path) -> None:
    command = ["estimate", "when", "--clients", "50", "--samples", "5", "--json", "--output", str(folder)]
    with contextlib.redirect_stdout(None), contextlib.suppress(SystemExit):
        main(command)
    assert (folder / "summary.json").exists()


def _disk(folder: Path) -> None:
    """States at the checkpoint of round 2 with what was written since; round 1 can be gone back to as well."""
    disk = Disk(folder, STATES, KEYS)
    for leaf in jax.tree.leaves(disk.tree):
        leaf[:] = 0
    disk.complete()
    for round in (1, 2, 3):
        values = {"w": np.full((2, 2), round, np.float32), "n": np.full(2, round, np.int32)}
        disk.put(round % 2, np.array([0, round % 3]), values)
        disk.prepare(round)
        if round < 3:
            disk.commit(round)


def _others(folder: Path) -> None:
    """Files that are read alone."""
    alone = folder / "alone"
    alone.mkdir()
    files.write_checksummed(alone / "result.json", results.committed()[0].to_json())
    known = files.read_checksummed(atlas.COMMITTED)
    files.write_checksummed(alone / "map.json", known | {"places": known["places"][:2]})
    undo = Undo(alone / "undo-1", ROWS, 8)
    for first in (0, 2):
        undo.keep(np.array([first, first + 1]), lambda numbers: [np.ones((len(numbers), 2), np.float32)])
    undo.close()
