"""Records of a sweep: one for each method, setting and seed, in a journal that survives a kill at any moment.

A line of ``journal/main.jsonl`` is one record with its checksum. The records of one program are appended together, each
with the number of records that follow it, and count only if all are there: after a kill the same program runs again,
with the same numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, expecting, writing

if TYPE_CHECKING:
    import pandas

Value = bool | int | float | str
"""Value of a setting."""

DONE, DIVERGED, FAILED, STOPPED = "done", "diverged", "failed", "stopped"
STATUSES = (DONE, DIVERGED, FAILED, STOPPED)
JOURNAL = "journal"
_LEFT = "left"


def value_words(value: Value | None) -> str:
    """A value as the command line takes it; a dash for none."""
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Record:
    """One run of a sweep.

    Attributes:
      method: name of the method.
      settings: the values on the axes of the grid that concern the method, by the axis's name.
      seed: seed of the run.
      status: ``done``; ``diverged`` where the personalised model of some client is not finite; ``failed`` where nothing
        could be run; ``stopped`` where successive halving dropped it.
      reason: reason of any status but ``done``, in one line.
      rounds: rounds that were run; for a failed run, the rounds that were planned.
      metrics: the results by name, such as ``validation_accuracy`` and ``personalized_accuracy``; None if missing.
      seconds: seconds of its program without compiling, divided by the program's rows.
      group: name of the group of runs that differ in traced values only.
      program: name of the training program by its content; groups whose shapes are equal share one.
    """

    method: str
    settings: Mapping[str, Value]
    seed: int
    status: str = DONE
    reason: str = ""
    rounds: int = 0
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    seconds: float = 0.0
    group: str = ""
    program: str = ""

    @property
    def id(self) -> str:
        """Name of the run by its content: the method, the settings in any order, and the seed."""
        return run_id(self.method, self.settings, self.seed)


def run_id(method: str, settings: Mapping[str, Value], seed: int) -> str:
    """Name of a run by its content: the method, the settings in any order, and the seed."""
    text = json.dumps([method, dict(sorted(settings.items())), seed], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Journal:
    """The records of a sweep folder."""

    def __init__(self, folder: Path):
        self.path = folder / JOURNAL / "main.jsonl"

    def append(self, records: Iterable[Record]) -> None:
        """Append records, on disk when the call returns; if the append is cut short, none of them is read.

        Raises:
          UnwritableError: if they cannot be written, for example on a full disk.
        """
        records = list(records)
        lines = b"".join(_line(record, len(records) - i) for i, record in enumerate(records, 1))
        with writing(self.path):
            self.path.parent.mkdir(exist_ok=True)  # a sweep whose folder was taken away must not go on in another
            with open(self.path, "ab+", opener=files.no_link) as file:
                if file.tell():  # a line that a kill cut short must not swallow the next one
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":
                        lines = b"\n" + lines
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())

    def read(self) -> list[Record]:
        """Every run's record, in the order of the runs' first lines.

        If a run has several, the one with the most rounds counts, and among these the first that did not fail. A line
        that a kill cut short is left out, and with it all lines appended with it.

        Raises:
          JaxpflError: if a whole line is damaged.
        """
        found: dict[str, Record] = {}
        for record in _read(self.path) if self.path.exists() else ():
            known = found.get(record.id)
            if known is None or _got(known) < _got(record):
                found[record.id] = record
        return list(found.values())


def _got(record: Record) -> tuple[int, bool]:
    """Rank of a record among its run's records."""
    return record.rounds, record.status != FAILED


def _line(record: Record, left: int) -> bytes:
    text = json.dumps(files.jsonable(asdict(record) | ({_LEFT: left} if left else {})))
    return f"{zlib.crc32(text.encode()):08x} {text}\n".encode()


def _read(path: Path) -> list[Record]:
    lines = files.contents(path).split(b"\n")
    records: list[Record] = []
    begun: list[Record] = []
    awaited = 0
    for number, line in enumerate(lines, 1):
        checksum, _, text = line.partition(b" ")
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):  # cut short, as a complete line parses
            begun = []
            continue
        if checksum != f"{zlib.crc32(text):08x}".encode():
            raise JaxpflError(f"{path} line {number} is damaged: delete the line, and its run is run again")
        with expecting(f"{path} line {number}", "the record of a run"):
            left = values.pop(_LEFT, 0)
            if type(left) is not int or left < 0:
                raise TypeError(f"{left!r} is not a number of records")
            if left != awaited:  # records before this one are missing
                begun = []
            begun.append(_checked(Record(**values)))
        awaited = max(left - 1, 0)
        if not left:
            records += begun
            begun = []
    return records


def _checked(record: Record) -> Record:
    """The record.

    Raises:
      TypeError, ValueError: if the values do not make a record.
    """
    if record.status not in STATUSES:
        raise ValueError(f"status {record.status!r}")
    texts = (record.method, record.reason, record.group, record.program, *record.settings, *record.metrics)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is not text")
        text.encode()  # half of a surrogate pair cannot be encoded
    for value in record.settings.values():
        if not isinstance(value, bool | int | float | str):
            raise TypeError(f"{value!r} is not a setting")
    for number in (record.seconds, *record.metrics.values()):
        if number is not None and type(number) not in (int, float):
            raise TypeError(f"{number!r} is not a number")
    if type(record.seed) is not int or type(record.rounds) is not int or record.rounds < 0:
        raise ValueError(f"seed {record.seed!r} after {record.rounds!r} rounds")
    return record


def load_sweep(folder: str | Path) -> pandas.DataFrame:
    """The records of a sweep folder as a table, finished or not: one row for each method, setting and seed.

    Columns: ``method``, one for each axis of the grid (empty where it does not concern the method), ``seed``,
    ``status``, ``reason``, ``rounds``, one for each metric, ``seconds`` and ``group``.

    Example::

        table = jaxpfl.load_sweep("runs/sweep")
        table.groupby(["method", "lr"]).personalized_accuracy.mean()

    Raises:
      JaxpflError: for a folder that holds no sweep, and a damaged journal.
    """
    import pandas

    folder = Path(folder)
    if not (folder / JOURNAL).is_dir():
        raise JaxpflError(f"{folder} is not a sweep folder: it has no {JOURNAL}")
    return pandas.DataFrame(rows(Journal(folder).read()))


def rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """The records as flat rows with the same columns, as `load_sweep` names them."""
    records = list(records)
    axes = list(dict.fromkeys(name for record in records for name in record.settings))
    metrics = list(dict.fromkeys(name for record in records for name in record.metrics))
    return [
        {
            "method": one.method,
            **{name: one.settings.get(name) for name in axes},
            **{"seed": one.seed, "status": one.status, "reason": one.reason, "rounds": one.rounds},
            **{name: one.metrics.get(name) for name in metrics},
            **{"seconds": one.seconds, "group": one.group},
        }
        for one in records
    ]
