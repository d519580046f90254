"""Result folders on disk: their kind, what they are of, and how far they are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from jaxpfl.runs import run_folder
from jaxpfl.runs.records import Journal
from jaxpfl.runs.stored_run import read_record
from jaxpfl.runs.sweep import definition as sweeps
from jaxpfl.runs.sweep.sweep import Sweep
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, expecting

RUN, SWEEP, STUDY = "run", "sweep", "study"
COMPLETE, UNFINISHED, RUNNING, DAMAGED = "complete", "unfinished", "running", "damaged"
SUMMARY = "summary.json"


class Folder(NamedTuple):
    """A folder of results.

    Attributes:
      path: of the folder.
      kind: ``run``, ``sweep`` or ``study``.
      status: ``complete``, ``unfinished``, ``running`` (a process holds it) or ``damaged``.
      what: the methods, or the study's name.
      data: the data set; empty for a study.
      done: progress in words; the trouble of a damaged folder.
    """

    path: Path
    kind: str
    status: str
    what: tuple[str, ...]
    data: str
    done: str


def kind_of(path: Path) -> str | None:
    """Kind of a folder by the files in it; None for any other folder."""
    if (path / "config.json").is_file() and not _is_foreign(path / "config.json"):
        return RUN
    if (path / sweeps.FILE).is_file():
        return SWEEP
    if (path / SUMMARY).is_file():
        return STUDY if isinstance(_mapping(path / SUMMARY).get("study"), str) else None
    return None


def look(path: Path) -> Folder:
    """A folder's kind and status.

    Raises:
      JaxpflError: for a folder that holds no run, sweep or study.
    """
    kind = kind_of(path)
    if kind is None:
        missing = "it does not exist" if not path.exists() else "no config.json, sweep.json or summary.json in it"
        raise JaxpflError(f"{path} holds no run, sweep or study: {missing}")
    try:
        with expecting(path, f"a {kind}"):
            found = {RUN: _run, SWEEP: _sweep, STUDY: _study}[kind](path)
    except JaxpflError as error:
        return Folder(path, kind, DAMAGED, (), "", str(error))
    return found._replace(status=RUNNING) if found.status == UNFINISHED and run_folder.is_held(path) else found


def below(path: Path) -> list[Folder]:
    """All result folders in a folder, at any depth but inside one another, by name.

    Raises:
      JaxpflError: for a path that is no folder or cannot be read.
    """
    if not path.is_dir():
        raise JaxpflError(f"{path} is no folder")
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
    """A JSON file's object; empty for what is none."""
    try:
        found = files.read_json(path)
    except JaxpflError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_foreign(path: Path) -> bool:
    """True for the ``config.json`` of another program; one of ours that is damaged is not."""
    found = _mapping(path)
    return bool(found) and not {"config", "methods"} & found.keys()


def _run(path: Path) -> Folder:
    record = read_record(path / "config.json")
    methods, config = tuple(record["methods"]), record["config"]
    rounds = config.get("rounds")
    if (path / SUMMARY).is_file():
        if set(files.read_json(path / SUMMARY)["methods"]) != set(methods):
            raise JaxpflError(f"{path / SUMMARY} is not that of its config.json")
        return Folder(path, RUN, COMPLETE, methods, str(config["data"]), f"{rounds} rounds")
    last = dict.fromkeys(methods, 0)
    for one in files.Records(path / "metrics.jsonl").read():
        last[one["method"]] = max(last.get(one["method"], 0), one["round"])
    done = ", ".join(f"{name} {at}" for name, at in last.items())
    return Folder(path, RUN, UNFINISHED, methods, str(config["data"]), f"of {rounds} rounds: {done}")


def _sweep(path: Path) -> Folder:
    definition = sweeps.read(path)
    done, total = Sweep(path, definition).progress(Journal(path).read())
    whole = (path / SUMMARY).is_file()
    words = f"{total} runs" if whole else f"{done} of {total} runs"
    return Folder(path, SWEEP, COMPLETE if whole else UNFINISHED, definition.methods, definition.config.data, words)


def _study(path: Path) -> Folder:
    return Folder(path, STUDY, COMPLETE, (str(files.read_json(path / SUMMARY)["study"]),), "", "")
