"""Tables of one's own: ``csv:FILE`` with a column of labels and, where clients are known, a column that names them.

The first line names the columns. Columns of numbers are features as they are; columns of text become one feature of 0
and 1 for each text that occurs in them. Labels that are text, or few whole numbers, are classes, in the order of their
values; any others are real numbers of a regression, unless the task is named. Several columns of labels, all of
numbers, are those of multilabel where all are 0 or 1, else of a regression.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpfl.data.labels import checked_labels, unlike_numbers
from jaxpfl.data.precision import narrowed
from jaxpfl.data.sources import csv_text
from jaxpfl.data.sources.base import Source, number_users
from jaxpfl.data.sources.csv_text import Table
from jaxpfl.errors import JaxpflError, JaxpflWarning, printable, shown, unknown_name
from jaxpfl.files import check_fits

MISSING = ("refuse", "drop")
_FEW = 20
"""Most distinct whole numbers that count as classes."""
_MOST_TEXTS = 1000
_SEVERAL_TEXTS = 20
"""Different texts above which a column is doubted, such as dates; and the fewest rows of which numbers are told."""
_FREE = 0.5  # of the rows: a column with as many different texts is no category


class TableOptions(NamedTuple):
    """Columns of a table by name, and the treatment of its missing values.

    Attributes:
      target: of the labels; several with commas between them.
      client: of the clients' names, or None.
      missing: a name in `MISSING`: rows with a missing value are refused, or left out with a warning.
      ignore: those that are left out of the table, whatever they hold.
    """

    target: str | None = None
    client: str | None = None
    missing: str = "refuse"
    ignore: tuple[str, ...] = ()

    def targets(self, names: Sequence[str]) -> tuple[str, ...]:
        """Columns of the labels, of a table of these; the name of a single column may hold commas."""
        if self.target is None or self.target in names or "," not in self.target:
            return () if self.target is None else (self.target,)
        return tuple(part.strip() for part in self.target.split(","))

    @property
    def given(self) -> str:
        """The first option that differs from its default; empty if none does."""
        pairs = zip(self._fields, self, TableOptions._field_defaults.values(), strict=True)
        return next((name for name, value, default in pairs if value != default), "")


class _Rows(NamedTuple):
    """Columns of cells, and each row's line in the file."""

    path: Path
    names: list[str]
    lines: list[int]
    cells: list[list[str]]

    def column(self, name: str) -> list[str]:
        place = self.names.index(name)
        return [row[place] for row in self.cells]


class Feature(NamedTuple):
    """A feature of a table: a column of numbers, or a text of a column of texts, 1 where it stands and else 0."""

    column: str
    text: str | None = None


class Columns(NamedTuple):
    """Contents of a table.

    Attributes:
      x: features, [N, d], in double precision and within the range of single precision.
      y: labels, [N] or [N, several]; int32 where they are classes, or 0 and 1.
      task: that of the labels.
      classes: number of classes, or of labels.
      features: of the columns of x, [d].
      class_names: [classes] the labels' own numbers or texts, two of them for binary; None for labels of no classes.
      users: the client of each row in 0 .. U - 1, [N], and user_names [U]; None without a column of clients.
    """

    x: np.ndarray
    y: np.ndarray
    task: str
    classes: int
    features: list[Feature]
    users: np.ndarray | None = None
    user_names: np.ndarray | None = None
    class_names: np.ndarray | None = None


def load_table(name: str, path: Path, options: TableOptions, *, task: str | None = None) -> Source:
    """Load a data set from a table in CSV text; arguments and errors as `read_table`."""
    of = read_table(name, path, options, task=task)
    y = checked_labels(of.y, f"{path}, {options.target}")
    names = None if of.class_names is None else unlike_numbers(of.class_names)
    said = f"{len(y)} rows of {path}, {of.x.shape[1]} features"
    return Source(
        name, narrowed(of.x), y, None, None, of.classes, said, users_train=of.users,
        user_names=of.user_names, task=of.task, class_names=names,
    )  # fmt: skip


