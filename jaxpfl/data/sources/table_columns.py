"""Features of a table: the columns that become features, and the replacements for missing values.

A column of numbers is one feature, and so is a column of dates (days since 1970). A column of strings becomes one 0/1
feature per distinct string (level). A column with missing values has one more feature, which is 1 where the value is
missing. `TableColumns` records these choices, so that new rows get the same features.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from jaxpfl.data.sources import csv_text
from jaxpfl.data.sources.csv_text import MISSING, Table
from jaxpfl.support.errors import JaxpflError, printable, shown, warn
from jaxpfl.support.files import check_fits

if TYPE_CHECKING:
    import pandas

Kind: TypeAlias = Literal["numeric", "categorical", "date"]

_DATES = ("ISO8601", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y")
"""Supported date formats, as in `pandas.to_datetime`; all dates of a column must have the same format."""
_MANY_TEXTS = 30  # a column with more distinct strings causes a warning

_MOST_TEXTS = 1000
_FREE = 0.5  # a column whose distinct strings exceed this fraction of the rows is not categorical
_MARKED = re.compile(r"[-+]?\s*[$€£¥]\s*[-+]?\d[\d.,' ]*|[-+]?\d[\d.,' ]*[%$€£¥]")
"""Cells with a number and a percent or currency sign, which would otherwise become categories."""


class Column(NamedTuple):
    """A column of a table and its features.

    Attributes:
      name: name of the column.
      kind: "numeric" for one feature; "categorical" for a 0/1 feature per level; or "date" for one feature, the number
        of days since 1970.
      levels: distinct strings of a categorical column, in the order of their features.
      gaps: whether values may be missing. If true, the column's last feature is 1 where the value is missing.
      fill: number or level that replaces missing values; None if ``gaps`` is false.
      date_format: format of a column's dates, as in `pandas.to_datetime`.
    """

    name: str
    kind: Kind
    levels: tuple[str, ...] = ()
    gaps: bool = False
    fill: float | str | None = None
    date_format: str | None = None

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the column's features."""
        values = [f"{self.name} = {level}" for level in self.levels] if self.kind == "categorical" else [self.name]
        return (*values, *([f"{self.name} missing"] if self.gaps else []))

    @property
    def fill_features(self) -> list[float]:
        """Features of a row in which the column's value is missing, without the feature that indicates this."""
        return [float(level == self.fill) for level in self.levels] or [float(self.fill or 0.0)]

    def apply(self, table: Table) -> np.ndarray:
        """Return this column's d features for a table's N rows, float64 [N, d] (see `TableColumns.apply`)."""
        import pandas

        name = table.find(self.name)
        cells = table.cells[name]
        lacking = table.missing_in(name)
        if lacking.any() and not self.gaps:
            line = table.lines[int(lacking.argmax())]
            raise JaxpflError(f"{table.path} line {line}: no value in column {shown(name)}: fill it in")
        if self.kind == "categorical":
            check_fits(table.path, 8 * len(self.levels) * len(cells))
            texts = pandas.Index(cells.mask(lacking, self.fill), dtype=object)
            places = pandas.Index(self.levels, dtype=object).get_indexer(texts)
            if (places < 0).any():
                row = int(places.argmin())
                known = printable(", ".join(self.levels), 200)
                raise JaxpflError(
                    f"{table.path} line {table.lines[row]}: column {shown(name)} contains {shown(cells.iloc[row])}, "
                    f"which is not one of its known categories: {known}"
                )
            features = (places[:, None] == np.arange(len(self.levels))).astype(np.float64)
        else:
            numbers = table.numbers(name, missing=True) if self.date_format is None else self.days(table)
            check_single(table, name, numbers)
            features = np.where(lacking, self.fill or 0.0, numbers)[:, None]
        return np.column_stack([features, lacking]) if self.gaps else features

    def days(self, table: Table) -> np.ndarray:
        """Return the dates of a table's rows as days since 1970, [N]; missing dates become NaN."""
        name = table.find(self.name)
        assert self.date_format is not None
        days = days_of(table.cells[name], self.date_format)
        wrong = np.isnan(days) & ~table.missing_in(name)
        if wrong.any():
            raise _no_date(table, name, int(wrong.argmax()))
        return days


