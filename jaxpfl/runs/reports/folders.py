"""Result folders on disk: recognize their kind and progress, list them, and check them for damage."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.data.sources.npz import read_npz
from jaxpfl.engine.evaluate import over_clients, stored_headline
from jaxpfl.runs import results
from jaxpfl.runs.records import Journal
from jaxpfl.runs.run_folder import CODE, SUMMARY, is_locked
from jaxpfl.runs.stored_run import open_run, read_record
from jaxpfl.runs.sweep import definition as sweeps
from jaxpfl.runs.sweep.sweep import Sweep
from jaxpfl.support import files
from jaxpfl.support.console import new_table, unmarked
from jaxpfl.support.errors import JaxpflError, expecting, printable

RUN, SWEEP, STUDY = "run", "sweep", "study"
COMPLETE, UNFINISHED, RUNNING, DAMAGED = "complete", "unfinished", "running", "damaged"


class Folder(NamedTuple):
    """Description of a folder of results.

    Attributes:
      path: path of the folder.
      kind: ``run``, ``sweep`` or ``study``.
      status: ``complete``, ``unfinished``, ``running`` (a process has locked the folder) or ``damaged``.
      what: names of the methods, or the name of the study.
      data: name of the data set; empty for a study.
      done: description of the progress or, for a damaged folder, the damage.
    """

    path: Path
    kind: str
    status: str
    what: tuple[str, ...]
    data: str
    done: str


def kind_of(path: Path) -> str | None:
    """Determine the kind of a result folder from its files; None if it is not a result folder."""
    if (path / "config.json").is_file() and not _is_foreign(path / "config.json"):
        return RUN
    if (path / sweeps.FILE).is_file():
        return SWEEP
    if (path / SUMMARY).is_file():
        return STUDY if isinstance(_mapping(path / SUMMARY).get("study"), str) else None
    return None


def look(path: Path) -> Folder:
    """Return the description of a result folder.

    Raises:
      JaxpflError: if the folder contains no run, sweep or study.
    """
    kind = kind_of(path)
    if kind is None:
        missing = "it does not exist" if not path.exists() else "no config.json, sweep.json or summary.json in it"
        raise JaxpflError(f"{path} contains no run, sweep or study: {missing}")
    try:
        with expecting(path, f"a {kind}"):
            found = {RUN: _run, SWEEP: _sweep, STUDY: _study}[kind](path)
    except JaxpflError as error:
        return Folder(path, kind, DAMAGED, (), "", str(error))
    return found._replace(status=RUNNING) if found.status == UNFINISHED and is_locked(path) else found


def below(path: Path) -> list[Folder]:
    """Find all result folders below a folder, at any depth, sorted by name.

    Result folders themselves are not searched for further result folders.

    Raises:
      JaxpflError: if the path is not a folder, or cannot be read.
    """
    if not path.is_dir():
        raise JaxpflError(f"{path} is not a folder")
    found: list[Folder] = []

    def fail(error: OSError) -> None:
        raise JaxpflError(f"cannot read {error.filename}: {error.strerror}") from None

    for name, inner, _ in os.walk(path, onerror=fail):
        if kind_of(Path(name)) is not None:
            found.append(look(Path(name)))
            inner.clear()
        inner[:] = sorted(one for one in inner if not one.startswith("."))
    return found


def _mapping(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty dict if the file is unreadable or contains anything else."""
    try:
        found = files.read_json(path)
    except JaxpflError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_foreign(path: Path) -> bool:
    """Return whether a ``config.json`` belongs to another program. A damaged file of a run is not foreign."""
    found = _mapping(path)
    return bool(found) and not {"config", "methods"} & found.keys()


def _run(path: Path) -> Folder:
    record = read_record(path / "config.json")
    methods, config = tuple(record["methods"]), record["config"]
    rounds = config.get("rounds")
    if (path / SUMMARY).is_file():
        if set(files.read_json(path / SUMMARY)["methods"]) != set(methods):
            raise JaxpflError(f"{path / SUMMARY} does not match its config.json")
        return Folder(path, RUN, COMPLETE, methods, str(config["data"]), f"{rounds} rounds")
    last = dict.fromkeys(methods, 0)
    for one in files.Records(path / "metrics.jsonl").read():
        last[one["method"]] = max(last.get(one["method"], 0), one["round"])
    done = ", ".join(f"{name} {at}" for name, at in last.items())
    return Folder(path, RUN, UNFINISHED, methods, str(config["data"]), f"of {rounds} rounds: {done}")


def _sweep(path: Path) -> Folder:
    definition, records = sweeps.read(path), Journal(path).read()
    # The number of planned runs depends on the methods, but the user's files with own methods are not executed here.
    own = (path / CODE).is_dir()
    done, total = (len(records), None) if own else Sweep(path, definition).progress(records)
    whole = (path / SUMMARY).is_file()
    words = f"{done if own else total} runs" if whole or own else f"{done} of {total} runs"
    return Folder(path, SWEEP, COMPLETE if whole else UNFINISHED, definition.methods, definition.config.data, words)


def _study(path: Path) -> Folder:
    return Folder(path, STUDY, COMPLETE, (str(files.read_json(path / SUMMARY)["study"]),), "", "")


_STYLES = {COMPLETE: "green", RUNNING: "cyan", DAMAGED: "red"}
_MOST_NAMED = 4


