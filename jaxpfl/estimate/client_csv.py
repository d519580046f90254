"""The user's own clients, from a CSV file: a row for each client, or a row for each sample."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpfl.data.csv_rows import read_rows
from jaxpfl.errors import JaxpflError

ID = "client"


class Clients(NamedTuple):
    """Names [m], and samples, a list of arrays [n_i, d] (or [n_i] where a sample is one number)."""

    names: list[str]
    samples: list[np.ndarray]


def read(path: Path) -> Clients:
    """Reads clients.

    Long format: a header ``client,value`` (or ``client,value1,value2,...``: samples of d numbers) and a row for each
    sample; a client's rows need not stand together. Else a row for each client with its samples, one number each: a
    first column that is no number, or that a header calls ``client``, names them; shorter rows and empty cells are
    clients with fewer samples.

    Raises:
      JaxpflError: a file that cannot be read, a cell that is no finite number (with its line), a client without
        samples, or no clients.
    """
    rows = read_rows(path)
    if not rows:
        raise JaxpflError(f"{path}: no clients in it")
    header = [cell.lower() for cell in rows[0][1]]
    if len(header) > 1 and all(cell.startswith("value") for cell in header[1:]):
        if header[0] != ID:  # a row for each sample would be taken for a client, and its client for a sample
            raise JaxpflError(f"{path}: rows of samples need the header client,value, got {','.join(rows[0][1])}")
        return _long(path, rows[1:], len(header))
    has_header = header[0] == ID or not any(_is_number(cell) for cell in rows[0][1][1:] or rows[0][1])
    body = rows[1:] if has_header else rows
    if not body:
        raise JaxpflError(f"{path}: a header, and no clients below it")
    named = (has_header and header[0] == ID) or not _is_number(body[0][1][0])
    names, samples, seen = [], [], set()
    for place, (line, row) in enumerate(body):
        name, cells = (row[0], row[1:]) if named else (str(place), row)
        if name in seen:
            raise JaxpflError(
                f"{path} line {line}: client {name!r} twice: rows of samples need the header client,value"
            )
        seen.add(name)
        own = [_number(path, line, cell) for cell in cells if cell]
        if not own:
            raise JaxpflError(f"{path} line {line}: client {name!r} has no samples")
        names.append(name)
        samples.append(np.array(own))
    return Clients(names, samples)


def _long(path: Path, rows: list[tuple[int, list[str]]], width: int) -> Clients:
    found: dict[str, list[list[float]]] = {}
    for line, row in rows:
        if len(row) != width or not row[0]:
            raise JaxpflError(f"{path} line {line}: needs a client and {width - 1} values, got {len(row)} cells")
        found.setdefault(row[0], []).append([_number(path, line, cell) for cell in row[1:]])
    if not found:
        raise JaxpflError(f"{path}: a header, and no samples below it")
    samples = [np.array(own) for own in found.values()]
    return Clients(list(found), [own[:, 0] for own in samples] if width == 2 else samples)


def write(path: Path, columns: dict[str, list]) -> None:
    """Writes columns of the same length under their names."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def _number(path: Path, line: int, cell: str) -> float:
    if not _is_number(cell) or not math.isfinite(float(cell)):
        raise JaxpflError(f"{path} line {line}: {cell!r} is no finite number")
    return float(cell)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
