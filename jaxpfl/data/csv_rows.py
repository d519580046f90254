"""Rows of a CSV file with the lines that they stand on, for messages that name one."""

from __future__ import annotations

import csv
from pathlib import Path

from jaxpfl.errors import JaxpflError


def read_rows(path: Path) -> list[tuple[int, list[str]]]:
    """Every row that is not empty, as (line, counted from 1, and its cells without the space around them).

    Raises:
      JaxpflError: for a file that cannot be read.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [(line, [cell.strip() for cell in row]) for line, row in enumerate(csv.reader(file), start=1)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise JaxpflError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    return [(line, row) for line, row in rows if any(row)]