def read_table(name: str, path: Path, options: TableOptions, *, task: str | None = None) -> Columns:
    """Read features, labels and clients from a table in CSV text.

    Args:
      name: of the data, for messages.
      path: the file.
      options: its columns.
      task: that of the labels; by their values, with a warning that says so, unless given.

    Raises:
      JaxpflError: for a file that is no such table, naming line and column; unknown columns; missing values; columns
        that are neither numbers nor categories; labels that are not those of the task; and fewer than two clients.
    """
    if options.missing not in MISSING:
        raise unknown_name("treatment of missing values", options.missing, MISSING)
    table = _read(path)
    rows = _body(table)
    targets = options.targets(rows.names)
    rows = _without(rows, options, targets)
    if not targets:
        raise JaxpflError(f"{name}: target = COLUMN is needed, the labels; there are {_listed(rows.names)}")
    for place, column in enumerate(targets):
        if column in targets[:place]:
            raise JaxpflError(f"{name}: target names the column {shown(column)} twice")
    for column in (*targets, options.client):
        if column is not None and column not in rows.names:
            raise unknown_name(f"column of {path}", column, rows.names)
    if options.client in targets:
        raise JaxpflError(f"{name}: target and client are one column, {shown(options.client)}")
    rows = _without_missing(rows, options.missing)
    first, *others = targets
    class_names = None
    if others:
        y, task = _several_labels(table, rows, targets, task)
        classes = len(targets)
    else:
        y, task, class_names = _labels(table, rows, first, task)
        classes = len(class_names) if class_names is not None and task == "classification" else 1
    columns = [column for column in rows.names if column not in (*targets, options.client)]
    if not columns:
        raise JaxpflError(f"{path}: no column of features beside {_listed([*targets, options.client])}")
    x, features = _inputs(table, rows, columns)
    if options.client is None:
        return Columns(x, y, task, classes, features, class_names=class_names)
    users, _, names = number_users(np.array(rows.column(options.client)), None)
    if len(names) < 2:
        raise JaxpflError(f"{path}: column {shown(options.client)} names one client alone, {shown(str(names[0]))}")
    return Columns(x, y, task, classes, features, users, names, class_names)


def _read(path: Path) -> Table:
    text = csv_text.text_of(path)
    first = next((line for line in text.splitlines() if line.strip()), None)
    if first is None:
        raise JaxpflError(f"{path}: the file is empty")
    known: list[tuple[int, bool, csv_text.Separator]] = []
    for separator, mark in csv_text.SEPARATORS.items():
        if mark != " ":
            known.append((first.count(mark), separator == "comma", separator))
    separator = max(known)[2]
    return csv_text.read(path, separator, "point" if separator == "comma" else None)


def _body(table: Table) -> _Rows:
    """The rows below the header, each of its length."""
    path = table.path
    if not table.rows:
        raise JaxpflError(f"{path}: no line has any value")
    (line, names), *rest = table.rows
    numbers = [name for name in names if table.number(name) is not None]
    if len(numbers) == len(names):
        raise JaxpflError(f"{path} line {line}: numbers where the names of the columns should be: put a header there")
    for place, name in enumerate(names, start=1):
        if not name:
            raise JaxpflError(f"{path} line {line}: column {place} has no name")
        if names.index(name) != place - 1:
            raise JaxpflError(f"{path} line {line}: two columns are named {shown(name)}")
    if not rest:
        raise JaxpflError(f"{path}: a header and no rows")
    for line, cells in rest:
        if len(cells) != len(names):
            raise JaxpflError(f"{path} line {line}: {len(cells)} cells, the header has {len(names)}")
    return _Rows(path, names, [line for line, _ in rest], [cells for _, cells in rest])


