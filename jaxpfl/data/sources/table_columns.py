"""Features of a table: the columns that become features, and the values that replace missing ones.

A column of numbers is a feature. A column of text becomes a 0/1 feature for each distinct text (level). A column with
missing values has one more feature, which indicates them. The record of these choices gives the features of new rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from jaxpfl.data.sources import csv_text
from jaxpfl.data.sources.csv_text import MISSING, Table
from jaxpfl.support.errors import JaxpflError, printable, shown
from jaxpfl.support.files import check_fits

if TYPE_CHECKING:
    import pandas

Kind: TypeAlias = Literal["numeric", "categorical"]

_MOST_TEXTS = 1000
_FREE = 0.5  # a column whose distinct texts exceed this fraction of the rows is not categorical
_MARKED = re.compile(r"[-+]?\s*[$€£¥]\s*[-+]?\d[\d.,' ]*|[-+]?\d[\d.,' ]*[%$€£¥]")
"""Cells with a number and a percent or currency sign, which would otherwise become categories."""


class Column(NamedTuple):
    """A column of a table and its features.

    Attributes:
      name: name of the column.
      kind: "numeric" for one feature, or "categorical" for a 0/1 feature for each level.
      levels: distinct texts of a categorical column, in the order of their features.
      gaps: whether values may be missing; the last feature of the column then indicates missing values.
      fill: number or level that replaces missing values; None if it is unknown or no value may be missing. Without it,
        all features of a missing value are 0, except the indicator.
    """

    name: str
    kind: Kind
    levels: tuple[str, ...] = ()
    gaps: bool = False
    fill: float | str | None = None

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Name of each feature."""
        values = [f"{self.name} = {level}" for level in self.levels] if self.kind == "categorical" else [self.name]
        return (*values, *([f"{self.name} missing"] if self.gaps else []))

    def apply(self, table: Table) -> np.ndarray:
        """Return the features of a table's rows, float64 [N, d], as `TableColumns.apply` does."""
        name = table.find(self.name)
        cells = table.cells[name]
        lacking = table.missing_in(name)
        if lacking.any() and not self.gaps:
            line = table.lines[int(lacking.argmax())]
            raise JaxpflError(f"{table.path} line {line}: no value in column {shown(name)}: fill it in")
        if self.kind == "categorical":
            check_fits(table.path, 8 * len(self.levels) * len(cells))
            places = self.places(cells.mask(lacking, self.fill))
            unknown = (places < 0) & ~(lacking & (self.fill is None))
            if unknown.any():
                row = int(unknown.argmax())
                known = printable(", ".join(self.levels), 200)
                raise JaxpflError(
                    f"{table.path} line {table.lines[row]}: column {shown(name)} holds {shown(cells.iloc[row])}, which "
                    f"is none of its known texts: {known}"
                )
            features = (places[:, None] == np.arange(len(self.levels))).astype(np.float64)
        else:
            numbers = table.numbers(name, missing=True)
            check_single(table, name, numbers)
            features = np.where(lacking, 0.0 if self.fill is None else self.fill, numbers)[:, None]
        return np.column_stack([features, lacking]) if self.gaps else features

    def places(self, cells: Any) -> np.ndarray:
        """Return the place of each text among the levels, or -1 if it is not a level."""
        import pandas

        return pandas.Index(self.levels, dtype=object).get_indexer(pandas.Index(cells, dtype=object))


class TableColumns(NamedTuple):
    """The columns of a table that become features, in the order of the features.

    Attributes:
      columns: columns and their features.
      missing: words that mark a cell without a value, in lower case.

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

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features, [d]."""
        return tuple(name for column in self.columns for name in column.feature_names)

    def apply(self, table: Table | pandas.DataFrame) -> np.ndarray:
        """Return the features of a table's rows, which are not scaled, float64 [N, d].

        Args:
          table: table with these columns, and possibly others. The rows of a data frame count as lines 1 to N.

        Raises:
          JaxpflError: if a column is missing, a text is not a known level, or a cell of a numeric column is neither a
            number nor a missing value that can be replaced; the message names the line and the column.
        """
        table = table if isinstance(table, Table) else csv_text.table_of(table)
        table = table._replace(missing=self.missing)
        return np.concatenate([column.apply(table) for column in self.columns], axis=1)

    def to_json(self) -> dict[str, Any]:
        """Return the record as a mapping of JSON values."""
        return {"columns": [column._asdict() for column in self.columns], "missing": list(self.missing)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> TableColumns:
        """Return the record that `to_json` wrote.

        Raises:
          KeyError, TypeError: if the mapping is not such a record.
        """
        columns = [Column(**{**own, "levels": tuple(own["levels"])}) for own in record["columns"]]
        return cls(tuple(columns), tuple(record["missing"]))


def columns_of(table: Table, names: Sequence[str]) -> TableColumns:
    """Choose the features of a table's columns from their cells.

    Raises:
      JaxpflError: if a column has neither numbers nor categories.
    """
    return TableColumns(tuple(_column(table, name) for name in names), table.missing)


def _column(table: Table, name: str) -> Column:
    if numbers_in(table, name) is not None:
        return Column(name, "numeric")
    texts = np.unique(np.array(table.texts(name)))
    rows = len(table.cells)
    if len(texts) > min(_MOST_TEXTS, max(_FREE * rows, 2)):
        raise JaxpflError(
            f"{table.path}: column {shown(name)} has {len(texts)} different texts in {rows} rows, too many "
            f"for categories: leave it out with --ignore {shown(name)}"
        )
    return Column(name, "categorical", tuple(texts.tolist()))


def check_single(table: Table, column: str, numbers: np.ndarray) -> None:
    """Check that the numbers of a column are in the range of float32; NaN is allowed."""
    with np.errstate(over="ignore"):
        beyond = np.isinf(numbers.astype(np.float32))
    if beyond.any():
        line = table.lines[int(beyond.argmax())]
        raise JaxpflError(f"{table.path} line {line}: column {shown(column)} holds a number beyond float32's range")


def numbers_in(table: Table, name: str) -> np.ndarray | None:
    """Return a column as numbers, [N], or None if it has text.

    Raises:
      JaxpflError: if a column of numbers has text in some cells, or percent or currency signs.
    """
    found = table.parsed(name)
    wrong = np.flatnonzero(np.isnan(found))
    if not len(wrong):
        return found
    if len(wrong) < len(found) / 2:
        cell = table.cells[name].iloc[wrong[0]]
        raise JaxpflError(
            f"{table.path} line {table.lines[wrong[0]]}: column {shown(name)} holds {shown(cell)}, but numbers in most "
            "other rows"
        )
    marked = [cell for cell in table.cells[name] if _MARKED.fullmatch(cell.strip())]
    if len(marked) > len(found) / 2:
        raise JaxpflError(
            f"{table.path}: column {shown(name)} holds numbers with a mark, such as {shown(marked[0])}: write them "
            f"without it, or leave the column out with --ignore {shown(name)}"
        )
    return None
