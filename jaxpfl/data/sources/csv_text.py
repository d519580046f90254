"""Tables in CSV text of any dialect: the separator and the decimal mark are detected, given, or refused as ambiguous.

Python's ``csv`` splits the lines. Its ``Sniffer`` and the readers of pandas and polars are not used because they guess:
a wrong separator or a number with a comma must be an error here, not a column of text.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Literal, NamedTuple, TypeAlias

from jaxpfl import files
from jaxpfl.errors import JaxpflError

Separator: TypeAlias = Literal["tab", "semicolon", "bar", "comma", "whitespace"]
Decimal: TypeAlias = Literal["point", "comma"]

SEPARATORS: dict[Separator, str] = {"tab": "\t", "semicolon": ";", "bar": "|", "comma": ",", "whitespace": " "}
MISSING = ("", "na", "n/a", "#n/a", "nan", "null", "none")
"""Cells without a value, in any case."""

_TRUTH = {"true": 1.0, "false": 0.0}
_PLAIN = r"[+-]?(?:\d++MARK?+\d*+|MARK\d++)(?:[eE][+-]?\d++)?"  # without a step back: cells may be long
_NUMBER: dict[Decimal, re.Pattern[str]] = {
    "point": re.compile(_PLAIN.replace("MARK", r"\."), re.ASCII),
    "comma": re.compile(_PLAIN.replace("MARK", ","), re.ASCII),
}
_MARKS = ".,+-eE"
_LIKE_NUMBER = re.compile(r"[.,+\-eE]*+\d[\d.,+\-eE]*+", re.ASCII)
_THOUSAND = re.compile(r"[+-]?[1-9]\d{0,2}[.,]\d{3}", re.ASCII)
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?P<mark>[.,'\u2019\s])\d{3}(?:(?P=mark)\d{3})*+(?:[.,]\d++)?")
_DOUBT = (
    "line {}: {!r} is a decimal number or one in thousands, and no other number tells: give --decimal {}, or take the "
    "marks of thousands out"
)
_MEMORY = 30  # times its length that a table takes as cells of text
_HEAD = 500
"""Number of rows from which the separator is detected; a different one further down is an error there."""


class Table(NamedTuple):
    """Rows of cells, stripped of surrounding space.

    Attributes:
      path: of the file, for messages.
      rows: non-empty rows, as (line, counted from 1, and cells), possibly of different lengths.
      separator, decimal: of the text.
    """

    path: Path
    rows: list[tuple[int, list[str]]]
    separator: Separator
    decimal: Decimal

    def number(self, cell: str) -> float | None:
        """The number in a cell, 1 and 0 for TRUE and FALSE; None if there is none."""
        return parse(cell, self.decimal)


def read(path: Path, separator: Separator | None = None, decimal: Decimal | None = None) -> Table:
    """Read a table of UTF-8 text, or UTF-16 with a byte-order mark.

    Args:
      path: of the file.
      separator: of the cells; detected from the numbers unless given.
      decimal: the decimal mark; detected from the numbers unless given.

    Raises:
      JaxpflError: a file that cannot be read, quotes that are not closed, two possible separators, or numbers of which
        it cannot be told whether their comma stands for decimals or thousands.
    """
    text = text_of(path)
    said = re.match(r'"?sep=(.)"?\r?\n', text)  # Excel's own first line
    if said:
        text = "\n" + text[said.end() :]  # lines keep their numbers
        separator = separator or next((name for name, mark in SEPARATORS.items() if mark == said[1]), None)
    name = separator or _separator(path, text)
    rows = split(path, text, name)
    width = max((j for _, row in rows for j, cell in enumerate(row, start=1) if cell), default=0)
    rows = [(line, row[:width]) for line, row in rows]  # separators at the end of lines make no column
    return Table(path, rows, name, decimal or _decimal(path, rows, name))


def is_missing(cell: str) -> bool:
    """True if a cell has no value: it is empty or one of `MISSING`."""
    return cell.lower() in MISSING


def parse(cell: str, decimal: Decimal) -> float | None:
    """The finite number in a cell; None if there is none."""
    if not _NUMBER[decimal].fullmatch(cell):
        return _TRUTH.get(cell.lower())
    value = float(cell.replace(",", "."))
    return value if math.isfinite(value) else None


def has_thousands(cell: str) -> bool:
    """True if a cell looks like a number with thousands marks, such as 1.234,50, 1,234.50, or 1 234."""
    return bool(_THOUSANDS.fullmatch(cell))


def text_of(path: Path) -> str:
    """Text of a UTF-8 file, or a UTF-16 file with a byte-order mark.

    Raises:
      JaxpflError: a file that cannot be read.
    """
    try:
        raw = files.contents(path, _MEMORY)
        utf16 = raw.startswith((b"\xff\xfe", b"\xfe\xff"))
        return raw.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise JaxpflError(f"cannot read {path}: {' '.join(str(error).split())}") from None


def split(path: Path, text: str, separator: Separator, most: int | None = None) -> list[tuple[int, list[str]]]:
    """Non-empty rows, as (line, stripped cells), the first ``most`` of them.

    Raises:
      JaxpflError: quotes that are not closed.
    """
    if separator == "whitespace":
        text = "\n".join(line.strip() for line in text.replace("\t", " ").splitlines())
    return list(islice(rows_of(path, io.StringIO(text, newline=""), separator), most))


def rows_of(path: Path, text: Iterable[str], separator: Separator) -> Iterator[tuple[int, list[str]]]:
    """Iterate over the non-empty rows of lines of text, as (line, stripped cells).

    Raises:
      JaxpflError: quotes that are not closed.
    """
    lines = csv.reader(text, delimiter=SEPARATORS[separator], skipinitialspace=True, strict=True)
    try:
        for row in lines:
            cells = [cell.strip() for cell in row]
            if any(cells):
                yield lines.line_num, cells
    except csv.Error as error:
        raise JaxpflError(f"cannot read {path} line {lines.line_num}: {error}") from None


@contextmanager
def opened(path: Path) -> Iterator[IO[str]]:
    """Open a UTF-8 file, or a UTF-16 file with a byte-order mark, to be read line by line.

    Raises:
      JaxpflError: a file that cannot be read, also further down.
    """
    try:
        with files.opened(path) as raw:
            utf16 = raw.read(2) in (b"\xff\xfe", b"\xfe\xff")
            raw.seek(0)
            yield io.TextIOWrapper(raw, encoding="utf-16" if utf16 else "utf-8-sig", newline="")
    except (OSError, UnicodeDecodeError) as error:
        raise JaxpflError(f"cannot read {path}: {' '.join(str(error).split())}") from None


def _separator(path: Path, text: str) -> Separator:
    """Detect the separator between a text's numbers."""
    parts: dict[Separator, list[list[str]]] = {}
    for name in SEPARATORS:
        try:
            rows = [cells for _, cells in split(path, text, name, _HEAD)]
        except JaxpflError:
            continue
        if 2 * sum(len(cells) > 1 for cells in rows) >= len(rows) > 0:
            parts[name] = rows
    if "whitespace" in parts and any(_joined(cell) for cell in parts["whitespace"][0]):
        del parts["whitespace"]
    regular: list[Separator] = [
        name
        for name, rows in parts.items()
        if name not in ("comma", "whitespace") and len(rows[0]) > 1 and len(set(map(len, rows))) == 1
    ]
    if len(regular) == 1:  # whatever its numbers look like: the comma in 1.234,50 separates nothing
        return regular[0]
    good: list[Separator] = [name for name, rows in parts.items() if _parses(rows)]
    for name in good:
        if name not in ("comma", "whitespace"):  # their commas are decimal ones, or belong to names
            return name
    if len(good) > 1:  # a separator splits the header, too
        even: list[Separator] = [
            name for name in good if len(parts[name][0]) >= max(map(len, parts[name][1:2]), default=0)
        ]
        good = even or good
    if len(good) > 1:
        raise JaxpflError(f"{path}: comma and whitespace both separate numbers: give --sep comma, or --sep whitespace")
    return (good or [*parts, "comma"])[0]