def _without(rows: _Rows, options: TableOptions, targets: Sequence[str]) -> _Rows:
    """The columns that are not to be ignored."""
    for column in options.ignore:
        if column not in rows.names:
            raise unknown_name(f"column of {rows.path}", column, rows.names)
        if column in (*targets, options.client):
            raise JaxpflError(f"ignore = {column}: it is the column of the {_role(column, targets)}")
    places = [place for place, name in enumerate(rows.names) if name not in options.ignore]
    kept = [[cells[place] for place in places] for cells in rows.cells]
    return rows._replace(names=[rows.names[place] for place in places], cells=kept)


def _role(column: str, targets: Sequence[str]) -> str:
    return "labels" if column in targets else "clients"


def _without_missing(rows: _Rows, missing: str) -> _Rows:
    """The rows without missing values; refused where they are not to be left out."""
    kept = []
    for i, cells in enumerate(rows.cells):
        if not any(map(csv_text.is_missing, cells)):
            kept.append(i)
        elif missing == "refuse":
            column = next(name for name, cell in zip(rows.names, cells, strict=True) if csv_text.is_missing(cell))
            raise JaxpflError(
                f"{rows.path} line {rows.lines[i]}: no value in column {shown(column)}: fill it in, or leave such rows "
                "out with --missing drop"
            )
    if not kept:
        raise JaxpflError(f"{rows.path}: every row lacks a value")
    if len(kept) < len(rows.cells):
        warnings.warn(
            f"{rows.path}: left out {len(rows.cells) - len(kept)} of {len(rows.cells)} rows, which lack a value",
            JaxpflWarning,
            stacklevel=2,
        )
    return rows._replace(lines=[rows.lines[i] for i in kept], cells=[rows.cells[i] for i in kept])


def _labels(table: Table, rows: _Rows, target: str, task: str | None) -> tuple[np.ndarray, str, np.ndarray | None]:
    """Labels, their task, and the classes' names, None for a regression."""
    cells = rows.column(target)
    numbers = _numbers(table, rows, target)
    distinct, places = np.unique(np.array(cells) if numbers is None else numbers, return_inverse=True)
    if task is None:
        whole = numbers is None or bool((numbers == np.round(numbers)).all())
        task = "classification" if whole and (numbers is None or len(distinct) <= _FEW) else "regression"
        kind = "text" if numbers is None else "whole numbers" if whole else "real numbers"
        warnings.warn(
            f"task = {task}, as column {shown(target)} holds {len(distinct)} different values, {kind}: name the task "
            "to choose another",
            JaxpflWarning,
            stacklevel=2,
        )
    if task == "regression":
        if numbers is None:
            raise JaxpflError(f"{rows.path}: labels of a regression are numbers, column {shown(target)} holds text")
        return _single(rows, target, numbers), task, None
    two = task in ("binary", "ranking")
    if task != "classification" and not two:
        raise JaxpflError(
            f"task = {task}: one column of labels is of classification, binary, ranking or regression; give several as "
            "target = A,B"
        )
    if len(distinct) < 2 or (two and len(distinct) > 2):
        wanted = "two classes" if two else "at least two classes"
        raise JaxpflError(f"{rows.path}: column {shown(target)} has {len(distinct)} different values, not {wanted}")
    return places.astype(np.int32), task, distinct


