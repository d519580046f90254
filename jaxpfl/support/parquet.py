"""Tables as columnar files, each value in its own type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpfl.support.errors import JaxpflError, printable
from jaxpfl.support.files import check_fits, opened, whole

if TYPE_CHECKING:
    import pandas

_MIXED = b"jaxpfl.values"
"""Metadata of a column that mixes types: the value behind each text, as JSON."""


def write_table(path: Path, table: pandas.DataFrame) -> list[str]:
    """Write a table atomically.

    A column of Parquet has one type. One that mixes text with numbers or switches (``cohort`` = 0.1m, 10) is written as
    text, with the values behind the texts in the column's metadata, from which `read_table` restores them.

    Returns:
      Names of the columns that were written as text though not all of their values are.

    Raises:
      UnwritableError: if the file cannot be written.
    """
    import pyarrow
    from pyarrow import parquet

    table = table.copy()
    behind = {name: values for name in table.columns if (values := _mixed(table[name]))}
    for name, values in behind.items():
        texts = {_exact(value): text for text, value in values.items()}
        table[name] = [None if _missing(value) else texts[_exact(value)] for value in table[name]]
    columns = pyarrow.Table.from_pandas(table, preserve_index=False)
    for name, values in behind.items():
        place = columns.schema.get_field_index(name)
        field = columns.schema.field(place).with_metadata({_MIXED: json.dumps(values)})
        columns = columns.set_column(place, field, columns.column(place))
    with whole(path, "wb") as file:
        parquet.write_table(columns, file)
    return list(behind)


def read_table(path: str | Path) -> pandas.DataFrame:
    """The table that `write_table` wrote, each value in its own type.

    Raises:
      JaxpflError: for a file that cannot be read.
    """
    import pandas
    from pyarrow import parquet

    try:
        with opened(Path(path)) as file:
            stored = parquet.ParquetFile(file)
            check_fits(path, 8 * stored.metadata.num_rows * stored.metadata.num_columns)
            columns = stored.read()
        table = columns.to_pandas()
        for field in columns.schema:
            if _MIXED in (field.metadata or {}):
                values = json.loads(field.metadata[_MIXED])
                found = [None if _missing(text) else values[text] for text in table[field.name]]
                table[field.name] = pandas.Series(found, dtype=object)
    except JaxpflError:
        raise
    except Exception as error:  # of a damaged file Arrow raises many kinds
        raise JaxpflError(f"cannot read {path}: {printable(' '.join(str(error).split()), 200)}") from error
    return table


def _mixed(column: Any) -> dict[str, Any]:
    """The value behind each text of a pandas column that mixes types; empty for a column of one type."""
    values = {_exact(value): value for value in column if not _missing(value)}
    if column.dtype != object or len({type(value) for value in values.values()}) < 2:
        return {}
    texts = {value if isinstance(value, str) else json.dumps(value): value for value in values.values()}
    return texts if len(texts) == len(values) else {json.dumps(value): value for value in values.values()}


def _exact(value: Any) -> str:
    """Name of a value and its type: 1 and True are equal."""
    return json.dumps(value)


def _missing(value: Any) -> bool:
    return value is None or value != value