class TableColumns(NamedTuple):
    """The columns of a table that become features, in the order of the features.

    Attributes:
      columns: columns and their features.
      missing: words that mark a cell without a value, in lower case.
      per_client: whether missing values are replaced by the median or the most frequent string of the client's own
        training rows. If false, all clients' training rows are used.
      client_fills: values that replace a client's missing values, by client id. There is one value for each column with
        ``gaps``, in the order of the columns. `fills_of` computes them if ``per_client`` is true; otherwise None.

    Examples:
      >>> import pandas
      >>> columns = TableColumns((Column("age", "numeric"), Column("ward", "categorical", ("icu", "surgery"))))
      >>> columns.feature_names
      ('age', 'ward = icu', 'ward = surgery')
      >>> columns.apply(pandas.DataFrame({"ward": ["surgery"], "age": [61.5]}))
      array([[61.5,  0. ,  1. ]])
    """

    columns: tuple[Column, ...]
    missing: tuple[str, ...] = MISSING
    per_client: bool = False
    client_fills: Mapping[int, tuple[float | str, ...]] | None = None

    @property
    def gaps(self) -> list[tuple[Column, slice]]:
        """Columns with gaps, and for each the slice of its features; its last feature indicates missing values."""
        ends = np.cumsum([len(column.feature_names) for column in self.columns]).tolist()
        places = [slice(end - len(own.feature_names), end) for own, end in zip(self.columns, ends, strict=True)]
        return [(own, place) for own, place in zip(self.columns, places, strict=True) if own.gaps]

    def filled(self, fills: Iterable[float | str]) -> TableColumns:
        """Return a copy that replaces missing values by ``fills``, which has one value for each column with gaps."""
        rest = iter(fills)
        return self._replace(columns=tuple(own._replace(fill=next(rest)) if own.gaps else own for own in self.columns))

    def of_client(self, client_id: int | None) -> TableColumns:
        """Return a copy that replaces missing values as for this client, if ``client_fills`` has the client."""
        own = None if client_id is None else (self.client_fills or {}).get(client_id)
        return self if own is None else self.filled(own)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features, [d]."""
        return tuple(name for column in self.columns for name in column.feature_names)

    @property
    def words(self) -> str:
        """Description of the columns for display."""
        texts = [own.name for own in self.columns]
        for place, own in enumerate(self.columns):
            texts[place] += {"categorical": f" ({len(own.levels)} categories)", "date": " (days)"}.get(own.kind, "")
            texts[place] += " or missing" if own.gaps else ""
        return "; ".join(texts)

    def apply(self, table: Table | pandas.DataFrame) -> np.ndarray:
        """Return the unscaled features of a table's rows, float64 [N, d].

        Args:
          table: table with these columns, and possibly others. The rows of a data frame count as lines 1 to N.

        Raises:
          JaxpflError: if a column is missing, a string is not a known level, or a cell of a numeric column is neither a
            number nor a missing value that can be replaced; the message names the line and the column.
        """
        table = table if isinstance(table, Table) else csv_text.table_of(table)
        table = table._replace(missing=self.missing)
        return np.concatenate([column.apply(table) for column in self.columns], axis=1)

    def to_json(self) -> dict[str, Any]:
        """Return the record as a mapping of JSON values."""
        fills = {str(client): list(own) for client, own in (self.client_fills or {}).items()}
        return self._asdict() | {"columns": [column._asdict() for column in self.columns], "client_fills": fills}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> TableColumns:
        """Return the record that `to_json` wrote.

        Raises:
          KeyError, TypeError: if the mapping is not a result of `to_json`.
        """
        columns = [Column(**{**own, "levels": tuple(own["levels"])}) for own in record["columns"]]
        fills = {int(client): tuple(own) for client, own in record["client_fills"].items()} or None
        return cls(tuple(columns), tuple(record["missing"]), record["per_client"], fills)


def columns_of(
    table: Table, names: Sequence[str], dates: Collection[str] = (), *, per_client: bool = False
) -> TableColumns:
    """Choose the features of a table's columns from their cells.

    At first, a missing value is replaced by the column's first value; `jaxpfl.data.fills_of` later computes
    replacements from the training rows. A column of strings causes a warning if it has many levels, or if the strings
    are dates.

    Args:
      table: table to read.
      names: columns that become features.
      dates: names of the columns with dates.
      per_client: as in `TableColumns`.

    Raises:
      JaxpflError: if a column is neither numeric nor categorical, or has no value at all.
    """
    return TableColumns(tuple(_column(table, name, name in dates) for name in names), table.missing, per_client)


def _column(table: Table, name: str, is_date: bool) -> Column:
    lacking = table.missing_in(name)
    if lacking.any():
        if lacking.all():
            raise JaxpflError(f"{table.path}: column {shown(name)} has no value: leave it out with --ignore {name}")
        known = table._replace(cells=table.cells[~lacking])
        column = _column(known, name, is_date)
        first = known.cells[name].iloc[0] if column.levels else float(column.apply(known)[0, 0])
        return column._replace(gaps=True, fill=first)
    if is_date:
        return date_column(table, name)
    if numbers_in(table, name) is not None:
        return Column(name, "numeric")
    texts = np.unique(np.array(table.texts(name)))
    rows, dates = len(table.cells), _formats(table.cells[name].drop_duplicates())
    way = f"leave it out with --ignore {shown(name)}" + (
        f", or read it as dates with --date {shown(name)}" if dates else ""
    )
    if len(texts) > min(_MOST_TEXTS, max(_FREE * rows, 2)):
        raise JaxpflError(
            f"{table.path}: column {shown(name)} has {len(texts)} different values in {rows} rows, too many "
            f"for categories: {way}"
        )
    if len(texts) > _MANY_TEXTS or dates:
        warn(f"{table.path}: column {shown(name)} becomes {len(texts)} features, one per value; to avoid this, {way}")
    return Column(name, "categorical", tuple(texts.tolist()))


def date_column(table: Table, name: str) -> Column:
    """Return a column of dates, with the format that fits all its dates.

    Raises:
      JaxpflError: if no format fits all dates, or if two formats fit because days and months cannot be distinguished.
    """
    formats = _formats(table.cells[name])
    if len(formats) > 1:
        raise JaxpflError(
            f"{table.path} line {table.lines[0]}: column {shown(name)} contains {shown(table.cells[name].iloc[0])}, "
            "and no row shows which number is the day: write dates such as 2025-01-31"
        )
    if not formats:
        wrong = min((np.isnan(days_of(table.cells[name], one)) for one in _DATES), key=np.sum)
        raise _no_date(table, name, int(wrong.argmax()))
    return Column(name, "date", date_format=formats[0])


def days_of(cells: Any, date_format: str) -> np.ndarray:
    """Return dates as days since 1970 (UTC unless they name a time zone), [N]; other cells become NaN."""
    import pandas

    times = pandas.to_datetime(pandas.Series(cells), format=date_format, utc=True, errors="coerce")
    return ((times - pandas.Timestamp(0, tz="UTC")) / pandas.Timedelta(days=1)).to_numpy(np.float64)


def _formats(cells: Any) -> list[str]:
    """Return the date formats that fit all cells; the list is empty if no format does."""
    return [one for one in _DATES if not np.isnan(days_of(cells, one)).any()]


def _no_date(table: Table, name: str, row: int) -> JaxpflError:
    cell = shown(table.cells[name].iloc[row])
    line = f"{table.path} line {table.lines[row]}"
    return JaxpflError(
        f"{line}: column {shown(name)} contains {cell}, not a date: write it like the other rows, or as 2025-01-31"
    )


def check_single(table: Table, column: str, numbers: np.ndarray) -> None:
    """Check that the numbers of a column are in the range of float32; NaN is allowed."""
    with np.errstate(over="ignore"):
        beyond = np.isinf(numbers.astype(np.float32))
    if beyond.any():
        line = table.lines[int(beyond.argmax())]
        raise JaxpflError(f"{table.path} line {line}: column {shown(column)} contains a number beyond float32's range")


def numbers_in(table: Table, name: str) -> np.ndarray | None:
    """Convert a column of N cells to numbers, [N]; return None if the column contains strings.

    Raises:
      JaxpflError: if most cells are numbers but others are not, or if most cells have percent or currency signs.
    """
    found = table.parsed(name)
    wrong = np.flatnonzero(np.isnan(found))
    if not len(wrong):
        return found
    if len(wrong) < len(found) / 2:
        cell = table.cells[name].iloc[wrong[0]]
        raise JaxpflError(
            f"{table.path} line {table.lines[wrong[0]]}: column {shown(name)} contains {shown(cell)}, but most other "
            "rows contain numbers"
        )
    marked = [cell for cell in table.cells[name] if _MARKED.fullmatch(cell.strip())]
    if len(marked) > len(found) / 2:
        raise JaxpflError(
            f"{table.path}: column {shown(name)} contains numbers with a percent or currency sign, such as "
            f"{shown(marked[0])}: remove the signs, or leave the column out with --ignore {shown(name)}"
        )
    return None