def _several_labels(table: Table, rows: _Rows, targets: Sequence[str], task: str | None) -> tuple[np.ndarray, str]:
    """Labels [N, d] of several columns, and their task."""
    columns = []
    for name in targets:
        numbers = _numbers(table, rows, name)
        if numbers is None:
            raise JaxpflError(f"{rows.path}: several columns of labels hold numbers, column {shown(name)} holds text")
        columns.append(numbers)
    y = np.stack(columns, axis=1)
    marks = (y == 0) | (y == 1)
    if task is None:
        task = "multilabel" if marks.all() else "regression"
        kind = "0 and 1 alone" if marks.all() else "other numbers than 0 and 1"
        warnings.warn(
            f"task = {task}, as columns {_listed(targets)} hold {kind}: name the task to choose another",
            JaxpflWarning,
            stacklevel=3,
        )
    if task == "regression":
        return np.stack([_single(rows, name, of) for name, of in zip(targets, columns, strict=True)], axis=1), task
    if task != "multilabel":
        raise JaxpflError(f"task = {task}: several columns of labels are of multilabel or regression")
    if not marks.all():
        row, place = (int(at) for at in np.argwhere(~marks)[0])
        holds = f"column {shown(targets[place])} holds {y[row, place]:g}"
        raise JaxpflError(f"{rows.path} line {rows.lines[row]}: labels of multilabel are 0 or 1, {holds}")
    return y.astype(np.int32), task


def _single(rows: _Rows, column: str, numbers: np.ndarray) -> np.ndarray:
    """Numbers of a column, which single precision must hold."""
    with np.errstate(over="ignore"):
        held = np.isfinite(numbers.astype(np.float32))
    if not held.all():
        line = rows.lines[int(np.argmin(held))]
        raise JaxpflError(f"{rows.path} line {line}: column {shown(column)} holds a number beyond 32 bits")
    return numbers


def _inputs(table: Table, rows: _Rows, names: list[str]) -> tuple[np.ndarray, list[Feature]]:
    """Features [N, d]: columns of numbers as they are, and one of 0 and 1 for each text of the others."""
    columns: list[np.ndarray] = []
    features: list[Feature] = []
    for name in names:
        numbers = _numbers(table, rows, name)
        if numbers is not None:
            columns.append(_single(rows, name, numbers)[:, None])
            features.append(Feature(name))
            if _counts_rows(numbers):
                _doubt(rows, f"column {shown(name)} rises with every row, as a number of the row does", name)
            continue
        texts, places = np.unique(np.array(rows.column(name)), return_inverse=True)
        if len(texts) > min(_MOST_TEXTS, max(_FREE * len(places), 2)):
            raise JaxpflError(
                f"{rows.path}: column {shown(name)} has {len(texts)} different texts in {len(places)} rows, too many "
                "for categories: take it out of the table"
            )
        check_fits(rows.path, 8 * len(texts) * len(places))
        if len(texts) > _SEVERAL_TEXTS:
            _doubt(rows, f"column {shown(name)} becomes {len(texts)} features, one for each text in it", name)
        columns.append((places[:, None] == np.arange(len(texts))).astype(np.float64))
        features += [Feature(name, str(text)) for text in texts]
    return np.concatenate(columns, axis=1), features


def _counts_rows(numbers: np.ndarray) -> bool:
    """True for whole numbers that rise by one, with few gaps, from row to row."""
    if len(numbers) < _SEVERAL_TEXTS:
        return False
    steps = np.diff(numbers)
    return bool((steps >= 1).all() and (steps == np.round(steps)).all() and steps.mean() < 2)


def _doubt(rows: _Rows, said: str, name: str) -> None:
    warnings.warn(f"{rows.path}: {said}: --ignore {shown(name)} leaves it out", JaxpflWarning, stacklevel=2)


def _numbers(table: Table, rows: _Rows, name: str) -> np.ndarray | None:
    """The numbers of a column, [N]; None for one of text.

    Raises:
      JaxpflError: for a column of numbers with some text in it.
    """
    found = [table.number(cell) for cell in rows.column(name)]
    wrong = [i for i, value in enumerate(found) if value is None]
    if not wrong:
        return np.array(found, np.float64)
    if len(wrong) < len(found) / 2:
        cell = rows.column(name)[wrong[0]]
        raise JaxpflError(
            f"{rows.path} line {rows.lines[wrong[0]]}: column {shown(name)} holds {shown(cell)}, and numbers in most "
            "other rows"
        )
    return None


def _listed(names: Sequence[str | None]) -> str:
    return printable(", ".join(name for name in names if name is not None), 300)
