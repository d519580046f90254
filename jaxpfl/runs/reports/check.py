"""Check of a result folder: checksums, completeness, and that its summary is that of its files."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.data.sources.npz import read_npz
from jaxpfl.runs import results
from jaxpfl.runs.records import Journal
from jaxpfl.runs.reports.folders import COMPLETE, DAMAGED, RUN, STUDY, SUMMARY, Folder, look
from jaxpfl.runs.scores import over_clients, stored_headline
from jaxpfl.runs.stored_run import open_run
from jaxpfl.runs.sweep import definition as sweeps
from jaxpfl.runs.sweep.summary import summarize
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, expecting, printable


class Checked(NamedTuple):
    """A folder that was checked.

    Attributes:
      folder: as `look` sees it; its status is ``damaged`` if there are troubles.
      troubles: a sentence for each damaged or missing part.
      looked_at: number of files whose content was read, by kind.
    """

    folder: Folder
    troubles: list[str]
    looked_at: dict[str, int]


def check(path: Path) -> Checked:
    """Read all of a run, sweep or study folder, or of a folder with ``SHA256SUMS``, and compare it with its checksums.

    Raises:
      JaxpflError: for a folder that is none of these.
    """
    if (path / files.CHECKSUMS).is_file():
        trouble = _trouble(lambda: files.check_checksums(path))
        number = len(files.contents(path / files.CHECKSUMS).splitlines())
        status = DAMAGED if trouble else COMPLETE
        return Checked(Folder(path, "files", status, (), "", ""), trouble, {"files": number})
    folder = look(path)
    if folder.status == DAMAGED:
        return Checked(folder, [folder.done], {})
    try:
        with expecting(path, f"a {folder.kind}"):
            troubles, looked_at = {RUN: _run, STUDY: _study}.get(folder.kind, _sweep)(folder)
    except JaxpflError as error:
        troubles, looked_at = [str(error)], {}
    return Checked(folder._replace(status=DAMAGED) if troubles else folder, troubles, looked_at)


def _trouble(read: Any) -> list[str]:
    """The error of a call, as a list; empty where there is none."""
    try:
        read()
    except JaxpflError as error:
        return [str(error)]
    return []


def _run(folder: Folder) -> tuple[list[str], dict[str, int]]:
    path, run = folder.path, open_run(folder.path)
    troubles: list[str] = []
    arrays: dict[str, dict[str, np.ndarray]] = {}
    last: dict[str, int] = {}
    for name in run.methods:
        if (path / "methods" / f"{name}.json").is_file():
            try:
                stored, arrays[name] = results.read_arrays(path, name)
                last[name] = stored.get("stopped_after") or stored["rounds"]
            except JaxpflError as error:
                troubles.append(str(error))
    records = files.Records(path / "metrics.jsonl").read()  # whose damage `look` has told
    held = {(one["kind"], one["method"], one["round"]) for one in records}
    for name, rounds in last.items():
        for kind, step in (("round", 1), ("evaluation", run.config.eval_every)):
            own = {at for what, method, at in held if (what, method) == (kind, name) and type(at) is int}
            lost, first = _lost(rounds, step, own)
            if lost:
                what = f"{lost} {kind}s of {name}, the first {'' if kind == 'round' else 'of round '}{first}"
                troubles.append(f"{path / 'metrics.jsonl'} has lost {what}")
    saved = [one for one in sorted(path.glob("checkpoints/*/*")) if one.is_dir() and not one.name.startswith(".")]
    for one in saved:
        troubles += _trouble(lambda one=one: files.check_checksums(one))
    if folder.status == COMPLETE:
        troubles += [f"{path / 'methods'} lacks {name}" for name in run.methods if name not in arrays and not troubles]
        troubles += _summary(path, arrays) if len(arrays) == len(run.methods) else []
    return troubles, {"methods": len(arrays), "records": len(records), "checkpoints": len(saved)}


def _lost(rounds: int, step: int, held: set[int]) -> tuple[int, int]:
    """Number of those among every ``step``-th and the last of some rounds that are not held, and the first of them.

    Nothing is made for each round: a damaged folder may speak of any number of them.
    """
    have = {at for at in held if 1 <= at <= rounds and (at % step == 0 or at == rounds)}
    due = -(-rounds // step)
    first = next(at for i in itertools.count(1) if (at := min(i * step, rounds)) not in have or at == rounds)
    return due - len(have), first


def _summary(path: Path, arrays: dict[str, dict[str, np.ndarray]]) -> list[str]:
    """Troubles of a run's summary and of ``clients.npz``, which must be those of its methods' files."""
    troubles, summary = [], files.read_json(path / SUMMARY)
    headline = stored_headline(summary)
    for name, own in arrays.items():
        mean = over_clients(own[f"after_{headline.name}"], lower=headline.lower)["mean"]
        told = (summary["methods"][name].get(headline.personalized) or {}).get("mean")
        if (mean is None or not math.isfinite(mean)) != (told is None) or (told is not None and mean != told):
            troubles.append(f"{path / SUMMARY} says {told} of {name}, and its clients {mean}")
    try:
        stored = read_npz(path / "clients.npz")
    except JaxpflError as error:
        return [*troubles, str(error)]
    for name, own in arrays.items():
        for key, value in own.items():
            found = stored.get(f"{name}/{key}")
            if found is None or not np.array_equal(found, value, equal_nan=value.dtype.kind == "f"):
                troubles.append(f"{path / 'clients.npz'} is not of these methods: {name}/{key} differs")
    return troubles


def _sweep(folder: Folder) -> tuple[list[str], dict[str, int]]:
    path, definition = folder.path, sweeps.read(folder.path)
    records = Journal(path).read()  # whose damage `look` has told
    troubles = []
    if folder.status == COMPLETE:
        told = files.read_json(path / SUMMARY)
        again = summarize(records, {}, seeds=definition.searched, programs=0, seconds=0.0)
        rows, known = ({_named(row): row for row in one["rows"]} for one in (told, again))
        if rows != known:
            first = next(name for name in (*known, *rows) if rows.get(name) != known.get(name))
            troubles.append(f"{path / SUMMARY} is not that of its records: {printable(' '.join(first))} differs")
    return troubles, {"records": len(records)}


def _named(row: dict[str, Any]) -> tuple[str, ...]:
    return row["method"], *(f"{name}={value}" for name, value in sorted(row["settings"].items()))


def _study(folder: Folder) -> tuple[list[str], dict[str, int]]:
    told = files.read_json(folder.path / SUMMARY).get("files", [])
    if not isinstance(told, list) or not all(isinstance(one, str) for one in told):
        raise JaxpflError(f"{folder.path / SUMMARY} is damaged: files must be names of files in the folder")
    lost = [name for name in told if not os.path.isfile(files.inside(folder.path, name))]  # also of names too long
    return [f"{folder.path / printable(name)} is missing" for name in lost], {"files": len(told) + 1}
