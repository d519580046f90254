"""Results on disk: a file for each experiment, and one tidy table of all experiments in a folder."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, printable, warn

from .compare import Row
from .declared import Experiment

RESULT = "result.json"
ROWS_JSON, ROWS_CSV = "rows.json", "rows.csv"
QUICK = "-quick"
"""Suffix of the folder of a quick run."""
COMMITTED = Path(__file__).parent / "measured"
"""Folder of the results of full runs that come with the package."""
_LARGEST = sys.float_info.max  # JSON allows infinities, NaN, and integers that are too large for a float
_NUMBERS = ("ours", "std", "printed", "printed_std", "difference")
_COLUMNS = ("name", "paper", *Row.__dataclass_fields__, "quick")


@dataclass(frozen=True)
class Result:
    """Rows of an experiment, and how they were computed.

    Attributes:
      name, paper, what: fields of the experiment.
      quick: whether the run was scaled down.
      command: command that reproduces the result.
      minutes: time spent in all sessions.
      versions: versions of the packages, and the machine, in all sessions that measured something.
      rows: rows in the order of the paper.
    """

    name: str
    paper: str
    what: str
    quick: bool
    command: str
    minutes: float
    versions: dict[str, Any]
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self) | {"rows": [row.to_json() for row in self.rows]}

    def tidy(self) -> list[dict[str, Any]]:
        """Return the rows with the experiment's name and paper."""
        of = {"name": self.name, "paper": self.paper}
        return [of | row.to_json() | {"quick": self.quick} for row in self.rows]


def read(path: Path) -> Result:
    """Read the result in a file.

    Raises:
      JaxpflError: if the file contains no result.
    """
    stored = files.read_checksummed(path, "run jaxpfl papers run again to recreate it")
    try:
        values: dict[str, Any] = {**stored, "rows": tuple(Row(**one) for one in stored["rows"])}
        found = Result(**values)
    except (KeyError, TypeError):
        found = None
    if found is None or not _typed(found):
        raise JaxpflError(f"{path} holds no result of jaxpfl papers run: remove it, and run the table again")
    return found


def _typed(found: Result) -> bool:
    numbers = [found.minutes, *(getattr(row, name) for row in found.rows for name in _NUMBERS)]
    texts = [found.name, found.paper, found.what, found.command]
    texts += [text for row in found.rows for text in (row.method, row.setting, row.note)]
    return (
        found.minutes is not None
        and isinstance(found.quick, bool)
        and isinstance(found.versions, dict)
        and all(one is None or (type(one) in (int, float) and abs(one) <= _LARGEST) for one in numbers)
        and all(isinstance(one, str) for one in texts)
    )


def place(folder: Path, experiment: Experiment, *, quick: bool) -> Path:
    """Return the folder of an experiment; a quick run has a separate folder."""
    return folder / f"{experiment.name}{QUICK * quick}"


def committed() -> list[Result]:
    """Return the results that come with the package."""
    return [read(path) for path in sorted(COMMITTED.glob("*.json"))]


class Found(NamedTuple):
    """Results in a folder by name, and errors of files that cannot be read, by the file's folder."""

    results: list[Result]
    damaged: dict[str, JaxpflError]


def of_folder(folder: Path) -> Found:
    """Return the results in a folder; a result in a subfolder with another name is left out with a warning."""
    found = Found([], {})
    for path in sorted(folder.glob(f"*/{RESULT}")):
        try:
            one = read(path)
        except JaxpflError as error:
            found.damaged[path.parent.name] = error
            continue
        if path.parent.name == f"{one.name}{QUICK * one.quick}":
            found.results.append(one)
        else:  # for example a copy, which is not the latest result
            run = f"{'the quick' if one.quick else 'the full'} run of {printable(one.name)}"
            warn(f"left out: {path} is of {run}, whose folder should have another name")
    return found


def check_tidy(folder: Path) -> None:
    """Refuse a folder in which `write_tidy` would overwrite a file of something else.

    Raises:
      JaxpflError: if there is such a file; the message names it.
    """
    for path, ours in ((folder / ROWS_JSON, _is_rows), (folder / ROWS_CSV, _is_table)):
        if os.path.lexists(path) and not (path.is_file() and ours(path)):  # reading a pipe would never end
            raise JaxpflError(f"{path} was not written by jaxpfl papers run: choose another --output")


def _is_rows(path: Path) -> bool:
    try:
        stored = files.read_json(path)
    except JaxpflError:
        return False
    if not isinstance(stored, dict) or stored.keys() != {"rows"} or not isinstance(stored["rows"], list):
        return False
    return all(isinstance(one, dict) and one.keys() == {*_COLUMNS} for one in stored["rows"])


def _is_table(path: Path) -> bool:
    begins = f"{','.join(_COLUMNS)}\n".encode()
    try:
        with files.opened(path) as file:
            return file.read(len(begins)) == begins
    except OSError:
        return False


def write_tidy(folder: Path, results: Iterable[Result]) -> None:
    """Write ``rows.json`` and ``rows.csv``, the rows of all experiments in a folder.

    Raises:
      UnwritableError: if a file cannot be written, for example on a full disk.
    """
    rows = [row for result in results for row in result.tidy()]
    files.write_json(folder / ROWS_JSON, {"rows": rows})
    with files.whole(folder / ROWS_CSV) as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def latest(known: Sequence[Result], own: Sequence[Result]) -> list[Result]:
    """Merge two sets of results; a result in ``own`` replaces the result in ``known`` with the same name."""
    found = {(one.name, one.quick): one for one in (*known, *own)}
    return list(found.values())
