"""Records of a sweep's runs, one for each method, setting and seed, in a journal file.

If the process is killed, the journal remains readable. Each line of ``journal/main.jsonl`` is a checksum and a record.
The records of the runs that one program executes are appended together, each with the number of records that follow
it. These records are read only if all of them are present. Otherwise the sweep executes the program again and gets the
same results.
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
    """Return a value as it is written on the command line; a dash for None."""
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Record:
    """Record of one run of a sweep.

    Attributes:
      method: name of the method.
      settings: the run's value on each axis of the grid, as axis name -> value. Axes that do not affect the method are
        omitted.
      seed: seed of the run.
      status: ``done``, ``diverged`` (some client's personalized model is not finite), ``failed`` (the run could not be
        executed) or ``stopped`` (by successive halving).
      reason: reason for any status other than ``done``, on one line.
      rounds: number of rounds that were run; for a failed run, the number of rounds that were planned.
      metrics: results by name, such as ``validation_accuracy`` and ``personalized_accuracy``; None for a missing value.
      seconds: execution time of the run's program without compilation, divided by the number of runs in the program.
      group: name of the group of runs that differ in traced values only.
      program: name of the training program, derived from its content; groups with equal shapes share a program.
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
        """Identifier of the run, as `run_id` returns it."""
        return run_id(self.method, self.settings, self.seed)


def run_id(method: str, settings: Mapping[str, Value], seed: int) -> str:
    """Return the identifier of a run, a hash of the method, the settings (in any order) and the seed."""
    text = json.dumps([method, dict(sorted(settings.items())), seed], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Journal:
    """The file with the records of a sweep folder."""

    def __init__(self, folder: Path):
        self.path = folder / JOURNAL / "main.jsonl"

    def append(self, records: Iterable[Record]) -> None:
        """Append records, and flush them to the disk.

        If the process is killed while it appends, `read` ignores all of these records.

        Raises:
          UnwritableError: if the records cannot be written, for example on a full disk.
        """
        records = list(records)
        lines = b"".join(_line(record, len(records) - i) for i, record in enumerate(records, 1))
        with writing(self.path):
            # Without parents=True: if the sweep's folder was moved away, the sweep must not continue in a new folder.
            self.path.parent.mkdir(exist_ok=True)
            with open(self.path, "ab+", opener=files.no_link) as file:
                if file.tell():  # the last line may lack its end after a kill, and the next record needs a new line
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":
                        lines = b"\n" + lines
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())

    def read(self) -> list[Record]:
        """Return one record for every run, in the order in which the runs first appear.

        If a run has several records, the record with the most rounds is returned. Among records with the same number of
        rounds, the first that does not report a failure is preferred. Records are left out if the process was killed
        while it appended them.

        Raises:
          JaxpflError: if a complete line is damaged.
        """
        found: dict[str, Record] = {}
        for record in _read(self.path) if self.path.exists() else ():
            known = found.get(record.id)
            if known is None or _got(known) < _got(record):
                found[record.id] = record
        return list(found.values())


def _got(record: Record) -> tuple[int, bool]:
    """Return the sort key by which `Journal.read` chooses among the records of one run; the largest is chosen."""
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
        except (ValueError, RecursionError):  # a line that cannot be parsed is incomplete
            begun = []
            continue
        if checksum != f"{zlib.crc32(text):08x}".encode():
            raise JaxpflError(f"{path} line {number} is damaged: delete the line to have its run repeated")
        with expecting(f"{path} line {number}", "the record of a run"):
            left = values.pop(_LEFT, 0)
            if type(left) is not int or left < 0:
                raise TypeError(f"{left!r} is not a number of records")
            if left != awaited:  # earlier records of the same append are missing
                begun = []
            begun.append(_checked(Record(**values)))
        awaited = max(left - 1, 0)
        if not left:
            records += begun
            begun = []
    return records


def _checked(record: Record) -> Record:
    """Return the record if its values are valid.

    Raises:
      TypeError, ValueError: if a value has the wrong type or is not allowed.
    """
    if record.status not in STATUSES:
        raise ValueError(f"status {record.status!r}")
    texts = (record.method, record.reason, record.group, record.program, *record.settings, *record.metrics)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is not text")
        text.encode()  # raises ValueError for a lone surrogate, which could not be written to a file
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
    """Return the records of a sweep folder as a table, with a row for each method, setting and seed.

    The sweep need not be finished. The columns are ``method``, one column for each axis of the grid (empty if the axis
    does not affect the method), ``seed``, ``status``, ``reason``, ``rounds``, one column for each metric, ``seconds``
    and ``group``. `Record` describes them.

    Example::

        table = jaxpfl.load_sweep("runs/sweep")
        table.groupby(["method", "lr"]).personalized_accuracy.mean()

    Raises:
      JaxpflError: if the folder contains no sweep, or the journal is damaged.
    """
    import pandas

    folder = Path(folder)
    if not (folder / JOURNAL).is_dir():
        raise JaxpflError(f"{folder} is not a sweep folder: it has no {JOURNAL}")
    return pandas.DataFrame(rows(Journal(folder).read()))


def rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return the records as rows of the table that `load_sweep` describes; all rows have the same columns."""
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
