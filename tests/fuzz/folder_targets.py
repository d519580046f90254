"""Readers of run folders, exported models, checkpoints, sweeps and results, each of a copy of a good one.

The good ones are in `GOOD`, which whoever damages them makes beforehand by `good_runs.make`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import good_runs
import numpy as np
from fuzz_target import Target, copied, of_folder

from jaxpfl import load_models
from jaxpfl.benchmarks.papers import results as papers
from jaxpfl.benchmarks.winners import atlas
from jaxpfl.engine.streamed import disk as undo
from jaxpfl.engine.streamed.disk import Disk
from jaxpfl.runs import export, results, stored_run
from jaxpfl.runs.records import Journal, load_sweep
from jaxpfl.runs.reports import compare, report
from jaxpfl.runs.reports.folders import below, check
from jaxpfl.runs.sweep import definition as definitions
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError

GOOD = Path(tempfile.gettempdir())
"""Replaced by `fuzz`."""
ROUNDS, ROWS = 3, 6


def good(name: str) -> Callable[[Path], None]:
    return lambda folder: copied(GOOD / name)(folder)


def looked(folder: Path) -> Any:
    """All that reads a result folder without training: its place in a list, and its check."""
    listed = below(folder)
    found = check(folder)
    for text in (*(one.done for one in listed), *found.troubles):
        assert "\n" not in text
        assert len(text) < 2000
    assert found.troubles or found.folder.status != "damaged"
    return found


def page(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        report.write([folder], Path(place) / "page.html")


def opened(folder: Path) -> Any:
    """A run as resuming and comparing read it."""
    run = stored_run.open_run(folder)
    for name in run.methods:
        if results.finished(folder, name) is not None:
            results.read_arrays(folder, name)
    records = files.Records(folder / "metrics.jsonl").read()
    assert all(one["round"] >= 1 for one in records)
    return run, compare.compare(GOOD / "run", folder)


def seal_run(folder: Path) -> None:
    """Checksums of a run's methods and checkpoints, anew."""
    for path in folder.glob("methods/*.json"):
        try:
            stored = files.read_json(path)
            if isinstance(stored, dict):
                stored.pop(files._SEAL, None)
                if (arrays := path.with_suffix(".npz")).exists():
                    stored[results._ARRAYS] = hashlib.sha256(arrays.read_bytes()).hexdigest()
                path.write_text(json.dumps(stored | {files._SEAL: files._sum(stored)}))
        except (files.JaxpflError, UnicodeEncodeError):
            continue


def models(folder: Path) -> None:
    """Every model of exported ones, as `load_models` and a warm start read them."""
    export.parameters_origin(str(folder))
    for name in ("local", "adaped"):
        found = load_models(folder, name)
        for client in found.client_ids[:2]:
            assert found.client(int(client))
        _ = found.global_model
    export.read_parameters(f"{folder}:adaped")


@functools.cache
def state() -> Any:
    """A state of the good run, of the shapes that its checkpoints have."""
    run = stored_run.open_run(GOOD / "run")
    simulation = run.experiment().simulation("adaped")
    return simulation.checkpointed(simulation.init(run.seeds))


def checkpoint(folder: Path) -> Any:
    from jaxpfl.runs.checkpoint import Checkpoints

    found, seconds = Checkpoints(folder).restore(state(), ROUNDS, lambda text: None)
    assert np.ravel(found.round).tolist() == [ROUNDS] * len(np.ravel(found.round))
    return found, seconds


def seal_checkpoints(folder: Path) -> None:
    for one in folder.iterdir():
        files.write_checksums(one)


def sweep(folder: Path) -> None:
    load_sweep(folder)
    definition = definitions.read(folder)
    for record in Journal(folder).read():
        assert isinstance(record.method, str)
        assert type(record.rounds) is int
        assert set(record.settings) is not None
    looked(folder)
    assert definition.methods


def undone(folder: Path) -> int:
    """Rows that the journal gives back, each among those that there are."""
    number = 0
    for numbers, content in undo.records(folder / "undo-1", ROWS, 8):
        assert len(content) == 8 * len(numbers)
        number += len(numbers)
    undo.Journal(folder / "undo-1", ROWS, 8).close()
    return number


def study(folder: Path) -> Any:
    """A study in a list, checked; a folder whose summary names no study is none."""
    found = looked(folder)
    assert found.folder.kind == "study"
    return found


def states(folder: Path) -> None:
    """Clients' states on disk, opened and taken back to a checkpoint: of a copy, as going back writes."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place, "states")
        shutil.copytree(folder, copy)
        disk = Disk(copy, good_runs.STATES, good_runs.KEYS)
        if disk.is_new:
            raise JaxpflError("a store that is gone is made anew, not read")
        disk.recover(2)
        assert [path.name for path in copy.glob("undo-*") if int(path.name[5:]) > 2] == []
        assert (copy / "undo-2").stat().st_size == 0


def seal_undo(folder: Path) -> None:
    """The checksum of each journal's first record, anew."""
    for path in folder.glob("undo-*"):
        content = path.read_bytes()
        if len(content) > undo._HEAD.size:
            number, length, _ = undo._HEAD.unpack_from(content)
            body = content[undo._HEAD.size :][:length]
            path.write_bytes(undo._HEAD.pack(number, length, zlib.crc32(body)) + content[undo._HEAD.size :])


def seal_results(folder: Path) -> None:
    """The checksums of a table's result and of a map anew, as far as damage left them JSON."""
    for name in ("result.json", "map.json"):
        try:
            content = files.read_json(folder / name)
        except JaxpflError:
            continue
        if isinstance(content, dict):  # infinities too, which `files.write_checksummed` leaves out
            content.pop(files._SEAL, None)
            (folder / name).write_text(json.dumps(content | {files._SEAL: files._sum(content)}))


def alone(
    read: Callable[[Path], Any], name: str, share: float = 1.0, seal: Callable[[Path], None] = lambda folder: None
) -> Target:
    return of_folder(good("alone"), lambda folder: read(folder / name), (name,), seal=seal, share=share)


RUN = ("*.json", "*.jsonl", "*.npz")
FOLDERS: dict[str, Target] = {
    "run": of_folder(good("run-files"), looked, RUN, seal=seal_run, share=0.2),
    "resumed run": of_folder(good("run-files"), opened, RUN, seal=seal_run, share=0.2),
    "run's page": of_folder(good("run-files"), page, RUN, seal=seal_run, share=0.004),
    "models": of_folder(good("models"), models, ("*",), seal=files.write_checksums, share=0.2),
    "checkpoint": of_folder(good("checkpoint"), checkpoint, ("*",), seal=seal_checkpoints, share=0.02),
    "sweep": of_folder(good("sweep"), sweep, ("*.json", "*.jsonl"), share=0.2),
    "sweep's page": of_folder(good("sweep"), page, ("*.json", "*.jsonl"), share=0.004),
    "study": of_folder(good("study"), study, ("summary.json",), share=0.5),
    "study's page": of_folder(good("study"), page, ("summary.json",), share=0.02),
    "disk of clients": of_folder(good("disk"), states, ("*",), seal=seal_undo, share=0.3),
    "paper's result": alone(papers.read, "result.json", seal=seal_results),
    "map of winners": alone(atlas.read, "map.json", 0.2, seal_results),
    "undo": of_folder(good("alone"), undone, ("undo-1",)),
}
