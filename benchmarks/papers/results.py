"""Results on disk: a file for each experiment, and one tidy table of all in a folder."""

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
"""Ending of the folder of a quick run."""
COMMITTED = Path(__file__).parent / "measured"
"""Results at full size that come with the package."""
_LARGEST = sys.float_info.max  # JSON has infinities, NaN, and whole numbers beyond all floats
_NUMBERS = ("ours", "std", "printed", "printed_std", "difference")
_COLUMNS = ("name", "paper", *Row.__dataclass_fields__, "quick")


@dataclass(frozen=True)
class Result:
    """Rows of an experiment, and how they came about.

    Attributes:
      name, paper, what: of the experiment.
      quick: whether the run was scaled down.
      command: that gives it.
      minutes: spent on it, in all sessions.
      versions: of the packages, and the machine, in all sessions that measured something.
      rows: in the order of print.
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
        """The result as JSON-able values."""
        return asdict(self) | {"rows": [row.to_json() for row in self.rows]}

    def tidy(self) -> list[dict[str, Any]]:
        """The rows with the experiment's name and paper."""
        of = {"name": self.name, "paper": self.paper}
        return [of | row.to_json() | {"quick": self.quick} for row in self.rows]


def read(path: Path) -> Result:
    """The result in a file.

    Raises:
      JaxpflError: for a file that holds none.
    """
    stored = files.read_checksummed(path, "jaxpfl papers run makes it again")
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
    """Folder of an experiment among others; a quick run has its own."""
    return folder / f"{experiment.name}{QUICK * quick}"


def committed() -> list[Result]:
    """Results that come with the package."""
    return [read(path) for path in sorted(COMMITTED.glob("*.json"))]


class Found(NamedTuple):
    """Results of a folder by name, and by the file's folder the errors of those that cannot be read."""

    results: list[Result]
    damaged: dict[str, JaxpflError]


def of_folder(folder: Path) -> Found:
    """Results in a folder of `place`s, none where nothing is finished; of other folders they are left out, and told."""
    found = Found([], {})
    for path in sorted(folder.glob(f"*/{RESULT}")):
        try:
            one = read(path)
        except JaxpflError as error:
            found.damaged[path.parent.name] = error
            continue
        if path.parent.name == f"{one.name}{QUICK * one.quick}":
            found.results.append(one)
        else:  # a copy, say, which is not the last result
            run = f"{'the quick' if one.quick else 'the full'} run of {printable(one.name)}"
            warn(f"left out: {path} is of {run}, which has a folder of another name")
    return found


def check_tidy(folder: Path) -> None:
    """Refuse a folder in which `write_tidy` would overwrite what something else wrote.

    Raises:
      JaxpflError: naming the file.
    """
    for path, ours in ((folder / ROWS_JSON, _is_rows), (folder / ROWS_CSV, _is_table)):
        if os.path.lexists(path) and not (path.is_file() and ours(path)):  # a pipe would never be read to its end
            raise JaxpflError(f"{path} is not of jaxpfl papers run, which writes one: choose another --output")


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
    """Write ``rows.json`` and ``rows.csv``: the rows of all experiments in a folder.

    Raises:
      UnwritableError: as on a full disk.
    """
    rows = [row for result in results for row in result.tidy()]
    files.write_json(folder / ROWS_JSON, {"rows": rows})
    with files.whole(folder / ROWS_CSV) as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def latest(known: Sequence[Result], own: Sequence[Result]) -> list[Result]:
    """Results of two origins; the second's take the place of the first's."""
    found = {(one.name, one.quick): one for one in (*known, *own)}
    return list(found.values())
