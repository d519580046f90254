"""Your own tables, ``csv:FILE``, with one or several columns of labels and, optionally, a column of clients' names.

The first line names the columns. Each column of numbers or dates becomes a feature. Each column of strings becomes
several features of 0 and 1, one for each distinct string. If no task is given, a single column of labels means
classification if it has strings or few distinct integers, and otherwise regression. Classes are numbered in the order
of their values. Several columns of labels must contain numbers; the task is multilabel if all numbers are 0 or 1, and
otherwise regression.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpfl.data.labels import checked_labels, narrowed, unlike_numbers
from jaxpfl.data.sources import csv_text
from jaxpfl.data.sources.base import Source, number_users
from jaxpfl.data.sources.csv_text import Table
from jaxpfl.data.sources.table_columns import check_single, columns_of, date_column, days_of, numbers_in
from jaxpfl.support.errors import JaxpflError, printable, shown, unknown_name, warn

MISSING = ("refuse", "drop", "impute", "impute-client")
_FEW = 20
"""Largest number of distinct integers that are considered classes."""


class TableOptions(NamedTuple):
    """Roles of a table's columns, given by name, and the treatment of missing values.

    Attributes:
      target: column of labels; several names are separated by commas.
      client: column of the clients' names; None if there is no such column.
      missing: treatment of missing values. "refuse" raises an error. "drop" leaves out rows with missing values, with a
        warning. "impute" replaces a missing value by the column's median (for strings, the most frequent string) in all
        clients' training rows, and adds a feature that indicates missing values. "impute-client" is like "impute", but
        uses only the client's own training rows.
      ignore: columns that do not become features.
      missing_words, encoding: arguments of `csv_text.read`.
      date: columns of dates, which become numbers of days.
      split_date: first day of the test rows. The day of a row is in the first column of ``date``. Rows of earlier days
        are training rows, in chronological order.
      person: column that names the person of each row. All of a person's rows at a client go to the same split (train,
        validation or test), and example-level privacy protects them together.
    """

    target: str | None = None
    client: str | None = None
    missing: str = "refuse"
    ignore: tuple[str, ...] = ()
    missing_words: str | None = None
    encoding: str | None = None
    date: tuple[str, ...] = ()
    split_date: str | None = None
    person: str | None = None

    def targets(self, names: Sequence[str]) -> tuple[str, ...]:
        """Split ``target`` into the names of the label columns, unless the table has a column with this whole name."""
        if self.target is None or self.target in names or "," not in self.target:
            return () if self.target is None else (self.target,)
        return tuple(part.strip() for part in self.target.split(","))

    @property
    def changed(self) -> str:
        """Name of the first option that differs from its default, or ""."""
        pairs = zip(self._fields, self, TableOptions._field_defaults.values(), strict=True)
        return next((name for name, value, default in pairs if value != default), "")


def load_table(name: str, path: Path, options: TableOptions, *, task: str | None = None) -> Source:
    """Load a data set from a table in CSV text.

    Args:
      name: name of the data set.
      path: file to read.
      options: columns of the table, and the treatment of missing values.
      task: task of the labels; by default, inferred from their values, with a warning.

    Raises:
      JaxpflError: if the file is not such a table (the message names the line and the column); if a column is unknown;
        if a value is missing that ``options.missing`` does not allow; if a column has neither numbers nor categories;
        if the labels do not suit the task; or if the client column names fewer than two clients.
    """
    if options.missing not in MISSING:
        raise unknown_name("treatment of missing values", options.missing, MISSING)
    table = csv_text.read(path, encoding=options.encoding, missing_words=options.missing_words)
    targets = options.targets(table.names)
    if not targets:
        raise JaxpflError(f"{name}: set target to the column of the labels; the columns are {table.listed}")
    roles = [*targets, *(own for own in (options.client, options.person) if own is not None)]
    for column in (*roles, *options.ignore, *options.date):
        if column not in table.names:
            raise unknown_name(f"column of {path}", column, table.names)
    if len(set(targets)) < len(targets):
        twice = next(column for column in targets if targets.count(column) > 1)
        raise JaxpflError(f"{name}: target names the column {shown(twice)} twice")
    if options.client in targets:
        raise JaxpflError(f"{name}: target and client must differ, got {shown(options.client)} for both")
    if options.person in (*targets, options.client) and options.person is not None:
        raise JaxpflError(f"{name}: person must differ from target and client, got {shown(options.person)}")
    for setting, names in (("ignore", options.ignore), ("date", options.date)):
        for column in names:
            if column in roles:
                holds = "label" if column in targets else "client" if column == options.client else "person"
                raise JaxpflError(f"{setting} must not name the {holds} column, got {column}")
    if options.split_date is not None and (not options.date or options.person is not None):
        both = "splits a person's rows: leave out split_date or person"
        lack = "requires date, the date column" if not options.date else both
        raise JaxpflError(f"{name}: split_date = {options.split_date} {lack}")
    columns = [column for column in table.names if column not in (*roles, *options.ignore)]
    needed = {*roles, *options.date[: options.split_date is not None]}
    needed = needed if "impute" in options.missing else needed | {*columns}
    table = _without_missing(table, [column for column in table.names if column in needed], options.missing)
    tested = np.zeros(len(table.cells), bool)
    if options.split_date is not None:
        table, tested = _split_by_date(table, options.date[0], options.split_date)
    labels = _labels(table, targets, task)
    if not columns:
        whose = "labels" if options.client is None else "labels and clients"
        raise JaxpflError(f"{path} has no feature columns, only {whose}: {printable(', '.join(roles), 300)}")
    features = columns_of(table, columns, options.date, per_client=options.missing == "impute-client")
    x = narrowed(features.apply(table))
    users = users_test = user_names = persons = None
    if options.client is not None:
        clients = np.array(table.texts(options.client))
        users, users_test, user_names = number_users(clients[~tested], clients[tested] if tested.any() else None)
        if len(user_names) < 2:
            alone = shown(str(user_names[0]))
            raise JaxpflError(f"{path}: column {shown(options.client)} names only one client, {alone}")
        if users_test is not None and not np.isin(users_test, users).any():
            raise JaxpflError(f"{path}: no client has rows both before and after split_date = {options.split_date}")
    if options.person is not None:
        persons, _, _ = number_users(np.array(table.texts(options.person)), None)
        pairs = np.unique(np.stack([persons, persons if users is None else users]), axis=1)
        shared, count = int((np.bincount(pairs[0]) > 1).sum()), persons.max() + 1
        if shared:
            holds = f"{shared} of {count} persons in column {shown(options.person)}"
            warn(f"{path}: {holds} have rows at several clients, and these rows may be in different splits")
    y = checked_labels(labels.y, f"{path}, {options.target}")
    names = None if labels.names is None else unlike_numbers(labels.names)
    description = f"{len(y)} rows of {path}, {x.shape[1]} features: {printable(features.words, 300)}"
    source = Source(name, x, y, None, None, labels.number, description, users, users_test, user_names=user_names)
    if tested.any():
        source = source._replace(
            x_train=x[~tested], y_train=y[~tested], x_test=x[tested], y_test=y[tested], ordered=True
        )
    return source._replace(task=labels.task, class_names=names, columns=features, persons=persons)


def _split_by_date(table: Table, column: str, first: str) -> tuple[Table, np.ndarray]:
    """Return the table with its rows in chronological order, and a mask of the rows dated ``first`` or later."""
    (day,) = days_of([first], "ISO8601")
    if np.isnan(day):
        raise JaxpflError(f"split_date must be a date such as 2025-01-31, got {shown(first)}")
    days = date_column(table, column).days(table)
    order = np.argsort(days, kind="stable")
    tested = days[order] >= day
    if tested.all() or not tested.any():
        side = "before" if tested.all() else "on or after"
        raise JaxpflError(f"{table.path}: no row is {side} split_date = {first}")
    return table._replace(cells=table.cells.iloc[order]), tested


def _without_missing(table: Table, needed: list[str], missing: str) -> Table:
    """Leave out the rows that lack a needed value if ``missing`` is "drop"; otherwise, such a row is an error."""
    gaps = np.stack([table.missing_in(name) for name in needed], axis=1)
    lacking = np.asarray(gaps.any(axis=1))
    if not lacking.any():
        return table
    if missing != "drop":
        row = int(lacking.argmax())
        column = needed[int(gaps[row].argmax())]
        cell = table.cells[column].iloc[row]
        impute = ", or replace missing values with --missing impute" if missing == "refuse" else ""
        means = f"; if {cell} is a value, set --missing-words without it" if cell else ""
        raise JaxpflError(
            f"{table.path} line {table.lines[row]}: no value in column {shown(column)}: fill it in, or leave such rows "
            f"out with --missing drop{impute}{means}"
        )
    if lacking.all():
        raise JaxpflError(f"{table.path}: every row lacks a value, so no row is left")
    warn(f"{table.path}: {lacking.sum()} of {len(lacking)} rows lack a value and are left out")
    return table._replace(cells=table.cells[~lacking])


class _Labels(NamedTuple):
    """Labels y, [N] or [N, d] for N rows, their task, the number of classes or label columns, and the class names."""

    y: np.ndarray
    task: str
    number: int
    names: np.ndarray | None = None


def _labels(table: Table, targets: Sequence[str], task: str | None) -> _Labels:
    """Read the labels in one or several columns.

    If no task is given, it is inferred from the labels' values, with a warning.
    """
    if len(targets) > 1:
        return _several_labels(table, targets, task)
    (target,) = targets
    numbers = numbers_in(table, target)
    texts = np.array(table.texts(target))
    distinct, first, places = np.unique(texts if numbers is None else numbers, return_index=True, return_inverse=True)
    if task is None:
        whole = numbers is None or bool((numbers == np.round(numbers)).all())
        task = "classification" if whole and (numbers is None or len(distinct) <= _FEW) else "regression"
        kind = "text" if numbers is None else "whole numbers" if whole else "real numbers"
        _warn_of_task(task, f"column {shown(target)} contains {len(distinct)} different values, {kind}")
    if task == "regression":
        if numbers is None:
            raise JaxpflError(f"{table.path}: 'regression' requires numbers, but column {shown(target)} contains text")
        check_single(table, target, numbers)
        return _Labels(numbers, task, 1)
    two = task in ("binary", "ranking")
    if task != "classification" and not two:
        raise JaxpflError(
            f"task = {task} requires several label columns (target = A,B): for one column, use classification, binary, "
            "ranking or regression"
        )
    if len(distinct) < 2 or (two and len(distinct) > 2):
        wanted = "two classes" if two else "at least two classes"
        raise JaxpflError(f"{table.path}: column {shown(target)} has {len(distinct)} different values, not {wanted}")
    if any(text.strip().lower() in ("true", "false") for text in texts[first]):
        distinct = texts[first]
    return _Labels(places.astype(np.int32), task, 1 if two else len(distinct), distinct)


def _several_labels(table: Table, targets: Sequence[str], task: str | None) -> _Labels:
    columns = []
    for name in targets:
        numbers = numbers_in(table, name)
        if numbers is None:
            raise JaxpflError(
                f"{table.path}: with several label columns, each must be numeric, but {shown(name)} contains text"
            )
        columns.append(numbers)
    y = np.stack(columns, axis=1)
    marks = (y == 0) | (y == 1)
    if task is None:
        task = "multilabel" if marks.all() else "regression"
        kind = "only 0 and 1" if marks.all() else "numbers other than 0 and 1"
        _warn_of_task(task, f"columns {printable(', '.join(targets), 300)} contain {kind}")
    if task == "regression":
        for name, numbers in zip(targets, columns, strict=True):
            check_single(table, name, numbers)
        return _Labels(y, task, len(targets))
    if task != "multilabel":
        raise JaxpflError(f"task = {task} requires one label column: for several columns, use multilabel or regression")
    for row, place in np.argwhere(~marks):
        holds = f"column {shown(targets[place])} contains {y[row, place]:g}"
        raise JaxpflError(f"{table.path} line {table.lines[row]}: 'multilabel' requires labels 0 or 1, but {holds}")
    return _Labels(y.astype(np.int32), task, len(targets))


def _warn_of_task(task: str, holds: str) -> None:
    warn(f"{holds}, so task = {task}: set the task to choose another")