def _joined(cell: str) -> bool:
    """True if a cell of the first row holds names that another separator would divide."""
    return bool(re.search("[;,|]", cell)) and not _LIKE_NUMBER.fullmatch(cell)


def _parses(rows: list[list[str]]) -> bool:
    """True if cells below the first row are numbers, and none holds several that another separator would divide."""
    numbers = 0
    for cells in rows[1:] or rows:
        for cell in cells:
            number = parse(cell, "point") is not None or parse(cell, "comma") is not None
            if not number and (_holds_several(cell) or cell.endswith((",", ";"))):
                return False
            numbers += number or is_missing(cell)
    return 2 * numbers >= len(rows[1:] or rows)


def _holds_several(cell: str) -> bool:
    """True if a cell looks like several numbers divided by commas, semicolons, bars or space."""
    first, *others = re.split(r"[\s;|]+", cell)
    pieces = [
        first,
        *(piece for piece in others[:-1] if piece.strip(",")),
        *others[-1:],
    ]  # a comma surrounded by space also separates
    if not all(map(_LIKE_NUMBER.fullmatch, pieces)):
        return False
    return len(pieces) > 1 or "," in cell.strip(_MARKS)


def _decimal(path: Path, rows: list[tuple[int, list[str]]], separator: Separator) -> Decimal:
    """Detect the decimal mark: a comma if some numbers have one and none has a point."""
    doubtful = None
    sure = pointed = False
    for line, cells in rows:
        for cell in cells:
            if "," in cell and _NUMBER["comma"].fullmatch(cell):
                sure |= not _THOUSAND.fullmatch(cell)
                doubtful = doubtful or (line, cell)
            elif "." in cell and _NUMBER["point"].fullmatch(cell):
                pointed = True
                break
        if pointed:
            break
    if pointed and separator in ("semicolon", "tab"):  # as Excel writes where a point marks thousands
        doubt = _thousands_with_points(rows)
        if doubt is not None:
            raise JaxpflError(f"{path} {_DOUBT.format(*doubt, 'point')}")
    elif doubtful and not sure and not pointed:
        raise JaxpflError(f"{path} {_DOUBT.format(*doubtful, 'comma')}")
    return "comma" if doubtful and not pointed else "point"


def _thousands_with_points(rows: list[tuple[int, list[str]]]) -> tuple[int, str] | None:
    """Line and cell of a number such as 1.234 that may be in thousands; None if the points are decimal.

    They are decimal if another number of the column has decimals other than three, or if there is no number in the
    hundreds beside it.
    """
    for place in range(max(len(cells) for _, cells in rows)):
        column = [(line, cells[place]) for line, cells in rows if place < len(cells)]
        numbers = [(line, cell) for line, cell in column if _NUMBER["point"].fullmatch(cell)]
        pointed = [(line, cell) for line, cell in numbers if "." in cell]
        whole = [abs(float(cell)) for _, cell in numbers if "." not in cell]
        if pointed and all(_THOUSAND.fullmatch(cell) for _, cell in pointed) and 100 <= max(whole, default=0) < 1000:
            return pointed[0]
    return None