def print_folders(console: Any, found: Sequence[Folder]) -> None:
    """Print a table of result folders with their kind, status, methods, data and progress."""
    table = new_table(f"{len(found)} folder{'s' * (len(found) != 1)} of results")
    for name in ("folder", "kind", "status", "what", "data", "progress"):
        table.add_column(name, overflow="fold", no_wrap=name in ("kind", "status"))
    for one in found:
        names = ", ".join(one.what[:_MOST_NAMED]) + f" and {len(one.what) - _MOST_NAMED} more" * (
            len(one.what) > _MOST_NAMED
        )
        status = f"[{_STYLES.get(one.status, 'yellow')}]{one.status}[/]"
        table.add_row(unmarked(str(one.path)), one.kind, status, names, unmarked(one.data), unmarked(one.done))
    console.print(table)


class Checked(NamedTuple):
    """Result of `check`.

    Attributes:
      folder: description of the folder, with the status ``damaged`` if ``troubles`` is not empty.
      troubles: one sentence about each damaged or missing file or record.
      looked_at: number of checked files or records of each kind.
    """

    folder: Folder
    troubles: list[str]
    looked_at: dict[str, int]


def check(path: Path) -> Checked:
    """Check a run, sweep or study folder, or a folder with ``SHA256SUMS``, for damaged and missing files.

    Raises:
      JaxpflError: if the folder is none of these.
    """
    if (path / files.CHECKSUMS).is_file():
        number = len(files.contents(path / files.CHECKSUMS).splitlines())
        try:
            files.check_checksums(path)
        except JaxpflError as error:
            return Checked(Folder(path, "files", DAMAGED, (), "", ""), [str(error)], {"files": number})
        return Checked(Folder(path, "files", COMPLETE, (), "", ""), [], {"files": number})
    folder = look(path)
    if folder.status == DAMAGED:
        return Checked(folder, [folder.done], {})
    try:
        with expecting(path, f"a {folder.kind}"):
            if folder.kind == SWEEP:  # `look` has read the journal and checked the checksum of each record
                for one in path.glob(CODE):
                    files.check_checksums(one)
                return Checked(folder, [], {"records": len(Journal(path).read())})
            troubles, looked_at = (_check_run if folder.kind == RUN else _check_study)(folder)
    except JaxpflError as error:
        troubles, looked_at = [str(error)], {}
    return Checked(folder._replace(status=DAMAGED) if troubles else folder, troubles, looked_at)


def _check_run(folder: Folder) -> tuple[list[str], dict[str, int]]:
    path, run = folder.path, open_run(folder.path)
    troubles: list[str] = []
    arrays: dict[str, dict[str, np.ndarray]] = {}
    records = files.Records(path / "metrics.jsonl").read()
    for name in run.methods:
        if not (path / "methods" / f"{name}.json").is_file():
            troubles += [f"{path / 'methods'} lacks {name}"] * (folder.status == COMPLETE)
            continue
        try:
            stored, arrays[name] = results.read_arrays(path, name)
        except JaxpflError as error:
            troubles.append(str(error))
            continue
        for kind, lost in results.count_missing(records, name, stored, run.config).items():
            if lost:
                troubles.append(f"{path / 'metrics.jsonl'} has lost {lost} {kind}s of {name}")
    saved = [one for one in sorted(path.glob("checkpoints/*/*")) if one.is_dir() and not one.name.startswith(".")]
    for one in [*saved, *path.glob(CODE)]:
        try:
            files.check_checksums(one)
        except JaxpflError as error:
            troubles.append(str(error))
    if folder.status == COMPLETE and len(arrays) == len(run.methods):
        troubles += _check_summary(path, arrays)
    return troubles, {"methods": len(arrays), "records": len(records), "checkpoints": len(saved)}


def _check_summary(path: Path, arrays: dict[str, dict[str, np.ndarray]]) -> list[str]:
    """Return differences between a run's per-method files and its ``summary.json`` or ``clients.npz``."""
    troubles, summary = [], files.read_json(path / SUMMARY)
    headline, stored = stored_headline(summary), read_npz(path / "clients.npz")
    for name, own in arrays.items():
        mean = files.jsonable(over_clients(own[f"after_{headline.name}"], lower=headline.lower)["mean"])
        summarized = (summary["methods"][name].get(headline.personalized) or {}).get("mean")
        if mean != summarized:
            troubles.append(f"{path / SUMMARY} gives {summarized} for {name}, but its clients give {mean}")
        for key, value in own.items():
            found = stored.get(f"{name}/{key}")
            if found is None or not np.array_equal(found, value, equal_nan=value.dtype.kind == "f"):
                troubles.append(f"{path / 'clients.npz'} does not match the methods' files: {name}/{key} differs")
    return troubles


def _check_study(folder: Folder) -> tuple[list[str], dict[str, int]]:
    told = files.read_json(folder.path / SUMMARY).get("files", [])
    if not isinstance(told, list) or not all(isinstance(one, str) for one in told):
        raise JaxpflError(f"{folder.path / SUMMARY} is damaged: 'files' must list names of files in the folder")
    # Not Path.is_file, which raises if a name is too long for the file system.
    lost = [name for name in told if not os.path.isfile(files.inside(folder.path, name))]
    return [f"{folder.path / printable(name)} is missing" for name in lost], {"files": len(told) + 1}
